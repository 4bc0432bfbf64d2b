"""The duration of each step of the tests on kind, printed at the end of a test run."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

PROPERTY = "steps of kind"
"""The key of the steps in the properties of a test's report, which an xdist worker sends to the test run."""
_finished: list[tuple[str, float]] = []


@contextmanager
def step(name: str) -> Iterator[None]:
    """Measure a step, also a step that fails."""
    started = time.monotonic()
    try:
        yield
    finally:
        _finished.append((name, time.monotonic() - started))


def take() -> list[tuple[str, float]]:
    """Return the steps that were measured since the last call."""
    taken = list(_finished)
    _finished.clear()
    return taken


def table(stats: Mapping[str, Iterable[Any]]) -> str:
    """Return a line for each step in the reports of a test run; empty when none ran on kind."""
    reports = [
        report
        for group in stats.values()
        for report in group
        if getattr(report, "when", "") == "teardown"
    ]
    steps = [
        step
        for report in reports
        for key, value in report.user_properties
        if key == PROPERTY
        for step in value
    ]
    return "".join(f"{seconds:8.1f} s  {name}\n" for name, seconds in steps)
