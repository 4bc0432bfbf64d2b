"""Whether a scene ended as its fault must end, and its row in the table."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from e2e.pipelines.driver import Object
from e2e.pipelines.faults.fault import FAILED, INTERRUPTED, Fault
from e2e.pipelines.faults.journal import Cost
from e2e.pipelines.faults.scene import STEPS, Scene
from e2e.pipelines.faults.table import MISSING, Row

SIGTERM_CODE = 75
"""Exit code of a process that saved its step on SIGTERM."""
ROUNDING = 0.01
"""Seconds by which a sum may differ from its parts, each rounded to milliseconds."""


def row_of(fault: Fault, scene: Scene, cost: Cost, adapter: str) -> Row:
    """Return the row of a finished scene."""
    first = scene.attempts[0]
    evidence = re.search(fault.evidence, first.get("message", ""))
    verdict = first["reason"] if first["outcome"] == FAILED else first["outcome"]
    parts = [verdict, evidence[0] if evidence else "", *scene.notes]
    return Row(
        fault.name,
        "; ".join(part for part in parts if part),
        str(len(scene.attempts)),
        str(first.get("exitCode", MISSING)),
        f"{cost.lost} of at most {0 if fault.graceful else cost.allowed}",
        f"{cost.seconds:.1f}",
        "yes" if adapter == scene.site.reference else "no",
    )


def problems_of(fault: Fault, scene: Scene, cost: Cost, adapter: str) -> Iterator[str]:
    """Yield the problems of a finished scene: a training that survived its fault has none."""
    status = scene.driver.status
    train = scene.driver.stage("train")
    first = scene.attempts[0]
    yield from scene.problems
    yield from _different(
        "outcomes",
        [attempt["outcome"] for attempt in scene.attempts],
        [*fault.outcomes],
    )
    yield from _different("failures", train["failures"], fault.outcomes.count(FAILED))
    yield from _different(
        "interruptions", train["interruptions"], fault.outcomes.count(INTERRUPTED)
    )
    yield from _different(
        "interruptions of the pipeline",
        status["interruptions"],
        fault.outcomes.count(INTERRUPTED),
    )
    yield from _different("steps of the result", train["result"]["steps"], STEPS)
    yield from _different("adapter", adapter, scene.site.reference)
    if first.get("exitCode") not in fault.exit_codes:
        yield f"exit code {first.get('exitCode')}, expected one of {fault.exit_codes}"
    if not re.search(fault.evidence, first.get("message", "")):
        yield f"the message of attempt 1 is {first.get('message')!r}, without {fault.evidence!r}"
    if cost.lost > (0 if fault.graceful else cost.allowed):
        yield f"{cost.lost} steps were lost, the durable checkpoints allow {cost.allowed}, SIGTERM allows none"
    if train["lostSteps"] > cost.lost:
        yield f"the status has {train['lostSteps']} lost steps, the journal {cost.lost}"
    yield from _unsaved(scene.attempts)
    yield from _unpaid(train["costs"], scene.attempts)


def _unpaid(costs: Object, attempts: list[Object]) -> Iterator[str]:
    """Yield the problems of the costs of the stage: each attempt counts once, with the seconds that it ran."""
    yield from _different(
        "attempts that are paid for", costs["attempts"], len(attempts)
    )
    seconds = sum(attempt.get("seconds", 0) for attempt in attempts)
    if abs(costs["seconds"] - seconds) > ROUNDING:
        yield f"the costs have {costs['seconds']} seconds, the attempts {seconds}"


def _unsaved(attempts: list[Object]) -> Iterator[str]:
    """Yield the attempts that SIGTERM ended and that did not report the step at which the next attempt started."""
    for before, after in pairwise(attempts):
        saved = before.get("savedStep")
        message = before.get("message", "")
        if before.get("exitCode") != SIGTERM_CODE:
            continue
        if f"saved at step {saved}" not in message:
            yield f"attempt {before['number']} reports {message!r}, and its status has saved step {saved}"
        if after.get("startStep") != saved:
            yield f"attempt {after['number']} started at step {after.get('startStep')}, saved were {saved}"


def _different(field: str, observed: object, expected: object) -> Iterator[str]:
    if observed != expected:
        yield f"{field}: {observed}, expected {expected}"
