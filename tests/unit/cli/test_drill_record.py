"""What a drill records of each look, and when it is over; no cluster, no process."""

from datetime import UTC, datetime
from decimal import Decimal

import pytest

from finetune_cli.drill.conduct import report
from finetune_cli.drill.cost import cost_of
from finetune_cli.drill.record import SETTLE_SECONDS, Drill, Look
from finetune_cli.drill.target import DrillTarget
from finetune_operator.api.costs import PipelineCosts
from finetune_operator.api.status import (
    AttemptStatus,
    Outcome,
    PipelineStatus,
    StageState,
    StageStatus,
)
from finetune_trainer.contract import Progress


def attempt(
    number: int, outcome: Outcome = Outcome.RUNNING, **fields: object
) -> AttemptStatus:
    return AttemptStatus(
        number=number,
        job=f"job-{number}",
        identity="i",
        execution="e",
        outcome=outcome,
        **fields,
    )


def status(
    *attempts: AttemptStatus, state: StageState = StageState.RUNNING
) -> PipelineStatus:
    return PipelineStatus(stages={"train": StageStatus(state=state, attempts=attempts)})


def progress(step: int, start: int) -> Progress:
    return Progress(
        stage="train",
        updated_at=datetime(2030, 1, 1, tzinfo=UTC),
        step=step,
        start_step=start,
    )


INTERRUPTED = attempt(1, Outcome.INTERRUPTED, last_step=52, saved_step=52)


@pytest.fixture
def drill() -> Drill:
    return Drill(
        DrillTarget("team/demo", "train", attempt(1), 0, 20, kill=False), step=50
    )


def test_drill_waits_for_the_lost_steps_of_the_status(drill):
    now = status(INTERRUPTED, attempt(2))
    assert not drill.record(Look(1, now, ended=True, next_job=True))
    assert not drill.record(Look(5, now, next_job=True, progress=progress(53, 52)))
    settled = INTERRUPTED.model_copy(update={"lost_steps": 0})
    assert drill.record(
        Look(9, status(settled, attempt(2)), next_job=True, progress=progress(70, 52))
    )
    assert (drill.seconds, drill.problem) == (
        {"durable": 1, "nextJob": 1, "nextStep": 5},
        "",
    )


def test_drill_is_over_without_them_after_a_while(drill):
    now = status(INTERRUPTED, attempt(2))
    drill.record(Look(5, now, next_job=True, progress=progress(53, 52)))
    assert not drill.record(
        Look(5 + SETTLE_SECONDS, now, next_job=True, progress=progress(54, 52))
    )
    assert drill.record(
        Look(5.1 + SETTLE_SECONDS, now, next_job=True, progress=progress(54, 52))
    )
    assert drill.lost_steps == 0


def test_progress_of_a_loading_attempt_is_no_step(drill):
    now = status(INTERRUPTED, attempt(2))
    drill.record(Look(5, now, next_job=True, progress=progress(52, 52)))
    assert drill.resumed_at == 52
    assert "nextStep" not in drill.seconds


def test_step_read_before_the_kill_counts_as_lost(drill):
    killed = attempt(
        1, Outcome.INTERRUPTED, last_step=30, lost_steps=0
    )  # the operator had read step 30 last
    drill.record(
        Look(5, status(killed, attempt(2)), next_job=True, progress=progress(41, 40))
    )
    assert drill.lost_steps == 10


def test_next_attempt_that_ends_before_a_step_is_a_problem(drill):
    again = attempt(2, Outcome.INTERRUPTED, message="the node is gone")
    assert drill.record(Look(5, status(INTERRUPTED, again), next_job=True))
    assert (
        drill.problem
        == "attempt 2 ended before its first step, interrupted: the node is gone"
    )
    assert report(drill)[-1] == drill.problem


def test_end_of_the_run_is_a_problem_only_while_not_over(drill):
    gone = "the `finetune run` that worked on it has ended"
    assert drill.record(Look(1, status(INTERRUPTED), ended=True, problem=gone))
    assert drill.problem == gone
    done = status(
        INTERRUPTED, attempt(2, Outcome.SUCCEEDED), state=StageState.SUCCEEDED
    )
    assert drill.record(Look(2, done, ended=True, problem=gone))
    assert drill.problem == ""


def test_failed_stage_is_a_problem(drill):
    assert drill.record(
        Look(1, status(INTERRUPTED, state=StageState.FAILED), ended=True)
    )
    assert drill.problem.startswith("train failed: ")


def test_cost_is_empty_without_a_price():
    free = attempt(1, seconds=10.0, cost=None, price=None)
    assert cost_of(PipelineStatus(), free) == {}
    priced = attempt(1, price=Decimal("0.80"), cost=Decimal("0.10"))
    assert cost_of(PipelineStatus(costs=PipelineCosts(currency="USD")), priced) == {
        "price": "0.80",
        "cost": "0.10",
        "currency": "USD",
    }
