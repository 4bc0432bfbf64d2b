"""Pages that list names of the code list all of them, and generated pages are as the generator writes them."""

import ast
import re
import runpy
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from support.operator.pipeline_states import STATES

from finetune_operator.api.conditions import TROUBLESHOOTING_URL, Reason, link
from finetune_operator.controller.metrics import FINAL_PHASES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
CHART = ROOT / "charts" / "finetune-operator"
CHART_README = runpy.run_path(str(ROOT / ".ci" / "generated" / "chart_readme.py"))
CODE = ("operator/finetune_operator", "trainer/finetune_trainer")
GENERATOR = runpy.run_path(str(ROOT / ".ci" / "generated" / "reference_pages.py"))
TROUBLESHOOTING = (DOCS / "guides" / "troubleshooting.md").read_text()
REASONS = sorted(reason.value for reason in Reason)


def anchors(page: str) -> list[str]:
    """Return the anchors of a page's headings, as readers' programs make them."""
    headings = re.findall(
        r"^#+ (.+)$",
        re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL),
        re.MULTILINE,
    )
    return [
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in headings
    ]


def section(reason: str) -> str:
    """Return the text below the heading of a reason; raises ValueError unless there is exactly one such heading."""
    [section] = re.findall(
        rf"^### {reason}\n(.*?)(?=^##|\Z)", TROUBLESHOOTING, re.MULTILINE | re.DOTALL
    )
    return section


def entry(name: str, text: str) -> str:
    """Return an entry of the list in a section, on one line; empty if there is none."""
    entry = re.search(rf"^- {name}: (.*?)(?=^\S|^$|\Z)", text, re.MULTILINE | re.DOTALL)
    return " ".join(entry[1].split()) if entry else ""


@cache
def words_of_the_code() -> str:
    """Return every text constant of the operator and the trainer, without line breaks."""
    trees = (
        ast.parse(path.read_text())
        for folder in CODE
        for path in sorted((ROOT / folder).rglob("*.py"))
    )
    constants = (
        node.value
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
    )
    return "\n".join(
        " ".join(text.split()) for text in constants if isinstance(text, str)
    )


def quoted(text: str) -> list[str]:
    """Return the parts of code spans that are the same in every message: not NAME, not N, not what … stands for."""
    spans = [both[0] or both[1] for both in re.findall(r"``(.+?)``|`([^`]+)`", text)]
    parts = (
        part.strip(" `;:,./")
        for span in spans
        for part in re.split(r"…|\b[A-Z]+\b", span)
    )
    return [part for part in parts if len(part) > 5]


def test_every_reason_has_a_row_that_leads_to_its_section():
    text = (DOCS / "reference" / "conditions.md").read_text()
    rows = re.findall(
        r"^\| \[`(\w+)`\]\(\.\./guides/troubleshooting\.md#(\w+)\) \|",
        text,
        re.MULTILINE,
    )
    assert sorted(rows) == [(reason, reason.lower()) for reason in REASONS]


def test_every_reason_has_one_section_in_troubleshooting():
    sections = re.findall(r"^### (\w+)$", TROUBLESHOOTING, re.MULTILINE)
    assert sorted(sections) == REASONS
    assert {reason.lower() for reason in REASONS} <= set(anchors(TROUBLESHOOTING))


@pytest.mark.parametrize("reason", Reason)
def test_link_of_a_reason_leads_to_its_section(reason):
    """Sections of "It waits", "It failed" and "… the server is down"; there is nothing to fix in later sections."""
    to_fix = TROUBLESHOOTING.partition("## Attempts that ended early")[0]
    has_fix = f"### {reason}\n" in to_fix
    page, _, anchor = (
        link(reason, TROUBLESHOOTING_URL)
        .removeprefix(" (see ")
        .removesuffix(")")
        .partition("#")
    )
    assert (page, anchor) == (
        ("docs/guides/troubleshooting.md", reason.lower()) if has_fix else ("", "")
    )
    assert not has_fix or anchor in anchors((ROOT / page).read_text())


@pytest.mark.parametrize("reason", REASONS)
def test_section_of_a_reason_has_its_message_and_a_fix(reason):
    assert entry("Message", section(reason))
    assert entry("Fix", section(reason))


@pytest.mark.parametrize("reason", REASONS)
def test_messages_in_troubleshooting_are_those_of_the_code(reason):
    words = words_of_the_code()
    assert [
        part for part in quoted(entry("Message", section(reason))) if part not in words
    ] == []


def test_section_without_a_message_is_of_no_reason_of_ready():
    """The message of `Ready` names at least the stage and its state, so `none` would be wrong."""
    statuses = [state.object()["status"] for state in STATES.values()]
    conditions = [
        condition for status in statuses for condition in status.get("conditions", [])
    ]
    reasons = {
        condition["reason"]
        for condition in conditions
        if condition["type"] == "Ready" and condition["message"]
    }
    assert {"Retrying", "Progressing"} <= reasons
    assert {
        reason
        for reason in reasons
        if entry("Message", section(reason)).startswith("none")
    } == set()


def event_reasons() -> set[str]:
    """Return the reasons of the events that are stored; of f"Pipeline{phase}" the first part."""
    source = (
        ROOT / "operator" / "finetune_operator" / "core" / "events.py"
    ).read_text()
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    events = [call for call in calls if ast.unparse(call.func) == "Event"]
    stored = [
        call
        for call in events
        if "ordinary" not in {word.arg for word in call.keywords}
    ]
    sources = [ast.unparse(call.args[1]) for call in stored]
    matches = [re.match(r"f?[\"'](\w+)", source) for source in sources]
    assert all(matches), sources
    return {match[1] for match in matches if match}


def test_every_event_has_a_row_in_troubleshooting():
    names = event_reasons()
    table = TROUBLESHOOTING.partition("## Events")[2]
    rows = {
        name
        for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    }
    assert {
        name for name in names if not any(row.startswith(name) for row in rows)
    } == set()
    phases = {f"Pipeline{phase}" for phase in FINAL_PHASES}
    assert {row for row in rows if row.startswith("Pipeline")} == phases
    assert len(names) >= 6


@pytest.mark.parametrize("name", ["api.md", "cli.md", "metrics.md"])
def test_generated_pages_are_up_to_date(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "96")
    assert (DOCS / "reference" / name).read_text() == GENERATOR["pages"]()[name], (
        "run `make docs`"
    )


@pytest.mark.parametrize("field", ["nodeSelector", "secretRef", "command"])
def test_api_page_has_each_field_of_a_pod_once(field):
    page = (DOCS / "reference" / "api.md").read_text()
    assert len(re.findall(rf"^\| `{field}` ", page, re.MULTILINE)) == 1


def test_readme_of_the_chart_is_up_to_date():
    assert (CHART / "README.md").read_text() == CHART_README["readme"](), (
        "run `make docs`"
    )


def test_value_of_the_chart_without_a_comment_is_refused():
    with pytest.raises(
        ValueError,
        match=r"values.yaml: metrics.port has no comment: write one above it",
    ):
        list(
            CHART_README["values"]("metrics:\n  port: 80\n  # Level.\n  level: info\n")
        )


PAGES = [
    *ROOT.glob("*.md"),
    *DOCS.rglob("*.md"),
    *ROOT.glob("examples/**/*.md"),
    *ROOT.glob("charts/**/*.md"),
    ROOT / "testcluster" / "README.md",
]
"""Pages whose links are checked."""


def links() -> Iterator[tuple[Path, str, str]]:
    """Yield page, target and anchor of every link that stays in the repository."""
    for page in PAGES:
        for target, anchor in re.findall(
            r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text()
        ):
            yield page, target, anchor


def test_links_between_pages_lead_somewhere():
    assert [
        (page.name, target)
        for page, target, _ in links()
        if not (page.parent / target).exists()
    ] == []


def test_anchors_of_links_are_headings():
    missing = [
        (page.name, target, anchor)
        for page, target, anchor in links()
        if anchor
        and target.endswith((".md", ""))
        and anchor
        not in anchors((page.parent / target if target else page).read_text())
    ]
    assert missing == []
