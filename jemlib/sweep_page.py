"""The page of a sweep: how its cells ended, a heatmap of survival, every row; one file, nothing fetched."""

from __future__ import annotations

import base64
from collections.abc import Sequence

import pandas as pd
from jinja2 import Environment

from jemlib.results import Store, write_atomic

_PAGE = """<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>sweep {{ title }}</title>
<style>
body { font: 16px sans-serif; margin: 2em } img { max-width: 100% } .wide { overflow-x: auto }
table { border-collapse: collapse; font-size: 14px }
td, th { padding: .2em .8em; text-align: left; white-space: nowrap }
tr:nth-child(even) { background: #f3f3f3 } td.number { text-align: right }
</style>
<h1>sweep {{ title }}</h1>
<p>{% for name, n in ends.items() %}{{ n }} {{ name }}{{ ", " if not loop.last }}{% endfor %}.
The same rows: <a href="tables/sweep.csv">CSV</a>, <a href="tables/sweep.parquet">Parquet</a>.</p>
{% if image %}<p><img src="data:image/png;base64,{{ image }}" alt="{{ alt }}"></p>{% endif %}
<div class="wide"><table>
<tr>{% for name in columns %}<th>{{ name }}</th>{% endfor %}</tr>
{% for row in rows %}<tr>
{%- for name in columns %}
{%- if name == "cell" %}<td><a href="cells/{{ row[name] | urlencode }}/">{{ row[name] }}</a></td>
{%- elif row[name] is number %}<td class="number">{{ "%.6g" | format(row[name]) }}</td>
{%- else %}<td>{{ row[name] if row[name] is not none }}</td>{% endif %}
{%- endfor %}</tr>
{% endfor %}</table></div>
</html>
"""


def write(store: Store, rows: pd.DataFrame, swept: Sequence[str]) -> None:
    """Write index.html and, where two or more parameters were swept, figures/sweep_survival.png."""
    image = _survival(store, rows, [name for name in swept if name != "seed"])
    status = rows["status"].where(~rows["status"].str.startswith("diverged"), "diverged")
    about = {
        "title": store.dir.name, "ends": status.value_counts(sort=False).to_dict(), "columns": list(rows),
        "rows": rows.astype(object).where(rows.notna(), None).to_dict("records"),
        "image": image and base64.b64encode(image.data).decode(), "alt": image and image.alt,
    }  # fmt: skip
    page = Environment(autoescape=True).from_string(_PAGE).render(about)
    write_atomic(store.dir / "index.html", page.encode())


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
