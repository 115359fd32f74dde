#!/usr/bin/env bash
# Finds or makes the environment of environment.yml, then hands over to `python -m jemlib`.
set -euo pipefail

usage() {
  cat <<'TEXT'
Usage: ./run_all.sh [options]        run the notebooks and write results/<profile>/
       ./run_all.sh test [args]      run the tests; args go to pytest
       ./run_all.sh sweep [args]     a notebook over a grid of parameters; sweep --help lists the options
       ./run_all.sh lab [args]       open JupyterLab on the notebooks; args go to JupyterLab
       ./run_all.sh exec COMMAND ... any command in the environment, such as papermill or python

  --profile NAME   smoke, quick (default), hour, full or paper
  --only 01,02     only these notebooks, by number or name
  --seed N         replaces the seed of every notebook
  --force          train again what is already trained
  --data PATH      folder of the data sets (or set JEMLIB_DATA)
  --out PATH       results folder instead of results/<profile>
  --help           this text

It uses the active environment if that holds every version of environment.yml; else it makes one inside this
folder, once: with conda, mamba or micromamba where there is one (.conda-env), else with Python >= 3.11 (.venv).
TEXT
}

fail() { echo "run_all.sh: $*" >&2; exit "${code:-1}"; }
bad_usage() { code=2 fail "$* Try ./run_all.sh --help"; }

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)"
STAMP=".jemlib-complete"
LOCK="$ROOT/.environment.lock"

# --- arguments: what is wrong is said before anything is installed ---

check_arguments() {
  while [ $# -gt 0 ]; do
    case "$1" in
      -h | --help) usage; exit 0 ;;
      --force) shift ;;
      --profile=* | --only=* | --seed=* | --data=* | --out=*) check_value "${1%%=*}" "${1#*=}"; shift ;;
      --profile | --only | --seed | --data | --out)
        [ $# -ge 2 ] || bad_usage "$1 needs a value."
        check_value "$1" "$2"; shift 2 ;;
      *) bad_usage "There is no option or command '$1'." ;;
    esac
  done
}

check_value() {
  case "$1=$2" in
    --*=) bad_usage "$1 needs a value." ;;
    --profile=smoke | --profile=quick | --profile=hour | --profile=full | --profile=paper) ;;
    --profile=*) bad_usage "There is no profile '$2'." ;;
    --seed=*[!0-9]*) bad_usage "--seed must be a whole number >= 0, not '$2'." ;;
  esac
}

# --- the environment ---

pins() { sed -n 's/^ *- *\([A-Za-z0-9._-]*==[^ #]*\).*/\1/p' "$ROOT/environment.yml"; }

satisfies_pins() { # $1: a python; true if it has every pinned version
  local check='
import importlib.metadata as m, sys
if sys.version_info < (3, 11): sys.exit(1)
for pin in sys.argv[1:]:
    name, wanted = pin.split("==")
    try: found = m.version(name)
    except m.PackageNotFoundError: sys.exit(1)
    if found.split("+")[0] != wanted: sys.exit(1)  # "+cpu" and the like are builds of one version
'
  "$1" -c "$check" $(pins) 2>/dev/null
}

fingerprint() { { cat "$ROOT/environment.yml" "$ROOT/pyproject.toml"; echo "$ROOT"; } | cksum; }

is_complete() { # $1: an environment's folder; the stamp is written last, so it tells a whole installation
  [ -x "$1/bin/python" ] && [ "$(cat "$1/$STAMP" 2>/dev/null)" = "$(fingerprint)" ] && "$1/bin/python" -c ''
}

can_update() { # $1: an environment's folder: whole once, with other pins; what a killed installation left is not
  [ -f "$1/$STAMP" ] && "$1/bin/python" -m pip --version >/dev/null 2>&1
}

find_python() { # prints a Python >= 3.11 that can make a virtual environment
  local name
  for name in python3.11 python3 python3.12 python3.13 python3.14 python; do
    if "$name" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$name"; return
    fi
  done
  fail "no Python >= 3.11 with its venv module was found; install one, or conda, mamba or micromamba."
}

install_into() { # $1: an environment's folder, with python and pip in it
  echo "installing the packages into $(basename "$1") (some minutes, once) ..."
  rm -f "$1/$STAMP"
  local pip=("$1/bin/python" -m pip install -qq --disable-pip-version-check --no-input --no-warn-script-location)
  PYTHONNOUSERSITE=1 PIP_ROOT_USER_ACTION=ignore "${pip[@]}" $(pins) || fail "the installation failed; see above."
  # Without build isolation: setuptools is among the pins, so this step needs no network.
  PYTHONNOUSERSITE=1 PIP_ROOT_USER_ACTION=ignore "${pip[@]}" --no-deps --no-build-isolation --editable "$ROOT" ||
    fail "the installation of jemlib failed; see above."
  fingerprint > "$1/$STAMP"
  echo "installed."
}

lock() { # one start at a time makes the environment; the others wait
  [ -w "$ROOT" ] || fail "the environment cannot be made: $ROOT is not to be written to."
  local waiting="another start of run_all.sh is making the environment; waiting for it ..." owner="" tries=0
  if command -v flock >/dev/null; then
    exec 9>"$LOCK"
    # the kernel lets go of it however this process ends; where a file system has no locks, things go on without
    flock -n 9 || { echo "$waiting"; flock 9 || true; }
    return
  fi
  until mkdir "$LOCK.d" 2>/dev/null; do
    owner="$(cat "$LOCK.d/pid" 2>/dev/null || true)"
    # who was killed leaves its lock: one of no living process, or for seconds of none at all
    if [ "$tries" -gt 5 ] && [ -z "$owner" ] || { [ -n "$owner" ] && ! kill -0 "$owner" 2>/dev/null; }; then
      rm -rf "$LOCK.d"; continue
    fi
    [ "$tries" -gt 0 ] || echo "$waiting"
    tries=$((tries + 1))
    sleep 1
  done
  trap 'rm -rf "$LOCK.d"' EXIT
  echo $$ > "$LOCK.d/pid"
}

unlock() {
  exec 9>&-
  rm -rf "$LOCK.d"
  trap - EXIT
}

find_environment() { # sets PYTHON
  local candidate
  for candidate in "${VIRTUAL_ENV:-}/bin/python" "${CONDA_PREFIX:-}/bin/python" "$(command -v python3 || true)"; do
    if [ -x "$candidate" ] && satisfies_pins "$candidate"; then PYTHON="$candidate"; return; fi
  done
  if find_complete; then return; fi
  lock
  # without the lock's descriptor, so that nothing started here holds it longer than this process lives
  find_complete || make_environment 9>&-
  unlock
}

find_complete() { # sets PYTHON
  local candidate
  for candidate in "$ROOT/.conda-env" "$ROOT/.venv"; do
    PYTHON="$candidate/bin/python"
    if is_complete "$candidate"; then return; fi
  done
  return 1
}

make_environment() { # sets PYTHON
  local candidate tool
  tool="$(command -v conda || command -v mamba || command -v micromamba || true)"
  if [ -n "$tool" ]; then
    candidate="$ROOT/.conda-env"
    if ! can_update "$candidate"; then
      rm -rf "$candidate"
      echo "making .conda-env with $(basename "$tool") ..."
      "$tool" create --yes --quiet --prefix "$candidate" --channel conda-forge \
        "$(sed -n 's/^ *- *\(python=[0-9.]*\).*/\1/p' "$ROOT/environment.yml")" pip >"$ROOT/.conda-env.log" 2>&1 ||
        { cat "$ROOT/.conda-env.log" >&2; fail "$(basename "$tool") could not make the environment; see above."; }
      rm -f "$ROOT/.conda-env.log"
    fi
  else
    candidate="$ROOT/.venv"
    if ! can_update "$candidate"; then
      local base; base="$(find_python)"
      echo "making .venv with $("$base" --version) ..."
      "$base" -m venv --clear "$candidate" || fail "$base could not make a virtual environment; see above."
    fi
  fi
  install_into "$candidate"
  PYTHON="$candidate/bin/python"
}

# --- commands ---

command="${1:-run}"
case "$command" in
  test | lab | sweep) shift ;;
  exec) shift; [ $# -gt 0 ] || bad_usage "exec needs a command." ;;
  run) [ $# -eq 0 ] || shift; check_arguments "$@" ;;
  *) command=run; check_arguments "$@" ;;
esac

find_environment
# This folder's jemlib, even where another copy is installed.
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"

if [ "$command" = exec ]; then
  export PATH="$(dirname "$PYTHON"):$PATH" JUPYTER_PREFER_ENV_PATH=1
  # nbdiff: numbers in outputs count; execution counts, times and random cell ids do not
  export JUPYTER_CONFIG_PATH="$ROOT/jemlib/nbdime${JUPYTER_CONFIG_PATH:+:$JUPYTER_CONFIG_PATH}"
  exec "$@"
fi
if [ "$command" = test ]; then
  cd "$ROOT"
  exec "$PYTHON" -m pytest "$@"
fi
exec "$PYTHON" -P -m jemlib "$command" "$@"
