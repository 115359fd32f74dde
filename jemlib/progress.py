"""Progress of a training run: a live bar where a person watches, a few plain lines where nobody does."""

from __future__ import annotations

import os
import sys

from tqdm import tqdm

_SHOWN = ("nll", "energy_gap", "val_accuracy", "gradient_norm")


def a_person_watches() -> bool:
    """Whether output is seen live: a terminal, or a kernel that a Jupyter server (not papermill) started.

    JEMLIB_PROGRESS=bar, =lines or =none (not even lines) overrides.
    """
    wish = os.environ.get("JEMLIB_PROGRESS")
    if wish in ("bar", "lines", "none"):
        return wish == "bar"
    return sys.stderr.isatty() or "JPY_SESSION_NAME" in os.environ


def tell(sentence: str) -> None:
    """Say why one waits, to a person who does; an executed copy must not depend on what was done before it."""
    if a_person_watches():
        print(sentence, flush=True)


class Progress:
    """Shows the steps of one run. The plain lines hold no times, so that two equal runs print the same."""

    def __init__(self, label: str, total: int, lines: int = 4, start: int = 0):
        """lines: how many a run of any length leaves in a log or an executed notebook; 0: not even how it ended."""
        self.label, self.total = label, total
        self.silent = lines == 0 or os.environ.get("JEMLIB_PROGRESS") == "none"
        self.marks = {round(total * (i + 1) / lines) for i in range(lines)}
        self.last = start
        self.bar = None
        if a_person_watches():
            self.bar = tqdm(total=total, initial=start, desc=label, unit="it", leave=True, mininterval=0.5)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def update(self, step: int, row: dict[str, float]) -> None:
        """Report that `step` steps are done; row holds the latest monitors."""
        shown = {name: row[name] for name in _SHOWN if name in row}
        if self.bar is not None:
            self.bar.update(step - self.last)
            self.bar.set_postfix({name: f"{value:.3g}" for name, value in shown.items()})
        elif not self.silent and any(self.last < mark <= step for mark in self.marks):
            print(f"{self.label}: step {step}/{self.total}", *(f"{k} {v:.3g}" for k, v in shown.items()), sep="  ")
        self.last = step

    def close(self, status: str) -> None:
        """Say how the run ended, where that is not simply the last step."""
        if status != "ok" and not self.silent:
            (tqdm.write if self.bar is not None else print)(f"{self.label}: {status}")

    def replay(self, history: list[dict[str, float]], status: str) -> None:
        """Show a run that was finished earlier: the same lines again, so that a second run reads as the first."""
        for row in history:
            if self.bar is None and not (status != "ok" and row is history[-1]):
                self.update(int(row["step"]), row)
        self.close(status)
        if self.bar is not None:
            self.bar.update(self.total - self.last)
            self.bar.close()
