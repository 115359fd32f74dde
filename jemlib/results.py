"""Where artefacts go, and where they came from: tables, figures, run records, manifests.

What differs between two identical runs goes to `timing.csv` alone.

`artefacts/<notebook>.json` is a notebook's manifest: its effective parameters, commit and machine, its headline, and
every table and figure that it wrote with the runs behind it.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from jemlib.files import ResultsError, as_json, make_folder, read_csv, read_json, restored, write_atomic
from jemlib.provenance import provenance, repo_root

if TYPE_CHECKING:
    import pandas as pd
    from IPython.display import Image
    from matplotlib.figure import Figure

TIMING_COLUMNS = ["what", "seconds", "ms_per_step", "peak_memory_mb", "device", "threads", "precision"]
FIGURE_DPI = 160


def _portable(parameters: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Parameters without the folders of this machine, which belong in no published file."""

    def shown(value: Any) -> Any:
        if not isinstance(value, str) or not os.path.isabs(value):
            return value
        return "<results>" if value == str(folder) else f".../{Path(value).name}"

    return {name: shown(value) for name, value in parameters.items()}


class Store:
    """The artefacts of one notebook under `results_dir` (relative paths count from the repository).

    With the notebook's effective parameters a new manifest begins; without them the store adds to the one that is
    there. Raises `ResultsError` at once when nothing can be written there, before hours of training.
    """

    def __init__(self, results_dir: str | Path, notebook: str, parameters: Mapping[str, Any] | None = None) -> None:
        self.dir = repo_root() / Path(results_dir).expanduser()
        self.notebook = notebook
        self._runs: list[str] = []
        probe = self.dir / f".{notebook}.{os.getpid()}.tmp"
        write_atomic(probe, b"")
        probe.unlink(missing_ok=True)
        if parameters is not None:
            about = {"notebook": notebook, "parameters": _portable(parameters, self.dir), **provenance()}
            self._write_manifest(about | {"headline": "", "thumbnail": "", "tables": {}, "figures": {}})

    def uses(self, names: Iterable[str]) -> None:
        """Say that what is written from now on may come from these runs, too; the manifest names them."""
        self._runs += [name for name in names if name not in self._runs]

    def manifest(self) -> dict[str, Any]:
        """What this notebook wrote, and from what; empty where it has not run."""
        path = self.dir / "artefacts" / f"{self.notebook}.json"
        return restored(read_json(path)) if path.is_file() else {}

    def _manifest_so_far(self) -> dict[str, Any]:
        """The manifest for one who writes it next: a damaged one counts as none."""
        try:
            return self.manifest()
        except ResultsError:
            return {}

    def _write_manifest(self, content: Mapping[str, Any]) -> None:
        write_atomic(self.dir / "artefacts" / f"{self.notebook}.json", as_json(content))

    def _register(self, kind: str, name: str, about: Mapping[str, Any]) -> None:
        with FileLock(self.dir / ".artefacts.lock"):  # several processes of one run write the same
            content = self._manifest_so_far()
            self._write_manifest(content | {kind: content.get(kind, {}) | {name: dict(about)}})

    def headline(self, sentence: str, thumbnail: str) -> str:
        """What the index says of this notebook, in one measured sentence, and which figure it shows beside it."""
        with FileLock(self.dir / ".artefacts.lock"):
            about = {"headline": sentence, "thumbnail": self._figure_name(thumbnail)}
            self._write_manifest(self._manifest_so_far() | about)
        return sentence

    def files(self) -> list[Path]:
        """Every file that the manifest names: tables, figures, and the records and checkpoints of the runs."""
        content = self.manifest()
        tables, figures = content.get("tables", {}), content.get("figures", {})
        names = sorted({run for part in (tables, figures) for about in part.values() for run in about["runs"]})
        found = [self.dir / "tables" / f"{name}.csv" for name in tables]
        found += [self.dir / "figures" / f"{name}.png" for name in figures]
        found += [self.dir / "runs" / f"{name}.json" for name in names]
        return found + [self.dir / "checkpoints" / f"{name}.pt" for name in names]

    def table(self, name: str, frame: pd.DataFrame) -> pd.DataFrame:
        """Write `tables/<name>.csv` (six digits, index left out) and return `frame` for display."""
        text = frame.to_csv(index=False, float_format="%.6g", lineterminator="\n")
        write_atomic(self.dir / "tables" / f"{name}.csv", text.encode())
        if name != "timing":  # which every notebook adds to
            runs = list(dict.fromkeys(frame["run"].dropna())) if "run" in frame else list(self._runs)
            self._register("tables", name, {"runs": runs})
        return frame

    def clear(self) -> None:
        """Remove this notebook's tables, figures, report and executed copies, so that none passes for a new run's."""
        content = self._manifest_so_far()
        old = [self.dir / "figures" / f"{name}.png" for name in content.get("figures", {})]
        old += [self.dir / "tables" / f"{name}.csv" for name in content.get("tables", {})]
        old += [self.dir / "reports" / f"{self.notebook}.html", self.dir / "artefacts" / f"{self.notebook}.json"]
        old += [self.dir / "notebooks" / f"{self.notebook}{suffix}" for suffix in (".ipynb", ".unfinished.ipynb")]
        for path in old:
            path.unlink(missing_ok=True)

    def read_table(self, name: str) -> pd.DataFrame:
        """Read `tables/<name>.csv`; `ResultsError` when no notebook has written it yet."""
        path = self.dir / "tables" / f"{name}.csv"
        if not path.is_file():
            raise ResultsError(f"{path} is missing: run the notebook that writes it first.")
        return read_csv(path)

    def read_table_or_reference(self, name: str) -> tuple[str, pd.DataFrame | None]:
        """This run's table, else the reference run's, with where it came from; ("", None) where neither has it."""
        for folder in (self.dir, repo_root() / "results" / "reference"):
            if (path := folder / "tables" / f"{name}.csv").is_file():
                return os.path.relpath(folder, repo_root()), read_csv(path)
        return "", None

    def _figure_name(self, name: str) -> str:
        return f"{self.notebook.split('_')[0]}_{name}"

    def figure(self, name: str, fig: Figure, alt: str) -> Image:
        """Write `figures/<notebook number>_<name>.png`, close `fig`, return the image with its alt text."""
        import matplotlib.pyplot as plt
        from IPython.display import Image
        from PIL import Image as Picture
        from PIL.PngImagePlugin import PngInfo

        if not alt.strip():
            raise ValueError(f"The figure {name!r} needs alt text.")
        drawn, buffer = io.BytesIO(), io.BytesIO()
        fig.savefig(drawn, format="png", dpi=FIGURE_DPI, bbox_inches="tight")
        plt.close(fig)
        about = PngInfo()  # without matplotlib's entries: its version would change the bytes
        about.add_itxt("Description", alt)
        with Picture.open(drawn) as picture:
            dpi = (FIGURE_DPI, FIGURE_DPI)
            picture.convert("RGB").save(buffer, format="png", optimize=True, pnginfo=about, dpi=dpi)
            width = picture.width
        full = self._figure_name(name)
        write_atomic(self.dir / "figures" / f"{full}.png", buffer.getvalue())
        self._register("figures", full, {"alt": alt, "runs": list(self._runs)})
        return Image(data=buffer.getvalue(), format="png", width=round(width * 96 / FIGURE_DPI), alt=alt)

    def timing(self, rows: Mapping[str, Any] | Iterable[Mapping[str, Any]]) -> pd.DataFrame:
        """Merge rows (keys as in `TIMING_COLUMNS`) by `what` into `tables/timing.csv`; returns these rows.

        Units: seconds, milliseconds, MiB. A re-run replaces its own rows and leaves all others alone.
        """
        import pandas as pd

        new = pd.DataFrame([rows] if isinstance(rows, Mapping) else list(rows))
        new = new.reindex(columns=TIMING_COLUMNS + [c for c in new.columns if c not in TIMING_COLUMNS])
        path = self.dir / "tables" / "timing.csv"
        make_folder(path.parent)
        with FileLock(self.dir / ".timing.lock"):
            try:
                old = read_csv(path)
                merged = pd.concat([old[~old["what"].isin(new["what"])], new])
            except (FileNotFoundError, KeyError, ResultsError):  # none yet, or a damaged one: times are no results
                merged = new
            merged = merged.astype({"threads": "Int64"})  # an integer also beside rows that have none
            self.table("timing", merged.sort_values("what", kind="stable"))
        return new

    def record(self, name: str, content: Mapping[str, Any]) -> Path:
        """Write `runs/<name>.json` with sorted keys; nan and inf become "NaN", "Infinity", "-Infinity"."""
        path = self.dir / "runs" / f"{name}.json"
        write_atomic(path, as_json(content))
        return path

    def has_record(self, name: str) -> bool:
        """Whether `runs/<name>.json` is there."""
        return (self.dir / "runs" / f"{name}.json").is_file()

    def read_record(self, name: str) -> dict[str, Any]:
        """Read `runs/<name>.json`, non-finite numbers restored; `ResultsError` when it is missing."""
        path = self.dir / "runs" / f"{name}.json"
        if not path.is_file():
            raise ResultsError(f"{path} is missing: run the notebook that writes it first.")
        return restored(read_json(path))

    def checkpoint_path(self, name: str) -> Path:
        """`checkpoints/<name>.pt`, its folder made."""
        make_folder(self.dir / "checkpoints")
        return self.dir / "checkpoints" / f"{name}.pt"
