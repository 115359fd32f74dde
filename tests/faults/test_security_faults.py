"""Nothing that comes with data, names, parameters or files is run, reaches a shell, or becomes markup."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import socket
import sys
import tarfile
import time
from html.parser import HTMLParser
from importlib.metadata import version
from pathlib import Path

import numpy as np
import program
import psutil
import pytest
from PIL import Image

EVIL = "<img src=x onerror=alert(1)>"
SHELL = "$(touch owned) `touch owned`; touch owned"


class Elements(HTMLParser):
    """The elements of a page as a browser builds them, and its text; what styles and scripts hold is no text."""

    def __init__(self, page: str):
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict]] = []
        self.text: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text.append(data)


# --- reports ------------------------------------------------------------------------------------------------

TINY = {
    "methods": "softmax,st_jem", "n_iterations": 2, "judge_iterations": 2, "batch_size": 4, "n_steps": 1, "warmup": 1,
    "buffer_size": 8, "n_fresh": 8, "fresh_steps": 1, "log_every": 1, "width": 2, "n_val": 4, "n_test": 4, "n_train": 0,
}  # fmt: skip


@pytest.mark.timeout(600)
def test_names_of_classes_and_folders_are_text_in_the_report(copy, tmp_path, gets):
    rng = np.random.default_rng(0)
    folder = tmp_path / f"{EVIL} $x^$"
    for name in (EVIL, "$\\frac{1$", "a $b$ 数据", f"</script>{SHELL}".replace("/", "⁄")):
        (folder / name).mkdir(parents=True)
        for i in range(6):
            pixels = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{EVIL}{i}.png")
    program.smoke_with(copy, "03_cifar10", **TINY, image_folder=str(folder))
    program.smoke_with(copy, "05_calibration_ood", image_folder=str(folder), n_val=4, n_test=4, n_ood=4,
                       ood_colour="uniform")  # fmt: skip
    out = tmp_path / "out"
    done = program.study(copy, "--profile", "smoke", "--only", "03,05", "--out", str(out))
    assert done.code == 0, done.err
    for stem in ("03_cifar10", "05_calibration_ood"):
        page = Elements((out / "reports" / f"{stem}.html").read_text(encoding="utf-8"))
        pictures = [attributes for tag, attributes in page.tags if tag == "img"]
        assert pictures and all(picture["src"].startswith("data:image/png") for picture in pictures)
        assert not [attributes for _, attributes in page.tags if any(name.startswith("on") for name in attributes)]
        assert any(EVIL in text for text in page.text), "the name does not show as text"
    index = Elements((out / "index.html").read_text(encoding="utf-8"))
    assert not [tag for tag, _ in index.tags if tag == "script"]
    assert all(attributes["src"].startswith("data:image/") for tag, attributes in index.tags if tag == "img")
    assert not [attributes for _, attributes in index.tags if any(name.startswith("on") for name in attributes)]
    assert not list(tmp_path.rglob("owned"))
    gets(f"class and folder called {EVIL}, $\\frac{{1$", "the names as text in reports, tables and figures", done.code)


# --- loaders ------------------------------------------------------------------------------------------------


def test_a_parameter_file_runs_no_code(copy, tmp_path, gets):
    program.with_notebooks(copy, _01_first=["1"])
    file = copy / "notebooks" / "params" / "quick.yaml"
    file.write_text(f"01_first: !!python/object/apply:os.system ['touch {tmp_path}/owned']")
    done = program.study(copy, "--out", str(tmp_path / "out"))
    assert done.code == 2 and "quick.yaml is no valid parameter file" in done.sentence
    assert not (tmp_path / "owned").exists() and not (tmp_path / "out").exists()
    gets("YAML that asks for os.system", done.sentence, done.code)


def test_reading_a_notebook_runs_nothing_of_it(copy, tmp_path, gets):
    program.with_notebooks(copy, _01_first=["1"], _02_second=["1"])
    path = copy / "notebooks" / "02_second.ipynb"
    call = f"__import__('os').system('touch {tmp_path}/owned')"
    path.write_text(path.read_text().replace("results_dir: str =", f"results_dir: {call} ="))
    done = program.study(copy, "--only", "01", "--out", str(tmp_path / "out"))
    assert not (tmp_path / "owned").exists(), "a notebook that was not asked for was run"
    assert done.code == 2 and "02_second.ipynb: A parameter's type must be a plain type" in done.sentence
    gets("a notebook whose parameter's type is a call", done.sentence, done.code)


# --- shells -------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_arguments_reach_no_shell(copy, tmp_path, gets):
    program.with_notebooks(copy, _01_first=[program.LEAVE])
    (copy / "environment.yml").write_text(f"- python=3.11\n- papermill=={version('papermill')}\n")
    environment = {**os.environ, "VIRTUAL_ENV": str(Path(sys.executable).parent.parent), "OMP_NUM_THREADS": "1"}
    where = tmp_path / "where"
    where.mkdir()
    done = program.subprocess.run(
        ["bash", str(copy / "run_all.sh"), "--out", SHELL, "--only", "01"],
        cwd=where, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [path.name for path in where.iterdir()] == [SHELL], "the name of the results folder, and nothing else"
    left = json.loads((where / SHELL / "left.json").read_text())
    assert left["results_dir"] == str(where / SHELL) and not list(tmp_path.rglob("owned"))
    gets(f"--out '{SHELL}'", "a folder of that name, no command run", done.returncode)


# --- archives -----------------------------------------------------------------------------------------------


def test_an_archive_writes_nothing_outside(copy, tmp_path, gets):
    place = tmp_path / "data"
    place.mkdir()
    with tarfile.open(place / "cifar10-images.tar.xz", "w:xz") as tar:
        pixels = io.BytesIO()
        Image.new("RGB", (32, 32)).save(pixels, "PNG")
        for name in ("../../train/cat/escaped.png", "/tmp/jemlib-escaped/train/dog/escaped.png"):
            member = tarfile.TarInfo(name)
            member.size = len(pixels.getvalue())
            tar.addfile(member, io.BytesIO(pixels.getvalue()))
        link = tarfile.TarInfo("train/cat/link.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    code = "import sys; from jemlib import images; images.cifar10(sys.argv[1])"
    done = program.run(copy, "-c", code, str(place))
    assert done.code == 1 and "does not hold train/ and test/" in done.sentence
    assert not list(tmp_path.rglob("escaped.png")) and not Path("/tmp/jemlib-escaped").exists()
    gets("an archive with ../ and absolute paths", done.sentence.removeprefix("jemlib.data."), done.code)


# --- servers ------------------------------------------------------------------------------------------------


def listening(pid: int) -> set[tuple[str, int]]:
    """Addresses on which a process and its children listen for the network."""
    found = set()
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN or connection.type == socket.SOCK_DGRAM:
                found.add(connection.laddr)
    return found


def test_a_run_listens_on_the_loopback_alone(copy, tmp_path, gets):
    program.with_notebooks(copy, _01_first=["import pathlib, time\npathlib.Path('here').touch()\ntime.sleep(60)"])
    process = program.start(copy, "-P", "-m", "jemlib", "run", "--out", str(tmp_path / "out"))
    try:
        for _ in range(600):
            if (copy / "notebooks" / "here").exists():
                break
            time.sleep(0.1)
        found = listening(process.pid)
    finally:
        process.terminate()
        program.end(process)
    assert {address for address, _ in found} <= {"127.0.0.1", "::1"}
    gets("a run: who can reach it", f"{len(found)} ports of its kernel, all on the loopback", 0)


def test_the_lab_listens_on_the_loopback_alone(copy, gets, tmp_path):
    home = {name: str(tmp_path / name) for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR")}
    command = ("-P", "-m", "jemlib", "lab", "--no-browser", "--allow-root", "--ServerApp.port=0")
    process = program.start(copy, *command, env=home)
    found: set = set()
    try:
        for _ in range(900):
            found = listening(process.pid)
            if found or process.poll() is not None:
                break
            time.sleep(0.1)
    finally:
        server = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        done = program.end(process)
    assert found, done.err
    assert not psutil.wait_procs(server, timeout=20)[1], "the server ends with the command"
    assert {address for address, _ in found} <= {"127.0.0.1", "::1"}
    assert re.search(r"token=[0-9a-f]{32}", done.err), "and it asks for a token"
    gets("run_all.sh lab: who can reach it", "the loopback alone, with a token", 0)
