"""Sweeps: grids, what names a cell, cells that diverge, raise, die or are interrupted, and the tables they leave."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
import numpy as np
import pandas as pd
import papermill
import psutil
import pytest
from click.testing import CliRunner
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from jemlib import cli, executor, kernels, stability, study, sweep, toy_runs
from jemlib.files import ResultsError
from jemlib.parameters import ParameterError
from jemlib.provenance import repo_root
from jemlib.results import Store

DECLARATIONS = 'results_dir: str = ""\nmethod: str = "jem"\nlr: float = 1e-2\nn: int = 1\nseed: int = 0\nnap: float = 0'
BODY = """\
from jemlib import study
config = study.parameters(globals())
import pandas, time
from jemlib.results import Store
time.sleep(nap)
assert n != 3, "three <b>never</b>"
status = "diverged at step 7" if n == 2 else "ok"
store = Store(results_dir, "cell")
store.table("sweep_row", pandas.DataFrame([{"method": method, "kl_nats": n / 3, "status": status}]))
"""


@pytest.fixture
def notebook(tmp_path):
    notebook = new_notebook(cells=[new_markdown_cell("prose"), new_code_cell(DECLARATIONS), new_code_cell(BODY)])
    notebook.cells[1].metadata["tags"] = ["parameters"]
    nbformat.write(notebook, tmp_path / "cell.ipynb")
    return tmp_path / "cell.ipynb"


# --- the grid ---


def test_grid_seeds_and_file(tmp_path):
    assert sweep.parse_grid(["n=1, 2", 'names="a,b",c']) == {"n": ["1", "2"], "names": ["a,b", "c"]}
    assert sweep.parse_seeds("0-2,7") == [0, 1, 2, 7]
    (tmp_path / "grid.yaml").write_text("grid: {n: [1, 2], method: jem}\nseeds: [0, 3]\n")
    assert sweep.read_file(tmp_path / "grid.yaml") == ({"n": [1, 2], "method": ["jem"]}, "0,3")
    for text, seeds in (("seeds: 0", "0"), ("seeds: 0-2", "0-2"), ("seeds: [0]", "0"), ("", None)):
        (tmp_path / "grid.yaml").write_text(text)
        assert sweep.read_file(tmp_path / "grid.yaml") == ({}, seeds)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sweep.parse_grid(["n"]), "name=value"),
        (lambda: sweep.parse_grid(["n=1,,2"]), "name=value"),
        (lambda: sweep.parse_grid(["n=1", "n=2"]), "'n' twice"),
        (lambda: sweep.parse_seeds("2-0"), "0-2 or 0,3"),
        (lambda: sweep.parse_seeds("-1"), "0-2 or 0,3"),
        (lambda: sweep.parse_seeds("0,2147483648"), "at most 2147483647"),
    ],
)
def test_a_malformed_grid_is_refused(call, message):
    with pytest.raises(ParameterError, match=message):
        call()


@pytest.mark.parametrize(
    "text",
    [
        "grids: {n: 1}",
        "grid: [1",
        "grid: 3",
        "- 1",
        "some text",
        "seeds: []",
        "seeds: ''",
        "seeds:",
        "grid: [1, 2]",
        "{grid: {seed: 1}, seeds: 0}",
    ],
)
def test_a_malformed_file_is_refused(tmp_path, text):
    (tmp_path / "grid.yaml").write_text(text)
    with pytest.raises(ParameterError, match=r"grid\.yaml"):
        sweep.read_file(tmp_path / "grid.yaml")


def test_cells_are_typed_and_named(notebook):
    cells = sweep.cells(notebook, {"method": ["jem", "st_jem"], "lr": ["1e-3", 1], "seed": [0, 1, 2]})
    assert len(cells) == len({cell.name for cell in cells}) == 12
    assert cells[3].given == {"method": "jem", "lr": 1.0, "seed": 0} and type(cells[3].given["lr"]) is float
    assert cells[0].name.startswith("method-jem_lr-0.001_seed-0-")
    # the same point in another grid, a default spelled out, and other prose: the same computation, the same cell
    again = sweep.cells(notebook, {"method": ["jem"], "lr": ["0.001"], "seed": [0], "n": ["1"]})
    assert again[0].name[-12:] == cells[0].name[-12:]
    edited = nbformat.read(notebook, as_version=4)
    edited.cells[0].source = "other prose"
    nbformat.write(edited, notebook)
    assert sweep.cells(notebook, {"method": ["jem"], "lr": ["0.001"], "seed": [0]})[0] == cells[0]
    edited.cells[2].source += "\n1 + 1"
    nbformat.write(edited, notebook)
    assert sweep.cells(notebook, {"method": ["jem"], "lr": ["0.001"], "seed": [0]})[0].name != cells[0].name


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({"nn": [1]}, "Unknown parameter 'nn': did you mean n"),
        ({1: [1]}, "Unknown parameter '1'"),
        ({"n": ["1", "many"]}, "Parameter 'n' must be int but is 'many'"),
        ({"n": []}, "no value of 'n'"),
        ({"seed": ["2147483648"]}, "from 0 to 2147483647"),
        ({"lr": ["1", "1.0"]}, "a value of 'lr' twice"),
        ({"results_dir": ["x"]}, "'results_dir' is set by the sweep"),
    ],
)
def test_a_wrong_grid_stops_the_sweep_before_the_first_cell(notebook, tmp_path, monkeypatch, grid, message):
    monkeypatch.setattr(executor, "run", lambda *_: pytest.fail("a cell was started"))
    with pytest.raises(ParameterError, match=message):
        sweep.run(notebook, grid, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("out", ["../reference", ".."])
def test_a_sweep_stays_in_its_folder(notebook, out):
    with pytest.raises(ParameterError, match="leaves results/sweeps"):
        sweep.run(notebook, {"n": [1]}, out)


def test_a_sweep_leaves_the_files_of_others_alone(notebook, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "index.html").write_text("mine")
    with pytest.raises(ParameterError, match="holds something else"):
        sweep.run(notebook, {"n": [1]}, tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["index.html"]


def done(root: Path, cell: sweep.Cell, rows: list[dict]) -> None:
    """What a finished cell leaves."""
    folder = root / "cells" / cell.name
    (folder / "tables").mkdir(parents=True)
    record = {"cell": cell.name, "status": "done", "seconds": 1.0, "threads": 1}
    (folder / "cell.json").write_text(json.dumps(record))
    pd.DataFrame(rows).to_csv(folder / "tables" / "sweep_row.csv", index=False)


@pytest.mark.parametrize(("values", "kind"), [(["0.02", "0.05"], float), (["0.02", "0.05; 0.1"], str)])
def test_a_swept_text_that_tables_read_as_numbers(notebook, tmp_path, values, kind):
    """One cell is done and the other was not run: its value is still the text that the notebook declares."""
    plan = sweep.cells(notebook, {"method": values, "n": [1]})
    done(tmp_path / "out", plan[0], [{"method": 0.02, "kl_nats": 1.0, "status": "ok"}])
    rows = sweep.write(Store(tmp_path / "out", "sweep"), plan, "sweep_row", {"method": values})
    assert rows["method"].tolist() == [kind(value) for value in values]
    assert rows["status"].tolist() == ["ok", "not run"]
    kept = pd.read_parquet(tmp_path / "out" / "tables" / "sweep.parquet")
    assert kept["method"].tolist() == rows["method"].tolist()
    assert (tmp_path / "out" / "index.html").is_file()


def test_a_result_that_is_a_number_in_one_table_and_text_in_another(notebook, tmp_path):
    plan = sweep.cells(notebook, {"n": [1, 2]})
    for cell, seeds in zip(plan, ("0", "0,1"), strict=True):
        done(tmp_path / "out", cell, [{"seeds": seeds, "status": "ok"}])
    sweep.write(Store(tmp_path / "out", "sweep"), plan, "sweep_row", {"n": [1, 2]})
    assert pd.read_parquet(tmp_path / "out" / "tables" / "sweep.parquet")["seeds"].tolist() == ["0", "0,1"]


def test_data_that_are_not_there_cost_no_finished_cell(notebook, tmp_path, monkeypatch):
    source = nbformat.read(notebook, as_version=4)
    source.cells[1].source += '\ndata_dir: str = ""  # the data'
    nbformat.write(source, notebook)
    (cell,) = sweep.cells(notebook, {"n": [1]})
    done(tmp_path / "home" / "out", cell, [{"method": "jem", "status": "ok"}])
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(executor, "run", lambda *_: pytest.fail("a cell was started"))
    (tmp_path / "home" / "out" / "sweep.json").write_text("{}")
    with pytest.raises(ParameterError, match="nowhere"):
        sweep.run(notebook, {"n": [1]}, "~/out", data=Path("~/nowhere"), force=True)
    assert (tmp_path / "home" / "out" / "cells" / cell.name / "cell.json").is_file()
    seen = []
    monkeypatch.setattr(executor, "run", lambda jobs, *_: seen.extend(jobs))
    (tmp_path / "home" / "data").mkdir()
    sweep.run(notebook, {"n": [1]}, "~/out", data=Path("~/data"), force=True)
    assert seen[0].parameters["data_dir"] == str(tmp_path / "home" / "data")


def test_a_damaged_record_of_a_cell_counts_as_none(tmp_path):
    (tmp_path / "cells" / "a").mkdir(parents=True)
    (tmp_path / "cells" / "a" / "cell.json").write_text('{"status": "do')
    path, table = (tmp_path / "cells" / "a" / name for name in ("cell.json", "tables/sweep_row.csv"))
    assert sweep.record(tmp_path, "a", "sweep_row") == {} and executor._done(path, table) is None
    path.write_text('{"status": "done"}')
    assert sweep.record(tmp_path, "a", "sweep_row") == {} and executor._done(path, table) is None, "its table is gone"
    table.parent.mkdir()
    table.write_text("")
    assert sweep.record(tmp_path, "a", "sweep_row") == executor._done(path, table) == {"status": "done"}
    with pytest.raises(ResultsError, match=r"sweep_row\.csv is damaged: delete it"):
        sweep.collect(tmp_path, [sweep.Cell("a", {})], "sweep_row")


def test_what_is_no_notebook_is_refused(tmp_path):
    for text in ("# words", "{}", "[]"):
        (tmp_path / "README.md").write_text(text)
        result = CliRunner().invoke(cli.main, ["sweep", str(tmp_path / "README.md"), "--out", str(tmp_path / "out")])
        assert result.exit_code == 2 and "README.md is no notebook" in result.output


def test_a_table_that_is_never_written_is_refused_at_once(notebook, tmp_path):
    with pytest.raises(ParameterError, match=r"no table 'toy'; choose with --table from sweep_row\."):
        sweep.run(notebook, {}, tmp_path / "out", table="toy")
    sweep.check_table(repo_root() / "notebooks" / "01_toy_2d.ipynb", "toy_methods")


def test_command_line(notebook, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(sweep, "run", lambda *arguments, **options: calls.append((arguments, options)) or 1)
    (tmp_path / "grid.yaml").write_text("grid: {n: [1, 2], lr: 1}\nseeds: 0-1\n")
    arguments = [
        "sweep",
        str(notebook),
        "--file",
        str(tmp_path / "grid.yaml"),
        "--grid",
        "n=5",
        "--scheduler",
        "tcp://x:1",
    ]
    assert CliRunner().invoke(cli.main, arguments).exit_code == 1
    ((_, grid, out), options) = calls[0]
    assert grid == {"n": ["5"], "lr": [1], "seed": [0, 1]} and out == "cell" and options["scheduler"] == "tcp://x:1"
    (tmp_path / "grid.yaml").write_text("seeds: 0\n")
    CliRunner().invoke(cli.main, arguments[:4])
    assert calls[1][0][1] == {"seed": [0]}
    (tmp_path / "grid.yaml").write_text("seeds: 0-1\n")
    CliRunner().invoke(cli.main, [*arguments[:4], "--grid", "seed=5"])
    assert calls[2][0][1] == {"seed": ["5"]}, "the command line wins"
    result = CliRunner().invoke(cli.main, [*arguments[:2], "--seeds", "0", "--grid", "seed=1"])
    assert result.exit_code == 2 and "given twice" in result.output
    result = CliRunner().invoke(cli.main, [*arguments[:2], "--seeds", ""])
    assert result.exit_code == 2 and "0-2 or 0,3" in result.output
    monkeypatch.undo()
    result = CliRunner().invoke(cli.main, ["sweep", str(notebook), "--grid", "nn=1", "--out", str(tmp_path / "out")])
    assert result.exit_code == 2 and "Unknown parameter 'nn'" in result.output


@pytest.mark.parametrize(("gpus", "workers"), [(0, 3), (1, 1), (4, 1)])
def test_cells_share_no_gpu(monkeypatch, gpus, workers):
    monkeypatch.setattr(executor.torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(executor, "_cores", lambda: 3)
    monkeypatch.setattr("distributed.system.MEMORY_LIMIT", 2**40)
    assert executor._fitting_workers(10) == workers


# --- one cell ---


@pytest.fixture
def job(notebook, tmp_path, monkeypatch):
    """A job for `executor.run_cell` in this process."""
    monkeypatch.setattr(executor, "_prepare_process", lambda: None)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    (tmp_path / "sweep.json").write_text("{}")
    return executor.Job("one", str(tmp_path), notebook.name, str(tmp_path), {"n": 1}, "sweep_row")


def test_a_kernel_that_does_not_start_is_tried_again(job, monkeypatch):
    calls = []

    def execute(*arguments, **options):
        calls.append(arguments)
        if len(calls) < 3:
            raise RuntimeError("Kernel died before replying to kernel_info")
        (job.folder / "tables").mkdir()
        (job.folder / "tables" / "sweep_row.csv").write_text("a\n1\n")

    monkeypatch.setattr(papermill, "execute_notebook", execute)
    assert executor.run_cell(job)["status"] == "done"
    assert len(calls) == 3
    assert executor.run_cell(job)["status"] == "done" and len(calls) == 3, "a finished cell is read"


def test_a_kernel_that_never_starts_is_recorded(job, monkeypatch):
    monkeypatch.setattr(papermill, "execute_notebook", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("port")))
    assert executor.run_cell(job)["error"] == "the kernel did not start: port"
    assert json.loads((job.folder / "cell.json").read_text())["status"] == "raised"


def test_a_worker_without_the_shared_folder_says_so(job):
    with pytest.raises(FileNotFoundError, match="same file system"):
        executor.run_cell(job._replace(root="/nowhere"))


@pytest.mark.parametrize("can_fork", [True, False])
@pytest.mark.skipif(not kernels.CAN_FORK, reason="needs Linux")
@pytest.mark.slow
def test_kernels_of_both_kinds_run_a_cell_and_their_end_is_noticed(job, notebook, monkeypatch, can_fork):
    monkeypatch.undo()
    monkeypatch.setattr(executor, "_prepare_process", lambda: None)
    monkeypatch.setattr(kernels, "CAN_FORK", can_fork)
    with study.kernel_environment():
        assert executor.run_cell(job)["error"] is None
        with ThreadPoolExecutor(2) as pool:  # a worker of two threads
            both = pool.map(executor.run_cell, [job._replace(name=name) for name in ("three", "four")])
            assert [one["error"] for one in both] == [None, None]
        whole = nbformat.read(job.folder / notebook.name, as_version=4)
        assert whole.cells[-1].execution_count and whole.metadata.papermill.output_path == notebook.name
        edited = nbformat.read(notebook, as_version=4)
        edited.cells.append(new_code_cell("import os\nos.kill(os.getpid(), 9)"))
        nbformat.write(edited, notebook)
        assert executor.run_cell(job._replace(name="two"))["error"].startswith("the kernel died in cell")
        kernels._first_process.cache_clear()


# --- whole sweeps, on local workers ---


@pytest.fixture
def start(notebook, tmp_path):
    """Starts `python -m jemlib sweep` on the notebook with two workers; what still runs at the end is ended."""
    # SIGINT is ignored where a shell runs the tests with &
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from jemlib.cli import main; main(sys.argv[1:])"
    )
    started = []

    def call(*arguments: str) -> subprocess.Popen:
        fixed = ("sweep", str(notebook), "--out", str(tmp_path / "out"), "--workers", "2")
        started.append(subprocess.Popen(
            [sys.executable, "-c", code, *fixed, *arguments], env=os.environ | {"PYTHONPATH": str(repo_root())},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        ))  # fmt: skip
        return started[-1]

    yield call
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def records(out: Path) -> dict[str, dict]:
    return {path.parent.name: json.loads(path.read_text()) for path in out.glob("cells/*/cell.json")}


def wait_for(condition, process):
    for _ in range(2000):
        if condition():
            return
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    pytest.fail("waited in vain")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twelve_cells_at_once_then_only_what_is_missing(start, notebook, tmp_path):
    out = tmp_path / "out"
    process = start("--grid", "method=jem,<i>st_jem</i>", "--grid", "n=1,2,3", "--seeds", "0,1")
    messages, _ = process.communicate(timeout=400)
    assert process.returncode == 1 and "8 of 12 cells done, 4 raised" in messages
    rows = pd.read_csv(out / "tables" / "sweep.csv")
    assert len(rows) == rows["cell"].nunique() == 12
    assert rows["status"].value_counts().to_dict() == {"ok": 4, "diverged at step 7": 4, "raised": 4}
    assert rows.loc[rows["n"] == 3, "error"].str.contains("AssertionError: three <b>never").all()
    assert rows.loc[rows["n"] != 3, "kl_nats"].tolist() == pytest.approx((rows["n"] / 3)[rows["n"] != 3], rel=1e-5)
    parquet = pd.read_parquet(out / "tables" / "sweep.parquet")
    pd.testing.assert_frame_equal(rows, parquet, check_dtype=False, rtol=1e-5)
    page = (out / "index.html").read_text()
    assert "4 ok" in page and "4 diverged" in page and "4 raised" in page and "data:image/png" in page
    assert "<i>" not in page and "<b>" not in page and "http" not in page.replace("http://www.w3.org", "")
    for cell in out.glob("cells/*"):
        nbformat.validate(nbformat.read(cell / notebook.name, as_version=4))

    before = {name: one["seconds"] for name, one in records(out).items()}
    process = start("--grid", "method=jem,<i>st_jem</i>", "--grid", "n=1,2", "--seeds", "0,1,2")
    messages, _ = process.communicate(timeout=400)
    assert process.returncode == 0 and "12 cells, 8 finished before" in messages
    after = {name: one["seconds"] for name, one in records(out).items()}
    assert len(after) == 16 and before.items() <= after.items(), "a finished cell ran again"
    assert len(pd.read_csv(out / "tables" / "sweep.csv")) == 12


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
def test_a_killed_worker_costs_nothing_and_an_interrupt_leaves_whole_files(start, tmp_path):
    out = tmp_path / "out"
    grid = ("--grid", "n=1,2", "--grid", "nap=0.6", "--seeds", "0-5")
    process = start(*grid)
    wait_for(lambda: records(out), process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: workers too
    messages, _ = process.communicate(timeout=120)
    assert process.returncode == 130 and "Traceback" not in messages, messages
    done = records(out)
    assert 0 < len(done) < 12 and all(one["status"] == "done" for one in done.values())
    assert not [path for path in out.rglob("*") if path.suffix == ".tmp"]
    assert (pd.read_csv(out / "tables" / "sweep.csv")["status"] == "not run").sum() == 12 - len(done)

    process = start(*grid)
    wait_for(lambda: len(records(out)) > len(done), process)
    workers = [p for p in psutil.Process(process.pid).children() if "spawn_main" in " ".join(p.cmdline())]
    workers[0].kill()
    messages, _ = process.communicate(timeout=400)
    assert process.returncode == 0 and f"12 cells, {len(done)} finished before" in messages
    rows = pd.read_csv(out / "tables" / "sweep.csv")
    assert len(rows) == rows["cell"].nunique() == 12 and not set(rows["status"]) & {"raised", "not run"}


# --- the map ---


def test_the_toy_cell_and_notebook_06_have_the_same_defaults():
    cell = sweep.declared_in(repo_root() / "notebooks" / "cells" / "toy_cell.ipynb")
    whole = sweep.declared_in(repo_root() / "notebooks" / "06_stability_map.ipynb")
    for name in ("distribution", "n_iterations", "batch_size", "width", "grid", "energy_limit"):
        assert cell[name] == whole[name]
    assert float(whole["lr"][1]) == cell["lr"][1]


def test_a_diverged_run_is_a_row(tmp_path):
    settings = [{"method": method, "energy_limit": limit} for method in ("jem", "st_jem") for limit in (1e-3, 1e4)]
    configs = [stability.toy_config(12, batch_size=16, width=8, n_steps=1, **setting) for setting in settings]
    rows = stability.toy(Store(tmp_path, "x"), toy_runs.dataset("rings", 200, 0), configs, 16, workers=1)
    assert rows["status"].tolist() == ["diverged at step 0", "ok"] * 2
    assert np.isfinite(rows["kl_nats"]).all()


def grid_rows():
    """Dead of three: jem 2 at a step of 0.1, 3 at 0.2, 1 at 0.3; st_jem 1 at 0.2; two learning rates, mixed order."""
    rows = []
    for method in ("jem", "st_jem"):
        for lr in (0.02, 0.005):
            for step_size in (0.1, 0.2, 0.3):
                for seed in range(3):
                    dead = step_size == 0.1 and method == "jem" and seed > 0
                    dead |= step_size == 0.3 and method == "jem" and seed == 0
                    dead |= step_size == 0.2 and (method == "jem" or seed == 0)
                    end = {"status": "diverged at step 3" if dead else "ok", "kl_nats": 99.0 if dead else 1.0 + seed}
                    rows.append({"dataset": "rings", "method": method, "lr": lr, "n_steps": 1, "step_size": step_size,
                                 "seed": seed, "accuracy": 0.5, "n_iterations": 9, **end})  # fmt: skip
    return pd.DataFrame(rows)


def test_the_region_needs_half_of_one_and_none_of_the_other():
    counts = stability.counts(grid_rows())
    assert counts["panel"].unique().tolist() == ["jem, lr 0.005", "st_jem, lr 0.005", "jem, lr 0.02", "st_jem, lr 0.02"]
    cell = counts[(counts["panel"] == "jem, lr 0.02") & (counts["step_size"] == 0.1)].iloc[0]
    assert (cell["alive"], cell["runs"], cell["kl_nats"]) == (1, 3, 1.0)
    region = stability.region(counts)
    assert region["step_size"].tolist() == [0.1, 0.1]
    assert "rings: at 2 of 6 settings jem lost at least half of its runs (4 of 6) and st_jem none of 6" in (
        stability.sentence(counts, region)
    )
    assert len(stability.marked(counts, region)) == 4
    nothing = stability.region(stability.counts(grid_rows().query("step_size == 0.2")))
    assert "at none of 2 settings" in stability.sentence(counts[counts["step_size"] == 0.2], nothing)


def test_what_is_said_beside_the_prediction_is_counted():
    rows = [
        ("jem", 1, 0.1),
        ("jem", 2, 5.0),
        ("jem", 3, np.nan),
        ("st_jem", 1, 0.3),
        ("st_jem", 2, 0.5),
        ("st_jem", 3, 0.7),
    ]
    counts = pd.DataFrame(rows, columns=["method", "n_steps", "kl_nats"]).assign(lr=0.01, step_size=0.1)
    predicted = pd.DataFrame({"method": ["jem", "st_jem", "st_jem"], "kl_nats": [np.nan, 0.2, 0.6]})
    ours, theirs = stability.beside_prediction(counts, predicted).splitlines()
    assert ours == (
        "st_jem, 3 settings: 0.300 to 0.700 nats from the data, predicted 0.200 to 0.600; 1 settings lie above that."
    )
    assert theirs == (
        "jem, 2 settings with survivors: in 1 they are more than 1 nat from the data; in 1 they are nearer than st_jem."
    )
    alone = stability.beside_prediction(counts[counts["method"] == "st_jem"], predicted)
    assert "jem, 0 settings with survivors" in alone


def test_a_sweep_is_read_without_the_cells_that_raised(tmp_path):
    rows = grid_rows()
    rows.loc[0, ["status", "lr", "accuracy", "n_iterations"]] = ["raised", np.nan, np.nan, np.nan]
    rows.to_csv(tmp_path / "sweep.csv", index=False)
    read, without = stability.read(tmp_path / "sweep.csv")
    assert (len(read), without) == (len(rows) - 1, 1)
    rows.drop(columns="kl_nats").to_csv(tmp_path / "sweep.csv", index=False)
    with pytest.raises(ValueError, match="no column kl_nats"):
        stability.read(tmp_path / "sweep.csv")
    (tmp_path / "sweep.csv").write_text("")
    with pytest.raises(ResultsError, match=r"sweep\.csv is damaged"):
        stability.read(tmp_path / "sweep.csv")
