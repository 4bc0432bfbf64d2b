"""Which changes of the status are written at once, and which wait until the attempt is a little older."""

from datetime import datetime, timedelta

import pytest
from support.operator.scenario import START, Scenario

from finetune_operator.api.conditions import Reason
from finetune_operator.api.status import Outcome, PipelineStatus, Refusal, StageState
from finetune_operator.core.settings import Settings
from finetune_operator.core.write_delay import time_until_write
from finetune_trainer.contract import Progress

DELAY = timedelta(seconds=10)
AT_ONCE = timedelta()
CREATED = START


def recorded() -> PipelineStatus:
    """Return a status whose first attempt was recorded before its Job exists."""
    scenario = Scenario()
    scenario.reconcile()
    return scenario.status


BEFORE = recorded()


def stage_changed(status: PipelineStatus, **changes) -> PipelineStatus:
    stage = status.stages["prepare"].model_copy(update=changes)
    return status.model_copy(update={"stages": {**status.stages, "prepare": stage}})


def attempt_changed(**changes) -> PipelineStatus:
    *older, last = BEFORE.stages["prepare"].attempts
    return stage_changed(BEFORE, attempts=(*older, last.model_copy(update=changes)))


def wait_for(
    after: PipelineStatus, seconds: float = 3.0, before: PipelineStatus = BEFORE
) -> timedelta | None:
    return time_until_write(before, after, DELAY, START + timedelta(seconds=seconds))


def created_at(time: datetime) -> PipelineStatus:
    return attempt_changed(created_at=time)


WAITING = {
    "creation time": created_at(CREATED),
    "start time": attempt_changed(created_at=CREATED, started_at=CREATED),
    "running": stage_changed(created_at(CREATED), state=StageState.RUNNING),
    "progress": stage_changed(
        created_at(CREATED),
        progress=Progress(stage="prepare", updated_at=START, step=4),
    ),
    "message while it progresses": stage_changed(created_at(CREATED), message="4 of 9"),
}
URGENT = {
    "attempt ended": attempt_changed(
        created_at=CREATED, outcome=Outcome.FAILED, finished_at=START
    ),
    "stopping": attempt_changed(created_at=CREATED, stopping=Reason.CANCELLED),
    "blocked": stage_changed(
        created_at(CREATED), reason=Reason.WAITING_FOR_QUOTA, message="quota"
    ),
    "failures": stage_changed(created_at(CREATED), failures=1),
    "cancelled": created_at(CREATED).model_copy(update={"cancelled": True}),
    "finished": created_at(CREATED).model_copy(update={"finished_at": START}),
    "generation": created_at(CREATED).model_copy(update={"observed_generation": 9}),
    "refusal": created_at(CREATED).model_copy(
        update={
            "refusals": (
                Refusal(
                    subject="workspace", reason=Reason.WAITING_FOR_QUOTA, message="m"
                ),
            )
        }
    ),
    "first attempt": BEFORE,
}


@pytest.mark.parametrize("after", WAITING.values(), ids=WAITING)
def test_times_and_progress_of_a_young_attempt_wait(after):
    assert wait_for(after, 3) == timedelta(seconds=7)
    assert wait_for(after, 10) == AT_ONCE


@pytest.mark.parametrize("name", URGENT)
def test_what_a_person_waits_for_is_written_at_once(name):
    assert (
        wait_for(
            URGENT[name], before=PipelineStatus() if name == "first attempt" else BEFORE
        )
        == AT_ONCE
    )


def test_equal_status_is_never_written():
    assert wait_for(BEFORE) is None


def test_change_without_a_running_attempt_is_written_at_once():
    ended = attempt_changed(outcome=Outcome.FAILED, finished_at=START)
    assert wait_for(stage_changed(ended, finished_at=START), before=ended) == AT_ONCE


def test_clock_that_is_ahead_does_not_delay_the_write():
    """The creation time is in the operator's future: to wait for it might take hours."""
    assert wait_for(created_at(START + timedelta(hours=1))) == AT_ONCE


def test_short_stage_costs_two_writes():
    """Recorded with its Job, and ended: its start is written with its end."""
    scenario = Scenario(settings=Settings(write_delay=DELAY))
    scenario.reconcile()
    version = scenario.cluster.pipelines[scenario.key].version
    job = scenario.attempt("prepare").job
    scenario.cluster.start(job)
    scenario.reconcile()
    assert scenario.cluster.pipelines[scenario.key].version == version
    assert scenario.requeue_after == DELAY
    scenario.after(1).complete("prepare")
    assert scenario.stage("prepare").attempts[-1].started_at == START


def test_progress_of_an_older_attempt_is_written():
    scenario = Scenario(settings=Settings(write_delay=DELAY))
    scenario.reconcile()
    job = scenario.attempt("prepare").job
    scenario.cluster.start(job)
    scenario.after(11).reconcile()
    assert scenario.stage("prepare").state is StageState.RUNNING


def test_creation_of_a_waiting_job_is_written_after_the_delay():
    """Its time is the Job's own: the time of each look would never be old enough."""
    scenario = Scenario(settings=Settings(write_delay=timedelta(seconds=2)))
    scenario.reconcile()
    job = scenario.attempt("prepare").job
    scenario.cluster.update_job(job, created_at=scenario.cluster.now)
    scenario.after(1).reconcile()
    assert scenario.attempt("prepare").created_at is None
    scenario.after(1).reconcile()
    assert scenario.attempt("prepare").created_at
