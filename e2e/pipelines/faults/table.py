"""The table of the fault matrix: a row for each fault, sent from the test's process to the process that prints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

PROPERTY = "fault"
"""Name of the property of a test's report that holds its row."""
MISSING = "none"
HEADINGS = (
    "fault",
    "verdict",
    "attempts",
    "exit code",
    "lost steps",
    "seconds to the next step",
    "identical adapter",
)


@dataclass(frozen=True)
class Row:
    """The effect of a fault on a training, as text."""

    fault: str
    verdict: str
    attempts: str
    exit_code: str
    lost_steps: str
    seconds: str
    identical: str


def as_property(row: Row) -> dict[str, str]:
    """Return a row as a value that pytest-xdist can send."""
    return asdict(row)


def rows_of(stats: Mapping[str, Iterable[Any]]) -> list[Row]:
    """Return the rows of a terminal reporter's statistics, sorted by fault."""
    reports = (
        report
        for outcome in stats.values()
        for report in outcome
        if getattr(report, "when", "") == "call"
    )
    values = (
        value
        for report in reports
        for name, value in report.user_properties
        if name == PROPERTY
    )
    return sorted({Row(**value) for value in values}, key=lambda row: row.fault)


def markdown(rows: Iterable[Row]) -> str:
    """Return the rows as a Markdown table."""
    cells = [HEADINGS, ["---"] * len(HEADINGS)]
    cells += [[getattr(row, field.name) for field in fields(Row)] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)
