"""`nodeLost.replaceAfterSeconds`: an attempt on a lost node is replaced if its old process can publish nothing."""

from datetime import timedelta

import pytest
from support.operator.scenario import Scenario, a_pipeline, a_result

from finetune_operator.api.conditions import Reason
from finetune_operator.api.status import Outcome
from finetune_operator.core.attempts.endings import update_attempt
from finetune_operator.core.observation import Blocker, JobState, ObservedJob
from finetune_operator.core.settings import Settings
from finetune_trainer.contract import TerminationMessage

AFTER = timedelta(minutes=10)
LOST = Blocker(Reason.NODE_LOST, "node spot-1 does not answer")
OWN_PROGRAM = {"pod": {"image": "registry.example/own:1", "command": ["./train"]}}
ONE_POD = {"accessMode": "ReadWriteOncePod"}


def lose_node(settings=None, **spec):
    """Return a pipeline whose training runs on a node that does not answer any more, and its Job."""
    settings = settings or Settings(replace_lost_after=AFTER)
    scenario = Scenario(a_pipeline(**spec), settings=settings).run("prepare")
    job = scenario.start("train")
    now = scenario.cluster.now
    scenario.cluster.update_job(job, lost_since=now, blocker=LOST)
    return scenario.reconcile_until_stable(), job


def replaced(scenario):
    return [text for text in scenario.cluster.applied if text.startswith("replace")]


def test_attempt_is_replaced_after_the_time_and_not_before():
    scenario, job = lose_node()
    scenario.after(AFTER.total_seconds() - 1).reconcile_until_stable()
    assert replaced(scenario) == []
    assert scenario.requeue_after <= timedelta(seconds=1)
    scenario.after(1).reconcile_until_stable()
    assert replaced(scenario) == [f"replace {job}"]
    scenario.after(60).reconcile_until_stable()
    first, second = scenario.stage("train").attempts
    assert first.outcome == Outcome.INTERRUPTED
    assert second.number == 2
    stage = scenario.stage("train")
    assert stage.interruptions == 1
    assert stage.failures == 0


def test_status_says_when_the_attempt_is_replaced():
    scenario, _ = lose_node()
    stage = scenario.stage("train")
    assert stage.reason is Reason.NODE_LOST
    assert "replaces the attempt 600 s after the loss" in stage.message
    by_a_person, _ = lose_node(Settings())
    assert by_a_person.stage("train").message == LOST.message


def test_node_that_answers_again_keeps_its_attempt():
    scenario, job = lose_node()
    scenario.after(AFTER.total_seconds() - 1).reconcile_until_stable()
    scenario.cluster.update_job(job, lost_since=None, blocker=None)
    scenario.after(3600).reconcile_until_stable()
    assert replaced(scenario) == []
    assert scenario.stage("train").running_attempt.job == job


def test_suspended_attempt_on_a_lost_node_ends():
    scenario, job = lose_node()
    scenario.edit(suspend=True)
    assert scenario.cluster.jobs[job].asked_to_stop
    scenario.after(AFTER.total_seconds()).reconcile_until_stable()
    assert replaced(scenario) == [f"replace {job}"]
    assert scenario.stage("train").attempts[0].outcome is Outcome.STOPPED


def test_stop_on_a_lost_node_still_says_what_holds_it():
    """An SRE who suspends or edits the pipeline must not lose the only words that name the fix."""
    suspended, _ = lose_node(Settings())
    suspended.edit(suspend=True)
    assert suspended.status.phase == "Running"
    assert suspended.condition("Ready") == ("False", "NodeLost")
    edited, _ = lose_node(Settings())
    edited.edit(train={"optimizer": {"learningRate": 1e-5}})
    for scenario in (suspended, edited):
        stage = scenario.stage("train")
        message = f"stopping: {LOST.message}"
        assert stage.reason == Reason.NODE_LOST
        assert stage.message == message


def test_stop_that_a_finalizer_holds_up_says_so():
    scenario = Scenario(settings=Settings()).run("prepare")
    job = scenario.start("train")
    scenario.cancel("1")
    held = Blocker(Reason.DEPENDENCY_NOT_READY, "a finalizer keeps it")
    scenario.cluster.update_job(job, blocker=held)
    stage = scenario.reconcile_until_stable().stage("train")
    assert stage.message == "stopping: a finalizer keeps it"
    assert scenario.condition("Ready") == ("False", "DependencyNotReady")


@pytest.mark.parametrize(
    ("workspace", "expected"),
    [({}, False), (ONE_POD, True)],
    ids=["shared volume", "one pod"],
)
def test_fence_of_another_identity_keeps_nothing_out(workspace, expected):
    """After an edit, the next attempt takes no token in the folder of the old process."""
    scenario, _ = lose_node(workspace=workspace)
    scenario.edit(seed=7)
    scenario.after(2 * AFTER.total_seconds()).reconcile_until_stable()
    assert bool(replaced(scenario)) is expected


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({}, True),
        ({"workspace": {"existingClaim": "shared"}}, True),
        ({"train": OWN_PROGRAM}, False),
        ({"train": OWN_PROGRAM, "workspace": ONE_POD}, True),
        ({"train": OWN_PROGRAM, "workspace": {"existingClaim": "shared"}}, False),
    ],
    ids=["trainer", "trainer, shared", "own program", "one pod", "program, shared"],
)
def test_only_a_process_that_is_kept_out_is_replaced(spec, expected):
    scenario, _ = lose_node(**spec)
    scenario.after(2 * AFTER.total_seconds()).reconcile_until_stable()
    assert bool(replaced(scenario)) is expected


def test_by_default_a_person_decides():
    scenario, job = lose_node(Settings())
    scenario.after(30 * 24 * 3600).reconcile_until_stable()
    assert replaced(scenario) == []
    assert scenario.cluster.jobs[job].observed.state is JobState.RUNNING


def test_result_of_a_replaced_attempt_is_refused():
    """The process that comes back reports a result, too; its attempt has ended."""
    scenario, job = lose_node()
    scenario.after(AFTER.total_seconds()).reconcile_until_stable()
    first = scenario.stage("train").attempts[0]
    late = ObservedJob(
        job,
        JobState.COMPLETE,
        exit_code=0,
        message=TerminationMessage(result=a_result("train", first.identity)),
    )
    assert update_attempt(first, late, scenario.cluster.now) == first
