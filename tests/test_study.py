"""Strict parameters through the real papermill, and the runner with notebooks that fail, die or are interrupted."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from click.testing import CliRunner
from nbformat.v4 import new_code_cell, new_notebook, new_output

from jemlib import cli, reports, study
from jemlib.files import ResultsError
from jemlib.parameters import ParameterError, coerce, declarations
from jemlib.provenance import repo_root

DECLARATIONS = """\
include_anchor: bool = True
lr: float = 1e-2  # Adam; a = b
steps: int = 5
seeds: str = "0,1,2"
seed: int = 0
profile: str = "quick"
results_dir: str = "results/quick"
force: bool = False
"""
CONFIG = "from jemlib import study\nconfig = study.parameters(globals())"
TRAIN = "import json, pathlib\npathlib.Path('trained.json').write_text(json.dumps(config))"


def write_notebook(path: Path, cells: list[str], tagged: int | None = 0) -> Path:
    notebook = new_notebook(cells=[new_code_cell(cell) for cell in cells])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    if tagged is not None:
        notebook.cells[tagged].metadata["tags"] = ["parameters"]
    nbformat.write(notebook, path)
    return path


@pytest.fixture
def papermill(tmp_path):
    """Run a small notebook through papermill's command line; returns (exit code, its messages, config or None)."""

    def call(*arguments: str, cells=(DECLARATIONS, CONFIG, TRAIN), tagged=0):
        source = write_notebook(tmp_path / "study.ipynb", list(cells), tagged)
        with study.kernel_environment():
            done = subprocess.run(
                [sys.executable, "-m", "papermill", str(source), str(tmp_path / "out.ipynb"), *arguments],
                cwd=tmp_path, capture_output=True, text=True, timeout=120,
            )  # fmt: skip
        trained = tmp_path / "trained.json"
        return done.returncode, done.stderr, json.loads(trained.read_text()) if trained.exists() else None

    return call


# --- parameters ---


def test_text_that_stands_for_a_value_is_coerced(papermill):
    code, messages, config = papermill(
        "-p", "include_anchor", "false", "-y", "lr: 1e-3", "-r", "steps", "20", "-p", "seeds", "0"
    )  # fmt: skip
    assert code == 0, messages
    assert config["include_anchor"] is False
    assert (config["lr"], config["steps"], config["seeds"]) == (0.001, 20, "0")
    assert config["seed"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-p", "includ_anchor", "false"), "Unknown parameter 'includ_anchor': did you mean include_anchor?"),
        (("-p", "steps", "2.5"), "Parameter 'steps' must be int but is 2.5."),
        (("-p", "lr", "nan"), "Parameter 'lr' must be float but is nan."),
        (("-y", "{lr: true}"), "Parameter 'lr' must be float but is True."),
    ],
)
def test_mistakes_stop_the_notebook_before_it_trains(papermill, arguments, message):
    code, messages, config = papermill(*arguments)
    assert code != 0
    assert message in messages
    assert config is None


def test_a_notebook_without_the_tag_is_refused(papermill):
    code, messages, config = papermill("-p", "lr", "0.5", tagged=None)
    assert code != 0
    assert "no tag 'parameters'" in messages
    assert config is None


@pytest.mark.parametrize(
    ("kind", "value", "result"),
    [
        (bool, "false", False), (bool, "no", False), (bool, 1, True), (float, "1e-3", 1e-3), (float, 2, 2.0),
        (int, "20", 20), (int, 20.0, 20), (str, 7, "7"), (list[int], ["1", 2], [1, 2]), (int | None, None, None),
    ],
)  # fmt: skip
def test_coercion(kind, value, result):
    coerced = coerce("p", value, kind)
    assert coerced == result
    assert type(coerced) is type(result)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (bool, "maybe"), (bool, 2), (float, "abc"), (float, "inf"), (float, float("nan")), (float, True), (float, None),
        (int, 2.5), (int, "2.5"), (int, True), (str, True), (str, None), (list[int], [True]), (list[float], ["nan"]),
    ],
)  # fmt: skip
def test_refusal(kind, value):
    with pytest.raises(ParameterError, match="Parameter 'p' must be") as caught:
        coerce("p", value, kind)
    assert "\n" not in str(caught.value)


def executed(*cells: str) -> dict:
    """A namespace as IPython leaves it after these cells."""
    namespace = {"In": ["", *cells]}
    for cell in cells:
        exec(cell, namespace)
    return namespace


def test_the_effective_configuration_is_printed_and_written_back(capsys):
    namespace = executed("lr: float = 0.1\nsteps: int = 5", "# Parameters\nlr = '0.2'\n", "other: list = []; other = 3")
    config = study.parameters(namespace)
    assert config == {"lr": 0.2, "steps": 5}
    assert namespace["lr"] == 0.2
    assert capsys.readouterr().out.splitlines() == ["lr    = 0.2   (default: 0.1)", "steps = 5"]
    assert study.parameters(namespace) == config  # a cell that is run again


def test_running_the_declarations_again_brings_the_defaults_back():
    cell = "lr: float = 0.1"
    assert study.parameters(executed(cell, "# Parameters\nlr = 0.2", cell)) == {"lr": 0.1}


def test_a_given_value_that_was_overwritten_is_refused():
    with pytest.raises(ParameterError, match=r"'lr' was given as 0.2 but is 0.1 now"):
        study.parameters(executed("lr: float = 0.1", "# Parameters\nlr = 0.2", "lr = 0.1"))


def test_a_wrong_default_is_refused():
    with pytest.raises(ParameterError, match=r"'steps' must be int but is 2\.5"):
        study.parameters(executed("steps: int = 2.5"))
    with pytest.raises(ParameterError, match="No cell"):
        study.parameters(executed("steps = 2"))


def test_declarations_are_cells_of_nothing_else():
    source = "from typing import Literal\n# anchors\nanchor: Literal['own', 'none'] = 'own'\nn: int | None = None"
    assert [default for _, default in declarations(source).values()] == ["own", None]
    assert coerce("anchor", "none", declarations(source)["anchor"][0]) == "none"
    assert declarations("n: int = 1\nprint(n)") == {}
    assert declarations("%matplotlib inline") == {}


# --- the runner ---


@pytest.fixture
def folder(tmp_path):
    """A folder of two notebooks with a parameter file."""
    folder = tmp_path / "notebooks here"
    (folder / "params").mkdir(parents=True)
    write_notebook(folder / "01_first.ipynb", [DECLARATIONS, CONFIG, TRAIN])
    write_notebook(folder / "02_second.ipynb", [DECLARATIONS, CONFIG, "assert steps == 5, 'five steps'"])
    (folder / "params" / "quick.yaml").write_text("all: {seed: 1}\n01_first: {lr: 1e-3, steps: 7}\n")
    return folder


def test_a_run_leaves_copies_reports_index_and_times(folder, tmp_path, capfd):
    out = tmp_path / "out"
    assert study.run(seed=3, force=True, out=out, notebooks=folder) == 0
    config = json.loads((folder / "trained.json").read_text())  # kernels work in the notebooks' folder
    assert (config["lr"], config["steps"], config["seed"], config["force"]) == (0.001, 7, 3, True)
    assert config["results_dir"] == str(out)
    printed = capfd.readouterr()
    assert "[2/2] 02_second ok" in printed.out
    assert printed.err == ""
    for stem in ("01_first", "02_second"):
        copy = (out / "notebooks" / f"{stem}.ipynb").read_text()
        assert '"output_path": "' + stem in copy
        assert "<results_dir>" in copy and str(tmp_path) not in copy, "no folder of the machine"
        page = (out / "reports" / f"{stem}.html").read_text()
        assert f'<a href="reports/{stem}.html">{stem}</a>' in (out / "index.html").read_text()
        assert f"./run_all.sh --profile quick --seed 3 --only {stem[:2]}" in page
        assert f"notebook {stem}," in (out / "tables" / "timing.csv").read_text()

    # A failure afterwards: it is named, and nothing of the earlier run stays for it or for what needs it.
    write_notebook(folder / "01_first.ipynb", [DECLARATIONS, CONFIG, "raise ValueError('no <good>')"])
    needing = nbformat.read(folder / "02_second.ipynb", as_version=4)
    needing.metadata["jemlib"] = {"needs": ["01_first"]}
    nbformat.write(needing, folder / "02_second.ipynb")
    write_notebook(folder / "03_third.ipynb", [DECLARATIONS, CONFIG, "1"])
    assert study.run(out=out, notebooks=folder) == 1
    printed = capfd.readouterr()
    assert "01_first FAILED" in printed.err and "cell 4 (In [4]) raised ValueError: no <good>" in printed.err
    assert "02_second not run: it needs 01_first" in printed.err
    assert "[3/3] 03_third ok" in printed.out
    assert "stopped: 01_first FAILED, 02_second not run, 03_third ok" in printed.out
    assert {p.name for p in out.glob("notebooks/*")} == {"01_first.unfinished.ipynb", "03_third.ipynb"}
    page = (out / "reports" / "01_first.html").read_text()
    assert "<title>FAILED: 01_first (quick)</title>" in page
    assert "no &lt;good&gt;" in page and "no <good>" not in page
    assert not (out / "reports" / "02_second.html").exists()
    index = (out / "index.html").read_text()
    assert "FAILED: cell 4 (In [4]) raised ValueError: no &lt;good&gt;" in index
    assert "not run: it needs 01_first" in index


def test_executed_copies_hold_nothing_that_chance_decides(folder, tmp_path):
    table = "import pandas as pd\npd.DataFrame({'x': [1.0]}).style.highlight_max(props='color: red')"
    write_notebook(folder / "01_first.ipynb", [DECLARATIONS, CONFIG, table, table.split("\n")[1], "object()"])
    copies = []
    for name in ("one", "two"):
        assert study.run(only="01", out=tmp_path / name, notebooks=folder) == 0
        cells = nbformat.read(tmp_path / name / "notebooks" / "01_first.ipynb", as_version=4).cells
        copies.append([output.data for cell in cells[3:] for output in cell.outputs])
    assert copies[0] == copies[1]
    first, second = (data["text/html"] for data in copies[0][:2])
    assert "color: red" in first and "T_3_0_row0_col0" in first and "T_3_0" not in second, "ids differ within a page"


@pytest.mark.parametrize("path", ["/d", "/data"])
def test_a_folder_is_named_in_text_and_nowhere_else(path):
    picture = f"iVBORw0K{path}/AAAA{path}=="
    others = f"{path}base /home{path} {path}.bak {path}-old a{path}/b"
    html = f'<img src="data:image/png;base64,+{path}/{picture}"><a href="file://{path}/x">'
    output = new_output("display_data", {"text/plain": f"'{path}'", "text/html": html, "image/png": picture})
    stream = new_output("stream", text=f"read {path}, then {path}/MNIST\nin {path}.\n{others}\n{path}")
    notebook = new_notebook(cells=[new_code_cell(f'data_dir = "{path}"', outputs=[output, stream])])
    notebook.metadata["papermill"] = {"parameters": {"data_dir": path, "n": 1, "sets": [f"{path}/a", others]}}
    study.without_folder(notebook, path, "<data_dir>")
    nbformat.validate(notebook)
    assert notebook.metadata.papermill.parameters == {
        "data_dir": "<data_dir>",
        "n": 1,
        "sets": ["<data_dir>/a", others],
    }
    (cell,) = notebook.cells
    assert cell.source == 'data_dir = "<data_dir>"'
    shown = {
        "text/plain": "'<data_dir>'",
        "text/html": html.replace(f"//{path}/x", "//<data_dir>/x"),
        "image/png": picture,
    }
    assert cell.outputs[0].data == shown
    assert cell.outputs[1].text == f"read <data_dir>, then <data_dir>/MNIST\nin <data_dir>.\n{others}\n<data_dir>"


def test_a_file_that_has_gone_is_named_before_the_notebook_that_needs_it(folder, tmp_path, capfd):
    """What 02 wrote and 03 needs is deleted between the two."""
    store = "from jemlib.results import Store\nimport pandas as pd\n"
    write = 'Store(results_dir, "01_first", config).table("made", pd.DataFrame({"x": [1]}))'
    delete = "import pathlib\npathlib.Path(results_dir, 'tables', 'made.csv').unlink()"
    write_notebook(folder / "01_first.ipynb", [DECLARATIONS, CONFIG, store + write])
    write_notebook(folder / "02_second.ipynb", [DECLARATIONS, CONFIG, delete])
    path = write_notebook(folder / "03_third.ipynb", [DECLARATIONS, CONFIG, "1"])
    needing = nbformat.read(path, as_version=4)
    needing.metadata["jemlib"] = {"needs": ["01_first"]}
    nbformat.write(needing, path)
    out = tmp_path / "out"
    assert study.run(out=out, notebooks=folder) == 1
    assert "03_third FAILED after 0 s: tables/made.csv, which 01_first wrote, is missing" in capfd.readouterr().err
    assert "<title>FAILED: 03_third (quick)</title>" in (out / "reports" / "03_third.html").read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("all: {sed: 1}", "quick.yaml, all: Unknown parameter 'sed': did you mean seed"),
        ("01_frist: {seed: 1}", "quick.yaml: Unknown parameter '01_frist': did you mean 01_first"),
        ("02_second: {stepz: 1}", "quick.yaml, 02_second: Unknown parameter 'stepz': did you mean steps"),
        ("02_second: {steps: many}", "quick.yaml, 02_second: Parameter 'steps' must be int but is 'many'."),
        ("all: [1", "quick.yaml is no valid parameter file"),
    ],
)
def test_a_wrong_parameter_file_stops_everything_before_the_first_kernel(folder, tmp_path, text, message):
    (folder / "params" / "quick.yaml").write_text(text)
    with pytest.raises(ParameterError) as caught:
        study.run(only="01", out=tmp_path / "out", notebooks=folder)
    assert message in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_folder_of_data_that_is_not_there_costs_no_earlier_results(folder, tmp_path, monkeypatch):
    with pytest.raises(ParameterError, match="nowhere does not exist"):
        study.run(data=tmp_path / "nowhere", out=tmp_path / "out", notebooks=folder)
    monkeypatch.setenv("JEMLIB_DATA", str(tmp_path / "nor_here"))
    with pytest.raises(ParameterError, match="nor_here does not exist"):
        study.run(out=tmp_path / "out", notebooks=folder)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("suffix", [".ipynb", ".unfinished.ipynb"])
def test_half_a_notebook_of_a_killed_run_is_in_nobodys_way(folder, tmp_path, suffix, capfd):
    out = tmp_path / "out"
    (out / "notebooks").mkdir(parents=True)
    (out / "notebooks" / f"01_first{suffix}").write_text('{"cells": [')
    assert study.run(profile="quick", only="02", out=out, notebooks=folder) == 0, capfd.readouterr().err
    index = (out / "index.html").read_text()
    assert ("FAILED: 01_first.ipynb is damaged" if suffix == ".ipynb" else reports.UNFINISHED) in index
    assert study.run(profile="quick", out=out, notebooks=folder) == 0
    assert "damaged" not in (out / "index.html").read_text()


def test_half_a_notebook_never_passes_for_a_result(tmp_path):
    path = study._unfinished(tmp_path, "01_first")
    path.parent.mkdir()
    path.write_text('{"cells": [')
    with pytest.raises(ResultsError, match="damaged"):
        study._finish(tmp_path, "01_first", {"profile": "quick", "command": "", "seconds": 1.0}, None, {})
    assert list(path.parent.iterdir()) == [path]


def test_results_go_to_the_home_folder(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(study, "_run_all", lambda plan, folder, root, *_: root)
    assert study.run(out=Path("~/x"), notebooks=folder) == tmp_path / "home" / "x"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_lab_ends_as_its_server_does(tmp_path, number):
    server = """
import signal, sys, time
def asked(number, frame):
    time.sleep(1)  # a person answers, kernels are shut down
    print("ended in good order", flush=True)
    sys.exit(0)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, asked)
print("up", flush=True)
time.sleep(60)
"""
    (tmp_path / "jupyterlab.py").write_text(server)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(repo_root())])}
    command = [sys.executable, "-P", "-m", "jemlib", "lab"]
    options = {"stdout": subprocess.PIPE, "text": True, "env": environment, "start_new_session": True}
    with subprocess.Popen(command, **options) as process:
        assert process.stdout.readline() == "up\n"
        # Ctrl-C reaches every process of a terminal, another signal the one it is sent to
        os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
        assert process.stdout.read() == "ended in good order\n"
    assert process.returncode == 0


def test_a_notebook_without_tagged_parameters_is_refused(folder, tmp_path):
    write_notebook(folder / "02_second.ipynb", [DECLARATIONS, CONFIG], tagged=1)
    with pytest.raises(ParameterError, match=r"02_second\.ipynb has no cell tagged 'parameters'"):
        study.run(out=tmp_path / "out", notebooks=folder)


def test_command_line(monkeypatch, tmp_path):
    monkeypatch.setattr(
        study, "run", lambda **options: (_ for _ in ()).throw(ParameterError("There is no notebook '9'."))
    )
    result = CliRunner().invoke(cli.main, ["run", "--only", "9"])
    assert result.exit_code == 2
    assert "There is no notebook '9'." in result.output
    assert CliRunner().invoke(cli.main, ["run", "--profile", "slow"]).exit_code == 2
    assert CliRunner().invoke(cli.main, ["run", "--seed", str(2**31)]).exit_code == 2
    monkeypatch.setattr(study, "run", lambda **options: json.loads(""))  # in mid-run; no wrong usage
    assert isinstance(CliRunner().invoke(cli.main, ["run"]).exception, json.JSONDecodeError)
    monkeypatch.setattr(study, "run", lambda **options: (_ for _ in ()).throw(KeyboardInterrupt))
    result = CliRunner().invoke(cli.main, ["run"])
    assert (result.exit_code, result.output) == (130, "interrupted\n")


def test_help_does_not_wait_for_torch():
    code = "import sys, jemlib.cli; sys.exit(any(m in sys.modules for m in ('torch', 'papermill', 'pandas')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
