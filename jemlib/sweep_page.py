"""The page of a sweep: how its cells ended, a heatmap of survival, every row; one file, nothing fetched."""

from __future__ import annotations

import base64
from collections.abc import Sequence

import pandas as pd

from jemlib import reports
from jemlib.files import write_atomic
from jemlib.results import Store


def write(store: Store, rows: pd.DataFrame, swept: Sequence[str]) -> None:
    """Write index.html and, where two or more parameters were swept, figures/sweep_survival.png."""
    image = _survival(store, rows, [name for name in swept if name != "seed"])
    status = rows["status"].where(~rows["status"].str.startswith("diverged"), "diverged")
    about = {
        "title": store.dir.name, "ends": status.value_counts(sort=False).to_dict(), "columns": list(rows),
        "rows": rows.astype(object).where(rows.notna(), None).to_dict("records"),
        "image": image and base64.b64encode(image.data).decode(), "alt": image and image.alt,
    }  # fmt: skip
    write_atomic(store.dir / "index.html", reports.render("sweep", **about).encode())


def _survival(store: Store, rows: pd.DataFrame, swept: list[str]):
    from jemlib import figures, figures_maps
    from jemlib.sweep import counts

    cells = counts(rows, swept) if swept else pd.DataFrame()
    if len(swept) < 2 or cells.empty:
        return None
    # numbers make the axes, whatever else was swept makes panels
    y, x, *rest = sorted(swept, key=lambda name: not pd.api.types.is_numeric_dtype(rows[name]))
    cells["panel"] = [", ".join(f"{name} {row[name]}" for name in rest) for row in cells.to_dict("records")]
    figures.style()
    title = f"{store.dir.name}: share of runs that survived"
    return store.figure("survival", *figures_maps.maps(cells, "share", title, "share alive", x=x, y=y, panel="panel"))
