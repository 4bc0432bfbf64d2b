"""Tables of `kubectl get` on the pages have the columns that the API server shows."""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]


def shown_columns() -> list[str]:
    """Return the names of the columns that `kubectl get` prints without -o wide."""
    [crd] = (ROOT / "crds").glob("*.yaml")
    [version] = yaml.safe_load(crd.read_text())["spec"]["versions"]
    columns = version["additionalPrinterColumns"]
    names = [column["name"] for column in columns if not column.get("priority")]
    return ["NAME", *(name.upper() for name in names)]


def test_tables_of_pipelines_have_all_columns():
    tables = {
        page.name: heading.split()
        for page in PAGES
        # `finetune` has columns of its own.
        for heading in re.findall(
            r"^NAME +PHASE +STAGE .*$", page.read_text(), re.MULTILINE
        )
    }
    assert tables == dict.fromkeys(tables, shown_columns())
    assert "README.md" in tables
