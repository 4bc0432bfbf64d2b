"""The delay after an interruption: none after a new durable step, else it doubles with each one in a row."""

from datetime import timedelta

import pytest
from support.operator.scenario import Scenario, a_pipeline

from finetune_operator.api.status import Outcome
from finetune_operator.core.settings import Settings

MANY = {"maxInterruptions": 1000}


@pytest.fixture
def scenario() -> Scenario:
    return Scenario(a_pipeline(train=MANY, evaluate=MANY)).run("prepare")


def evict(
    scenario: Scenario,
    step: int | None = None,
    saved: int | None = None,
    cause: str | None = None,
) -> float:
    """Interrupt the next attempt of training after 1 s, and return the seconds until the attempt after it."""
    scenario.cluster.evict(
        scenario.after(1).start("train"), step=step, saved=saved, disruption=cause
    )
    return wait(scenario)


def wait(scenario: Scenario) -> float:
    """Return the seconds until the next attempt; 0 if it has been created."""
    scenario.reconcile_until_stable()
    if scenario.running:
        return 0
    assert scenario.requeue_after
    return scenario.requeue_after.total_seconds()


@pytest.mark.parametrize("cause", [None, "evicted for disk pressure"])
def test_delay_doubles_without_a_new_durable_step(scenario, cause):
    waits = [evict(scenario, cause=cause) for _ in range(12)]
    assert waits == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300]


def test_exit_code_75_in_a_loop_creates_few_jobs(scenario):
    """A process that exits with 75 after a second once got 200 Jobs in 200 s."""
    end = scenario.cluster.now + timedelta(seconds=200)
    while scenario.cluster.now < end:
        evict(scenario)
    assert 6 <= len(scenario.created_jobs) <= 10


def test_attempt_starts_when_the_delay_has_passed(scenario):
    evict(scenario)
    evict(scenario)
    scenario.after(1.5).reconcile_until_stable()
    assert scenario.running is None
    assert (scenario.stage("train").state, scenario.stage("train").reason) == (
        "Pending",
        "Retrying",
    )
    scenario.after(0.5).reconcile_until_stable()
    assert scenario.created_jobs[-1] == "train-a3"


def test_new_durable_step_is_followed_at_once(scenario):
    assert [evict(scenario, step=saved + 5, saved=saved) for saved in (10, 20, 21)] == [
        0,
        0,
        0,
    ]
    assert [attempt.saved_step for attempt in scenario.stage("train").attempts] == [
        10,
        20,
        21,
        None,
    ]


def test_same_durable_step_again_is_no_progress(scenario):
    """The process resumes at step 10 and reports its old checkpoint at each end."""
    assert [evict(scenario, step=12, saved=10) for _ in range(4)] == [0, 1, 2, 4]
    assert evict(scenario, step=30, saved=30) == 0
    assert evict(scenario, step=30, saved=30) == 1


def test_node_loss_after_a_saved_step_is_followed_at_once(scenario):
    """Nothing but the progress tells of the checkpoint."""
    job = scenario.start("train")
    scenario.cluster.progress(job, 40, start_step=0, saved_step=30)
    scenario.lose_node(job)
    assert wait(scenario) == 0
    job = scenario.start("train")
    scenario.cluster.progress(job, 35, start_step=30, saved_step=30)
    scenario.lose_node(job)
    assert wait(scenario) == 1


def test_progress_without_a_saved_step_keeps_the_last_one(scenario):
    job = scenario.start("train")
    scenario.cluster.progress(job, 40, start_step=0, saved_step=30)
    scenario.reconcile_until_stable()
    scenario.cluster.progress(job, 45, start_step=0)
    assert scenario.reconcile_until_stable().attempt("train").saved_step == 30


def test_stage_without_steps_always_waits(scenario):
    scenario.run("train")
    waits = []
    for _ in range(3):
        scenario.lose_node(scenario.after(100_000).start("evaluate"))
        waits.append(wait(scenario))
    assert waits == [1, 2, 4]


@pytest.mark.parametrize("user", ["retry", "edit", "suspend"])
def test_user_ends_the_delay(scenario, user):
    for _ in range(5):
        evict(scenario)
    assert scenario.running is None
    match user:
        case "retry":
            scenario.retry("now")
        case "edit":
            scenario.edit(train={"pod": {"resources": {"limits": {"memory": "64Gi"}}}})
        case "suspend":
            scenario.edit(suspend=True)
            assert scenario.requeue_after is None
            scenario.after(16).edit(suspend=False)
    assert scenario.running == "train"


def test_failure_has_its_own_backoff_and_ends_the_row(scenario):
    evict(scenario)
    evict(scenario)
    scenario.cluster.fail(scenario.start("train"), 70)
    assert wait(scenario) == 10
    scenario.after(10)
    assert evict(scenario) == 1


def test_steps_of_another_identity_do_not_count(scenario):
    evict(scenario, step=500, saved=500)
    job = scenario.start("train")
    scenario.edit(train={"lora": {"rank": 4}})
    scenario.cluster.evict(job, step=500, saved=500)
    scenario.reconcile_until_stable()
    assert scenario.stage("train").attempts[-2].outcome is Outcome.STOPPED
    assert evict(scenario, step=7, saved=7) == 0


def test_settings_limit_the_delay():
    settings = Settings(
        base_interruption_backoff=timedelta(seconds=3),
        max_interruption_backoff=timedelta(seconds=10),
    )
    scenario = Scenario(a_pipeline(train=MANY), settings=settings).run("prepare")
    assert [evict(scenario) for _ in range(4)] == [3, 6, 10, 10]
    assert settings.interruption_backoff(10**9) == timedelta(seconds=10)
