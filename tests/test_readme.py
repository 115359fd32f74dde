"""The README says what the reference results say, and what it promises exists."""

import re
import shutil

import pandas as pd
import pytest

from jemlib import readme
from jemlib.provenance import repo_root

ROOT = repo_root()


def test_the_numbers_are_those_of_the_reference_run(tmp_path):
    copy = tmp_path / "README.md"
    copy.write_text((ROOT / "README.md").read_text())
    assert not readme.update(copy), "run `python -m jemlib readme`"
    assert "| st_jem |" in copy.read_text(), "there are numbers at all"


def test_a_changed_table_changes_the_readme(tmp_path):
    table = {"dataset": ["rings"] * 2, "method": "jem", "seed": [0, 1], "kl_nats": [0.1, 0.3]}
    table |= {"kl_to_optimum": None, "mi_nats": 1.0, "status": ["ok", "diverged at step 9"]}
    folder = tmp_path / "reference"
    (folder / "tables").mkdir(parents=True)
    pd.DataFrame(table).to_csv(folder / "tables" / "toy_methods.csv", index=False)
    text = readme.render(folder)
    assert "| rings | jem | 0.100 | – | 1 | 2 | 1 ok, 1 diverged at step 9 |" in text
    shutil.copytree(folder, tmp_path / "reference_hour")
    assert readme.render(folder).count("| rings | jem |") == 2 and text in readme.render(folder), "the longer run below"
    with pytest.raises(ValueError, match="lacks the lines"):
        (tmp_path / "README.md").write_text("no markers")
        readme.update(tmp_path / "README.md", folder)


def test_links_and_pictures_exist():
    text = (ROOT / "README.md").read_text()
    targets = [target for target in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in target]
    assert targets
    for target in targets:
        assert (ROOT / target).exists(), target
