"""The claim of a pipeline goes away: which stages run again."""

from dataclasses import replace
from typing import Any

import pytest
from support.operator.scenario import Scenario

from finetune_operator.api.conditions import Reason
from finetune_operator.core.observation import Blocker

GOING: dict[str, Any] = {
    "deleting": True,
    "blocker": Blocker(Reason.VOLUME_NOT_READY, "the claim is being deleted"),
}
"""State of a claim that is being deleted: nothing starts on it."""


class LostClaim(Scenario):
    """A pipeline whose claim is in the state that a test sets."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.claim: dict[str, Any] = {}
        observe = self.cluster.observe

        async def observed(pipeline):
            result = await observe(pipeline)
            return replace(result, workspace=replace(result.workspace, **self.claim))

        self.cluster.observe = observed

    def with_claim(self, **state):
        """Change the state of the claim."""
        self.claim = state
        return self.reconcile_until_stable()


def a_lost_claim() -> Any:
    """Return a new pipeline of which nothing has run."""
    return LostClaim()


def done_stages(scenario):
    """Return the stages with a result."""
    return [name for name, stage in scenario.status.stages.items() if stage.result]


def test_claim_lost_between_stages_runs_them_again():
    scenario = a_lost_claim().run("prepare").edit(suspend=True)
    scenario.cluster.evict(scenario.attempt("train").job, disruption=None)
    scenario.with_claim(gone=True)
    scenario.with_claim().edit(suspend=False)
    assert scenario.created_jobs == ["prepare-a1", "train-a1", "prepare-a2"]
    assert scenario.finish().status.phase == "Succeeded"


def test_claim_deleted_as_advised_runs_all_stages_again():
    scenario = a_lost_claim().finish().with_claim(outdated=True)
    assert scenario.status.phase == "Succeeded"
    scenario.with_claim(outdated=True, **GOING)
    assert done_stages(scenario) == ["deploy"]
    assert scenario.status.finished_at is None
    before = len(scenario.created_jobs)
    scenario.with_claim().finish()
    again = ["prepare-a2", "train-a2", "evaluate-a2", "push-a2"]
    assert scenario.created_jobs[before : before + 4] == again


def test_claim_deleted_as_advised_without_operator_runs_again():
    """The operator sees the claim before its deletion, and next that it is gone."""
    scenario = a_lost_claim().finish().with_claim(outdated=True)
    scenario.with_claim(gone=True)
    assert scenario.running == "prepare"
    assert scenario.status.workspace_outdated is None


def test_failed_pipeline_runs_again_if_deletion_was_advised():
    scenario = a_lost_claim().run("prepare")
    scenario.cluster.fail(scenario.start("train"), 77)
    scenario.reconcile_until_stable().with_claim(outdated=True)
    scenario.with_claim(gone=True)
    scenario.with_claim().run("prepare")
    assert scenario.created_jobs[-1] == "train-a2"


@pytest.mark.parametrize("state", [{"gone": True}, {"deleting": True}])
def test_finished_pipeline_survives_the_end_of_its_claim(state):
    """Users delete claims to save storage, and want no other training."""
    scenario = a_lost_claim().finish().with_claim(**state)
    assert scenario.status.phase == "Succeeded"
    assert len(done_stages(scenario)) == 5


def test_failed_pipeline_survives_the_end_of_its_claim():
    scenario = a_lost_claim().run("prepare")
    scenario.cluster.fail(scenario.start("train"), 77)
    scenario.reconcile_until_stable().with_claim(gone=True)
    assert scenario.status.phase == "Failed"
    assert done_stages(scenario) == ["prepare"]
    assert scenario.retry("1").running == "prepare"


def test_retry_of_finished_pipeline_without_claim_runs_all():
    scenario = a_lost_claim().finish().with_claim(gone=True).retry("1")
    assert scenario.running == "prepare"


def test_cancelled_pipeline_runs_nothing_without_its_claim():
    scenario = a_lost_claim().finish().with_claim(outdated=True)
    job = scenario.edit(seed=7).cancel("now").attempt("prepare").job
    scenario.cluster.evict(job, disruption=None)
    scenario.reconcile_until_stable()
    before = scenario.created_jobs
    scenario.with_claim(gone=True)
    assert scenario.status.phase == "Cancelled"
    assert scenario.created_jobs == before


@pytest.mark.parametrize("state", [{"gone": True}, GOING])
def test_claim_lost_while_an_attempt_waits_for_a_node(state):
    """Only a pod with a node keeps its claim: this pod could never start."""
    scenario = a_lost_claim().run("prepare")
    job = scenario.attempt("train").job
    scenario.hold(job, 'persistentvolumeclaim "demo-workspace" not found')
    scenario.with_claim(**state)
    assert scenario.cluster.jobs[job].asked_to_stop
    scenario.cluster.delete_job(job)
    scenario.claim = {"gone": True}
    # Which creates the claim anew.
    scenario.reconcile()
    scenario.with_claim().finish()
    assert scenario.created_jobs[:4] == [
        "prepare-a1",
        "train-a1",
        "prepare-a2",
        "train-a2",
    ]
    assert scenario.status.phase == "Succeeded"
    assert scenario.stage("train").failures == 0


def test_attempt_with_a_node_keeps_its_claim():
    scenario = a_lost_claim().run("prepare")
    job = scenario.attempt("train").job
    scenario.cluster.update_job(job, node="gpu-1")
    scenario.with_claim(deleting=True)
    assert not scenario.cluster.jobs[job].asked_to_stop


def test_running_job_keeps_its_claim_until_it_ends():
    """The user can still copy files, so nothing stops the Job."""
    scenario = a_lost_claim().run("prepare")
    job = scenario.start("train")
    scenario.with_claim(deleting=True)
    assert not scenario.cluster.jobs[job].asked_to_stop
    assert done_stages(scenario) == ["prepare"]


def test_ended_jobs_are_deleted_with_a_claim_that_goes():
    scenario = a_lost_claim().finish()
    kept = {job.template.stage for job in scenario.cluster.jobs.values()}
    assert kept >= {"prepare", "train", "evaluate", "push"}
    scenario.with_claim(deleting=True)
    left = {job.template.stage for job in scenario.cluster.jobs.values()}
    assert left <= {"deploy"}
