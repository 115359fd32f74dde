"""The pages: nothing fetched, formulas drawn, every picture described, readable in a narrow window."""

import html
import json
import re
import shutil
import subprocess

import nbformat
import pytest
from bs4 import BeautifulSoup
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from jemlib import reports
from jemlib.provenance import repo_root

NOTEBOOKS = sorted((repo_root() / "notebooks").glob("[0-9][0-9]_*.ipynb"))
ABOUT = {"title": "t", "profile": "quick", "summary": "s", "facts": {}, "command": "c", "failure": "", "times": ""}


def soup_of(*cells, **about) -> BeautifulSoup:
    return BeautifulSoup(reports.page(new_notebook(cells=list(cells)), ABOUT | about), "html.parser")


def test_every_formula_of_the_study_becomes_mathml():
    for path in NOTEBOOKS:
        texts = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown"]
        page = soup_of(*texts)
        source = re.sub(r"```.*?```", "", "\n\n".join(cell.source for cell in texts), flags=re.DOTALL)
        assert len(page.find("main").find_all("math")) == len(re.findall(r"\$+[^$]+\$+", source)), path.name
        for tag in page.find_all(["code", "pre", "math"]):
            tag.decompose()
        left = page.find("main").get_text()
        assert "\\" not in left and "$" not in left, path.name


def test_contents_lead_to_headings_and_figures_are_described():
    image = new_output("display_data", {"image/png": "iVBORw0KGgo=\n"}, metadata={"image/png": {"alt": 'a "b" <c>'}})
    page = soup_of(
        new_markdown_cell("# Title\n\n## First $x$ part\n\ntext\n\n### Deeper"), new_code_cell("1 < 2", outputs=[image])
    )
    anchors = [link["href"] for link in page.select("nav li a")]
    assert len(anchors) == 2 and all(page.find(id=anchor[1:]) for anchor in anchors)
    assert page.find("img")["alt"] == 'a "b" <c>' and page.find("img")["src"] == "data:image/png;base64,iVBORw0KGgo="
    code = page.select_one("details.code")
    assert "open" not in code.attrs and "1 < 2" in code.get_text(), "folded, but there"


def test_what_a_cell_or_a_folder_says_is_text(tmp_path):
    evil = "<img src=x onerror=alert(1)>"
    stream = new_output("stream", name="stdout", text=evil)
    error = new_output("error", ename="E", evalue=evil, traceback=[f"\x1b[31m{evil}\x1b[0m"])
    page = soup_of(new_code_cell(f"'{evil}'", outputs=[stream, error]), failure=evil, summary=evil, facts={evil: evil})
    assert not page.find_all("img") and not page.find_all("script")
    assert page.get_text().count(evil) >= 6


def test_a_page_holds_no_address_but_its_own_links():
    page = soup_of(new_markdown_cell("# T"), new_code_cell("1"))
    assert not page.find_all("script") and not page.find_all("link", rel="stylesheet")
    assert "http" not in str(page)


# --- the pages of the smoke profile, in a browser ---

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
in_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, which is not installed")

PROBE = """
<script>
addEventListener("load", () => {
  const box = element => element.getBoundingClientRect();
  document.body.dataset.seen = JSON.stringify({
    width: innerWidth, overflow: document.documentElement.scrollWidth - innerWidth,
    images: [...document.images].map(i => ({alt: i.alt, drawn: i.complete && i.naturalWidth > 0})),
    math: [...document.querySelectorAll("math")].map(m => box(m).width * box(m).height),
    requests: performance.getEntriesByType("resource").map(r => r.name).filter(n => !n.startsWith("data:")),
  });
  parent.document.body.dataset.seen = document.body.dataset.seen;
});
</script>
"""


def look(page: str, folder, width: int | None = None) -> tuple[dict, list[str]]:
    """What a browser without a network sees of a page, in a frame of that width; and its console's messages."""
    page = page.replace("</body>", PROBE + "</body>")
    if width:
        page = f'<body><iframe width="{width}" height="900" srcdoc="{html.escape(page)}"></iframe></body>'
    path = folder / "looked_at.html"
    path.write_text(page)
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom",
               "--window-size=1300,900", "--virtual-time-budget=5000", "--host-resolver-rules=MAP * ~NOTFOUND",
               f"--user-data-dir={folder / 'profile'}", path.as_uri()]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    seen = BeautifulSoup(done.stdout, "html.parser").body.get("data-seen")
    console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    assert seen, f"the page did not load: {done.stderr[-500:]}"
    return json.loads(seen), console


@in_browser
def test_the_browser_check_sees_what_it_should(tmp_path):
    bad = '<body><img src="https://example.org/x.png"><p style="width: 999px">-<script>nothing()</script></body>'
    seen, console = look(bad, tmp_path, width=390)
    assert seen["requests"] and console and seen["overflow"] > 0 and seen["width"] == 390
    assert seen["images"] == [{"alt": "", "drawn": False}]


@in_browser
@pytest.mark.notebook
@pytest.mark.timeout(900)
@pytest.mark.parametrize("width", [None, 390])
def test_pages_open_offline_and_fit(smoke, tmp_path, width):
    pages = [smoke / "index.html", *sorted((smoke / "reports").glob("*.html"))]
    assert len(pages) == 1 + len(NOTEBOOKS)
    formulas = 0
    for path in pages:
        assert path.stat().st_size < 3e6, path.name
        seen, console = look(path.read_text(), tmp_path, width)
        assert not console and not seen["requests"], path.name
        assert seen["images"] and all(image["alt"] and image["drawn"] for image in seen["images"]), path.name
        assert all(area > 0 for area in seen["math"]), path.name
        assert seen["overflow"] <= 0, f"{path.name} is wider than its window"
        formulas += len(seen["math"])
    assert formulas


@pytest.mark.notebook
@pytest.mark.timeout(900)
def test_the_index_leads_to_every_figure_and_says_how_to_make_it(smoke):
    index = BeautifulSoup((smoke / "index.html").read_text(), "html.parser")
    rows = {row.find("a").get_text(): row for row in index.select(".left tbody tr")}
    written = {str(path.relative_to(smoke)) for kind in ("figures/*.png", "tables/*.csv") for path in smoke.glob(kind)}
    assert set(rows) == written - {"tables/timing.csv"}
    for name, row in rows.items():
        number = name.split("/")[1][:2] if name.startswith("figures") else ""
        assert re.search(rf"\./run_all\.sh --profile smoke --only [0-9,]*{number}", row.find("code").get_text()), name
        for link in row.find_all("a"):
            assert (smoke / link["href"]).is_file()
    assert "02,03,05" in rows["tables/ood.csv"].get_text()
    for card in index.select("article"):
        assert card.find("img")["alt"] and len(card.find("p").get_text()) > 40
        assert (smoke / card.find("h3").find("a")["href"]).is_file()
