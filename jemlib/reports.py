"""Pages that open anywhere: one a notebook and an index, each a single file without scripts, nothing fetched.

Everything that the pages say is read off the results folder: executed copies, manifests, run records, tables.
"""

from __future__ import annotations

import base64
import io
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat
from jinja2 import Environment, FileSystemLoader, pass_context
from latex2mathml.converter import convert as mathml
from nbconvert import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from nbformat import NotebookNode
from PIL import Image
from pygments.formatters import HtmlFormatter

from jemlib import headlines
from jemlib.files import ResultsError, read_csv, read_json, read_notebook, write_atomic
from jemlib.results import Store

TEMPLATES = Path(__file__).parent / "templates"
UNFINISHED = "not finished: running, or killed"


# --- one notebook -------------------------------------------------------------------------------------------


class _Renderer(IPythonRenderer):
    """Markdown with formulas as MathML, which browsers draw without a script."""

    def block_math(self, body: str) -> str:
        return mathml(body, display="block")

    def inline_math(self, body: str) -> str:
        return mathml(body)

    def latex_environment(self, name: str, body: str) -> str:
        return mathml(f"\\begin{{{name}}}{body}\\end{{{name}}}", display="block")

    def heading(self, text: str, level: int, **attrs: Any) -> str:
        anchor = re.sub(r"[^\w]+", "-", re.sub(r"<[^>]*>", "", text)).strip("-").lower()
        link = f'<a class="anchor-link" href="#{anchor}">¶</a>'
        return f'<h{level} id="{anchor}">{text}{link}</h{level}>\n'


class _Exporter(HTMLExporter):
    @pass_context
    def markdown2html(self, context: Any, source: str) -> str:
        return _html(source)


def _html(markdown: str) -> str:
    return MarkdownWithMath(renderer=_Renderer(escape=False)).render(markdown)


def page(notebook: NotebookNode, about: dict[str, Any]) -> str:
    """The page of an executed notebook. about: title, profile, summary, facts, command, failure, times."""
    text = "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    found = re.findall(r'<h([1-3]) id="([^"]*)">(.*?)<a class="anchor-link"', _html(text), re.DOTALL)
    toc = [(int(level), anchor, re.sub(r"<[^>]*>", "", heading)) for level, anchor, heading in found]
    css = (TEMPLATES / "style.css").read_text() + HtmlFormatter(style="xcode").get_style_defs(".highlight")
    exporter = _Exporter(template_name="report", extra_template_basedirs=[str(TEMPLATES)])
    html, _ = exporter.from_notebook_node(notebook, {"about": about, "toc": toc, "css": css})
    return html


# --- what the folder says of a notebook ---------------------------------------------------------------------


@dataclass
class Entry:
    """A notebook in a results folder, as the index shows it."""

    stem: str
    title: str
    status: str = "not run"
    bad: bool = False
    headline: str = ""
    details: str = ""
    command: str = ""
    commit: str = ""
    report: str = ""
    manifest: str = ""
    thumbnail: str = ""
    alt: str = ""
    artefacts: list[dict[str, str]] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict, repr=False)  # the manifest
    seconds: float = 0.0
    started: str = ""


def entry(root: Path, source: Path) -> Entry:
    """What the folder holds of the notebook at `source`: an executed copy, what is left of a failed one, or nothing."""
    stem = source.stem
    title = re.search(r"^# (.+)$", nbformat.read(source, as_version=4).cells[0].source, re.MULTILINE)
    found = Entry(stem, title[1] if title else stem)
    whole, part = (root / "notebooks" / f"{stem}{suffix}" for suffix in (".ipynb", ".unfinished.ipynb"))
    path = whole if whole.is_file() else part
    if not path.is_file():
        return found
    try:
        metadata = read_notebook(path).metadata
    except ResultsError:  # papermill was killed while it wrote
        found.status, found.bad = UNFINISHED if path is part else f"FAILED: {path.name} is damaged", True
        return found
    run = metadata.get("jemlib", {})
    found.about = Store(root, stem).manifest()
    found.commit = _commit(run)
    found.command, found.seconds = run.get("command", ""), run.get("seconds", 0.0)
    found.started = (metadata.get("papermill", {}).get("start_time") or "")[:16].replace("T", " ")
    if (root / "reports" / f"{stem}.html").is_file():
        found.report = f"reports/{stem}.html"
    facts = _data_and_runs(root, found.about)
    if run.get("failure"):
        found.status, found.bad = f"FAILED: {run['failure']}", True
    elif path is part:
        found.status, found.bad = UNFINISHED, True
    else:
        found.status = f"ok; {facts['runs']}" if facts["runs"] else "ok"
    times = [f"{found.seconds:.0f} s" if found.seconds else "", found.started and f"started {found.started} UTC"]
    found.details = "; ".join(filter(None, [facts["data"], *times]))
    if path is whole:  # what a failed run has written so far is in its page, and is no result
        found.headline, found.manifest = found.about.get("headline", ""), f"artefacts/{stem}.json"
        _artefacts(root, found)
    return found


def _commit(about: dict[str, Any]) -> str:
    return f"{(about.get('commit') or 'unknown')[:12]}{' (with local changes)' if about.get('dirty') else ''}"


def _records(root: Path, manifest: dict[str, Any]) -> dict[str, dict[str, Any]]:
    parts = [*manifest.get("tables", {}).values(), *manifest.get("figures", {}).values()]
    names = sorted({run for about in parts for run in about["runs"]})
    paths = {name: root / "runs" / f"{name}.json" for name in names}
    return {name: read_json(path) for name, path in paths.items() if path.is_file()}


def _data_and_runs(root: Path, manifest: dict[str, Any]) -> dict[str, str]:
    records = _records(root, manifest).values()
    sources = list(dict.fromkeys(record["data"]["source"] for record in records))
    diverged = sum(record["status"] != "ok" for record in records)
    seeds = sorted({record["seed"] for record in records})
    return {
        "data": f"data: {', '.join(sources)}" if sources else "",
        "runs": f"{diverged} of {len(records)} runs diverged" if records else "",
        "seeds": ", ".join(map(str, seeds)),
    }


def _artefacts(root: Path, found: Entry) -> None:
    for kind, suffix in (("figures", "png"), ("tables", "csv")):
        for name, about in found.about.get(kind, {}).items():
            n = len(about["runs"])
            behind = f"{n} run{'s' if n > 1 else ''}" if n else "parameters"
            found.artefacts.append({"path": f"{kind}/{name}.{suffix}", "behind": behind})
    name = found.about.get("thumbnail", "")
    path = root / "figures" / f"{name}.png"
    if name in found.about.get("figures", {}) and path.is_file():
        found.thumbnail, found.alt = _thumbnail(path), found.about["figures"][name]["alt"]


def _thumbnail(path: Path, width: int = 640) -> str:
    buffer = io.BytesIO()
    with Image.open(path) as picture:
        picture.thumbnail((width, width), Image.Resampling.LANCZOS)
        picture.convert("RGB").save(buffer, format="webp", quality=80)
    return f"data:image/webp;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def render(template: str, **about: Any) -> str:
    """A page of its own from `templates/<template>.html.j2`, in the style of all pages; what it is told is escaped."""
    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True)
    return environment.get_template(f"{template}.html.j2").render(css=(TEMPLATES / "style.css").read_text(), **about)


# --- pages of a folder --------------------------------------------------------------------------------------


def write_page(root: Path, notebook: NotebookNode, stem: str) -> None:
    """reports/<stem>.html from an executed copy, whole or failed; its metadata's `jemlib` says which."""
    run, manifest = notebook.metadata["jemlib"], Store(root, stem).manifest()
    facts = _data_and_runs(root, manifest)
    machine = f"{manifest.get('device', '')}, {manifest.get('cpu', '')}, {manifest.get('threads', '?')} thread(s) here"
    shown = {
        "status": f"FAILED: {run['failure']}" if run.get("failure") else "ok",
        "runs": facts["runs"],
        "data": facts["data"].removeprefix("data: "),
        "seeds": facts["seeds"],
        "commit": _commit(run),
        "started (UTC)": (notebook.metadata.papermill.get("start_time") or "")[:16].replace("T", " "),
        "took": f"{run['seconds']:.0f} s",
        "machine": machine if manifest else "",
        "versions": ", ".join(f"{name} {version}" for name, version in manifest.get("versions", {}).items()),
        "figures": ", ".join(f"{name}.png" for name in manifest.get("figures", {})),
        "tables": ", ".join(f"{name}.csv" for name in manifest.get("tables", {})),
    }
    shown = {name: value for name, value in shown.items() if value}
    parts = [f"profile {run['profile']}", shown["status"], facts["runs"], facts["data"], shown["took"]]
    summary = "; ".join(filter(None, parts))
    about = {
        "title": f"{'FAILED: ' if run.get('failure') else ''}{stem} ({run['profile']})",
        "profile": run["profile"], "summary": summary, "facts": shown,
        "command": run["command"], "failure": run.get("failure", ""), "times": _times(root, stem, manifest),
    }  # fmt: skip
    write_atomic(root / "reports" / f"{stem}.html", page(notebook, about).encode())


def _times(root: Path, stem: str, manifest: dict[str, Any]) -> str:
    """HTML of the rows of timing.csv about a notebook and its runs; empty where there are none."""
    try:
        table = read_csv(root / "tables" / "timing.csv")
    except (FileNotFoundError, ResultsError):  # a damaged one: the next notebook that ends starts it anew
        return ""
    rows = table[table["what"].isin([f"notebook {stem}", *_records(root, manifest)])].dropna(axis="columns", how="all")
    return "" if rows.empty else rows.to_html(index=False, border=0, na_rep="", float_format="{:.4g}".format)


def write_index(root: Path, sources: list[Path], profile: str, said: dict[str, str]) -> None:
    """index.html of a results folder. said: stem -> status of what has left nothing to read its status from."""
    found = [entry(root, source) for source in sources]
    for one in found:
        if one.stem in said:
            one.status, one.bad = said[one.stem], True
    run = [one for one in found if one.about]
    last = run[-1].about if run else {}
    seeds = {seed for one in run for seed in _data_and_runs(root, one.about)["seeds"].split(", ") if seed}
    facts = {
        "profile": profile,
        "status": ", ".join(f"{one.stem} {one.status.split(':')[0].split(';')[0]}" for one in found),
        "time taken": f"{sum(one.seconds for one in found):.0f} s, without the installation" if run else "",
        "commit": ", ".join(dict.fromkeys(one.commit for one in run)),
        "seeds": ", ".join(sorted(seeds, key=int)),
        "machine": f"{last.get('device')}, {last.get('cpu')}, {last.get('platform')}" if last else "",
        "versions": ", ".join(f"{name} {version}" for name, version in last.get("versions", {}).items()),
    }
    html = render(
        "index",
        title=f"jemlib, profile {profile}",
        note="Its numbers mean nothing: a look at the machinery." if profile == "smoke" else "",
        facts={name: value for name, value in facts.items() if value},
        notebooks=found,
        tables=headlines.tables(root),
    )
    write_atomic(root / "index.html", html.encode())
