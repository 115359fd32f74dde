"""What a run of the chain says while it works: a live line in a terminal, plain lines in a log file."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from papermill.engines import NBClientEngine, papermill_engines
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from jemlib.files import ResultsError, read_notebook

ENGINE = "jemlib"
_QUIET_FOR = 20.0  # seconds between two lines of a log file
_LEARN_AFTER = 10.0  # seconds of known cells after which this machine's speed is believed


class Watch:
    """Follows the chain cell by cell. known: notebook -> seconds of each cell in an earlier run, where there was one.

    A context manager; inside it papermill's engine `ENGINE` reports to it.
    """

    def __init__(self, stems: Sequence[str], known: dict[str, list[float]]) -> None:
        self.stems, self.known = list(stems), known
        self.stem, self.cell, self.n_cells = "", 0, 0
        self.began = self.cell_began = self.last_line = time.monotonic()
        self.took, self.expected = 0.0, 0.0  # over the finished cells that were known
        self.live = sys.stdout.isatty()
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[times]}"))
        self.bar = Progress(*columns, console=Console(), disable=not self.live, get_time=self._refresh, transient=True)
        self.bar.add_task("starting", total=1.0, times="")

    def __enter__(self) -> Watch:
        watch = self

        class Engine(NBClientEngine):
            @classmethod
            def execute_managed_notebook(cls, nb_man: Any, kernel_name: str, **options: Any) -> None:
                started = nb_man.cell_start

                def cell_start(cell: Any, cell_index: int | None = None, **rest: Any) -> None:
                    started(cell, cell_index, **rest)
                    watch.at_cell(cell_index or 0, len(nb_man.nb.cells))

                nb_man.cell_start = cell_start
                super().execute_managed_notebook(nb_man, kernel_name, **options)

        papermill_engines.register(ENGINE, Engine)
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def say(self, text: str, failure: bool = False) -> None:
        """A line of its own: to standard error where something failed."""
        print(text, file=sys.stderr if failure else sys.stdout, flush=True)

    def at_notebook(self, stem: str) -> None:
        """A notebook begins."""
        self._cell_done()
        self.stem, self.cell, self.n_cells = stem, 0, 0
        about = f", about {_clock(sum(self.known[stem]))}" if stem in self.known else ""
        self.say(f"{self._place()} ...{about if not self.live else ''}")
        self.last_line = time.monotonic()

    def at_cell(self, index: int, n_cells: int) -> None:
        """A cell of the present notebook begins; index counts from 0."""
        self._cell_done()
        self.cell, self.n_cells = index + 1, n_cells
        if not self.live and time.monotonic() - self.last_line > _QUIET_FOR:
            self.say(f"{self._place()}: cell {self.cell} of {n_cells}, {self._times()}")
            self.last_line = time.monotonic()

    def left(self) -> float | None:
        """Seconds left of the whole run; None where a notebook has no earlier run to go by."""
        ahead = self.stems[self.stems.index(self.stem) + 1 :] if self.stem else self.stems
        if any(stem not in self.known for stem in [*ahead, *filter(None, [self.stem])]):
            return None
        own = self.known.get(self.stem, [])
        cells = sum(own[self.cell :]) + sum(sum(self.known[stem]) for stem in ahead)
        speed = self.took / self.expected if self.expected > _LEARN_AFTER else 1.0
        here = own[self.cell - 1] if 0 < self.cell <= len(own) else 0.0
        return speed * cells + max(0.0, speed * here - (time.monotonic() - self.cell_began))

    def _cell_done(self) -> None:
        now, own = time.monotonic(), self.known.get(self.stem, [])
        if 0 < self.cell <= len(own):
            self.took += now - self.cell_began
            self.expected += own[self.cell - 1]
        self.cell_began = now

    def _place(self) -> str:
        return f"[{self.stems.index(self.stem) + 1}/{len(self.stems)}] {self.stem}"

    def _times(self) -> str:
        left = self.left()
        told = "time left unknown before a first run" if left is None else f"about {_clock(left)} left"
        return f"{_clock(time.monotonic() - self.began)} elapsed, {told}"

    def _refresh(self) -> float:
        """rich asks for the time whenever it draws; the text is brought up to date on the way."""
        if self.bar.tasks and self.stem:
            task = self.bar.tasks[0]
            where = f"cell {self.cell} of {self.n_cells}" if self.cell else "starting its kernel"
            task.description = f"{self._place()}  {where}"
            task.fields["times"] = self._times()
            elapsed, left = time.monotonic() - self.began, self.left()
            task.completed = elapsed / (elapsed + left) if left is not None else 0.0
        return time.monotonic()


def known_times(folders: Sequence[Path], stems: Sequence[str]) -> dict[str, list[float]]:
    """notebook -> seconds of each cell, from the first of the folders that has an executed copy of it."""
    found = {}
    for stem in stems:
        for folder in folders:
            path = folder / "notebooks" / f"{stem}.ipynb"
            try:
                cells = read_notebook(path).cells
            except (FileNotFoundError, ResultsError):  # a damaged one is about to be written anew
                continue
            found[stem] = [cell.metadata.get("papermill", {}).get("duration") or 0.0 for cell in cells]
            break
    return found


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
