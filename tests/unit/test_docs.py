"""Pages that list names of the code list all of them, and generated pages are as the generator writes them."""

import re
import runpy
from pathlib import Path

import pytest

from finetune_operator.api.conditions import Reason

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GENERATOR = runpy.run_path(str(ROOT / ".ci" / "generate_docs.py"))


def test_every_reason_has_a_row_in_the_reference():
    rows = re.findall(r"^\| `(\w+)` \|", (DOCS / "reference" / "conditions.md").read_text(), re.MULTILINE)
    assert {reason.value for reason in Reason} <= set(rows)


def test_every_reason_has_a_section_in_troubleshooting():
    sections = re.findall(r"^### (\w+)$", (DOCS / "guides" / "troubleshooting.md").read_text(), re.MULTILINE)
    assert sorted(sections) == sorted(reason.value for reason in Reason)


@pytest.mark.parametrize("name", ["api.md", "cli.md", "metrics.md"])
def test_generated_pages_are_up_to_date(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "96")
    assert (DOCS / "reference" / name).read_text() == GENERATOR["pages"]()[name], "run `make docs`"


def test_links_between_pages_lead_somewhere():
    pages = [
        *ROOT.glob("*.md"),
        *DOCS.rglob("*.md"),
        *ROOT.glob("examples/**/*.md"),
        ROOT / "testcluster" / "README.md",
    ]
    links = [
        (page, target)
        for page in pages
        for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)", page.read_text())
    ]
    assert [(page.name, target) for page, target in links if not (page.parent / target).exists()] == []
