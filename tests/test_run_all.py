"""run_all.sh: arguments, and the environment it finds or makes (pip and conda replaced by recorders)."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest

from jemlib.provenance import repo_root

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


def call(script: Path, *arguments: str, cwd: Path, **environment: str):
    clean = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH")}
    return subprocess.run(
        ["bash", str(script), *arguments], cwd=cwd, env=clean | environment, capture_output=True, text=True, timeout=120
    )


@pytest.fixture
def copy(tmp_path):
    """A copy of what run_all.sh needs, in a folder with a space."""
    copy = tmp_path / "a copy"
    copy.mkdir()
    for name in ("run_all.sh", "environment.yml", "pyproject.toml"):
        shutil.copy(repo_root() / name, copy / name)
    shutil.copytree(repo_root() / "jemlib", copy / "jemlib", ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.fixture
def tools(tmp_path):
    """A folder for PATH with the few commands that run_all.sh uses, without conda and without Python."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "basename", "cat", "chmod", "cksum", "dirname", "mkdir", "rm", "sed"):
        (tools / name).symlink_to(shutil.which(name))
    return tools


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)
    return path


def test_help_needs_no_environment(copy, tools, tmp_path):
    done = call(copy / "run_all.sh", "--help", cwd=tmp_path, PATH=str(tools))
    assert done.returncode == 0
    assert "--profile" in done.stdout and "lab" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fast"], "--fast"), (["tset"], "tset"), (["--profile", "slow"], "'slow'"), (["--seed", "-1"], "--seed"),
        (["--profile"], "--profile needs a value"), (["--only="], "--only needs a value"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused_before_anything_is_installed(copy, tools, tmp_path, arguments, message):
    done = call(copy / "run_all.sh", *arguments, cwd=tmp_path, PATH=str(tools))
    assert done.returncode == 2
    assert message in done.stderr
    assert not list(copy.glob(".*env"))


def test_without_python_one_sentence(copy, tools, tmp_path):
    done = call(copy / "run_all.sh", cwd=tmp_path, PATH=str(tools))
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "Python >= 3.11" in done.stderr


RECORDER = """\
[ "$1" = -c ] && exit "${CHECK:-1}"  # the question about pins
[ "$*" = "-m pip --version" ] && exit 0
echo "$@" >> "$LOG"
[ "$3" = install ] && exit "${INSTALL:-0}"
exit 7"""


def test_conda_once_then_never_again_and_repair(copy, tools, tmp_path):
    log = tmp_path / "log"
    log.touch()
    text = 'echo "conda $@" >> "$LOG"; mkdir -p "$5/bin"; cat "$RECORDER" > "$5/bin/python"; chmod +x "$5/bin/python"'
    script(tools / "conda", text)
    recorder = script(tmp_path / "recorder", RECORDER)

    def start(**environment):
        log.write_text("")
        done = call(copy / "run_all.sh", "--seed", "3", cwd=tmp_path, PATH=str(tools), LOG=str(log),
                    RECORDER=str(recorder), **environment)  # fmt: skip
        return done, log.read_text().splitlines()

    done, lines = start(CHECK="0", INSTALL="1")  # the installation breaks off
    assert done.returncode == 1 and "installation failed" in done.stderr
    done, lines = start(CHECK="0")  # the next start begins anew
    assert done.returncode == 7, done.stderr  # the exit code of `python -m jemlib` passes through
    assert re.fullmatch(r"conda create .*python=3\.11 pip", lines[0])
    assert "torch==" in lines[1] and "papermill==" in lines[1]
    assert "--no-deps --no-build-isolation --editable" in lines[2]
    assert lines[3:] == ["-P -m jemlib run --seed 3"]
    done, lines = start(CHECK="0")
    assert done.stdout == "" and lines == ["-P -m jemlib run --seed 3"]
    with (copy / "environment.yml").open("a") as file:  # another pin: packages only
        file.write("      - einops==0.8.1\n")
    done, lines = start(CHECK="0")
    assert "einops==0.8.1" in lines[0] and len(lines) == 3


@pytest.fixture(params=["flock", "mkdir"])
def start(request, copy, tools, tmp_path):
    """Starts run_all.sh with a conda that takes NAP seconds, in a shell that locks in one of its two ways."""
    names = ["sleep", *(["flock"] if request.param == "flock" else [])]
    if not all(map(shutil.which, names)):
        pytest.skip(f"needs {', '.join(names)}")
    for name in names:
        (tools / name).symlink_to(shutil.which(name))
    text = 'echo "conda" >> "$LOG"; sleep "$NAP"; mkdir -p "$5/bin"; cat "$RECORDER" > "$5/bin/python"; '
    script(tools / "conda", text + 'chmod +x "$5/bin/python"')
    recorder = script(tmp_path / "recorder", RECORDER)

    def call(nap):
        environment = {"PATH": str(tools), "LOG": str(tmp_path / "log"), "RECORDER": str(recorder), "CHECK": "0"}
        command = ["bash", str(copy / "run_all.sh"), "--seed", "3"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        environment["NAP"] = str(nap)
        return subprocess.Popen(command, cwd=tmp_path, env=environment, start_new_session=True, **pipes)

    return call


def test_two_first_starts_at_once_make_one_environment(start, tmp_path):
    processes = [start(1), start(1)]
    printed = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [7, 7], printed
    lines = (tmp_path / "log").read_text().splitlines()
    assert sorted(line.split()[-1] for line in lines if "install" not in line) == ["3", "3", "conda"]
    assert sum("install" in line for line in lines) == 2
    assert sorted(text.count("waiting for it") for text in printed) == [0, 1]


def test_a_start_that_was_killed_leaves_nothing_locked(start, tmp_path):
    first = start(20)  # its conda outlives it
    for _ in range(300):
        if (tmp_path / "log").is_file():
            break
        time.sleep(0.1)
    first.kill()
    first.wait()
    second = start(0)
    try:
        second.wait(timeout=15)
    finally:
        second.kill()
        os.killpg(first.pid, signal.SIGKILL)
    assert second.returncode == 7


def test_an_active_environment_with_the_pins_is_used(copy, tmp_path):
    active = script(
        tmp_path / "active" / "bin" / "python", 'echo "$PYTHONPATH"; echo "$@"; [ "$1" = -c ]'
    ).parent.parent
    done = call(copy / "run_all.sh", "lab", "--no-browser", cwd=tmp_path, VIRTUAL_ENV=str(active))
    assert done.stdout.splitlines()[-2:] == [str(copy), "-P -m jemlib lab --no-browser"]
    done = call(copy / "run_all.sh", "sweep", "a.ipynb", "--seeds", "0-2", cwd=tmp_path, VIRTUAL_ENV=str(active))
    assert done.stdout.splitlines()[-1] == "-P -m jemlib sweep a.ipynb --seeds 0-2"
    assert not list(copy.glob(".*env"))


def test_this_environment_answers_from_another_folder(copy, tmp_path):
    """The real thing, as far as the first notebook: arguments reach jemlib, whose message comes back."""
    (copy / "environment.yml").write_text(f"- python=3.11\n- papermill=={version('papermill')}\n")
    (copy / "notebooks" / "params").mkdir(parents=True)
    prefix = Path(sys.executable).parent.parent
    done = call(copy / "run_all.sh", "--only", "77", cwd=tmp_path, VIRTUAL_ENV=str(prefix))
    assert done.returncode == 2
    assert "There is no notebook '77'" in done.stderr
