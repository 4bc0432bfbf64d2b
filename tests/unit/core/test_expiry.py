"""What happens to a finished pipeline after its ttlSecondsAfterFinished."""

from datetime import timedelta

import pytest
from pydantic import ValidationError
from support.operator.scenario import Scenario, a_pipeline

from finetune_operator.api.conditions import Reason
from finetune_operator.core.observation import Blocker

REFUSED = Blocker(Reason.POD_REFUSED, "a webhook refuses the deletion")


def test_expired_pipeline_is_retained_by_default():
    scenario = Scenario(a_pipeline(ttlSecondsAfterFinished=100)).finish()
    scenario.after(1000).reconcile_until_stable()
    assert scenario.key in scenario.cluster.pipelines
    assert scenario.status.phase == "Succeeded"


def test_expired_pipeline_is_deleted_on_request():
    scenario = Scenario(
        a_pipeline(deploy=None, ttlSecondsAfterFinished=100, whenExpired="Delete")
    ).finish()
    assert scenario.requeue_after == timedelta(seconds=100)
    scenario.after(99).reconcile()
    assert scenario.key in scenario.cluster.pipelines
    scenario.after(1).reconcile()
    assert scenario.key not in scenario.cluster.pipelines


def test_retry_of_an_expired_pipeline_comes_before_its_deletion():
    scenario = Scenario(
        a_pipeline(deploy=None, ttlSecondsAfterFinished=100, whenExpired="Delete")
    )
    scenario.cluster.fail(scenario.start("prepare"), 65)
    scenario.reconcile_until_stable().after(1000).retry("now")
    assert scenario.running == "prepare"


def test_unfinished_pipeline_does_not_expire():
    scenario = Scenario(
        a_pipeline(deploy=None, ttlSecondsAfterFinished=0, whenExpired="Delete")
    ).run("prepare")
    scenario.start("train")
    scenario.after(1e6).reconcile_until_stable()
    assert scenario.key in scenario.cluster.pipelines


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"whenExpired": "Delete", "ttlSecondsAfterFinished": 1},
            "whenExpired: Delete would delete the server",
        ),
        (
            {"whenExpired": "Delete", "deploy": None},
            "whenExpired: .* add ttlSecondsAfterFinished",
        ),
        ({"whenExpired": "Retain"}, "whenExpired: .* add ttlSecondsAfterFinished"),
    ],
    ids=str,
)
def test_contradicting_expiry_is_refused_with_the_fix(changes, message):
    with pytest.raises(ValidationError, match=message):
        a_pipeline(**changes)


def test_time_to_live_that_has_passed_already_expires_at_once():
    scenario = Scenario(a_pipeline(deploy=None)).finish().after(1000)
    data = {"ttlSecondsAfterFinished": 1, "whenExpired": "Delete"}
    scenario.cluster.edit(scenario.key, a_pipeline(deploy=None, **data))
    scenario.reconcile()
    assert scenario.requeue_after == timedelta()
    scenario.reconcile()
    assert scenario.key not in scenario.cluster.pipelines


def test_expired_pipeline_with_jobs_to_delete_is_deleted_soon():
    spec = a_pipeline(deploy=None, ttlSecondsAfterFinished=0, whenExpired="Delete")
    scenario = Scenario(spec)
    scenario.cluster.evict(scenario.start("prepare"), step=1, saved=1)
    scenario.reconcile_until_stable()
    scenario.cluster.refusals = {
        scenario.attempt("prepare").job.replace("-a2", "-a1"): REFUSED
    }
    scenario.finish()
    assert scenario.requeue_after == timedelta(seconds=1)
    scenario.cluster.refusals = {}
    scenario.after(1).reconcile()
    scenario.reconcile()
    assert scenario.key not in scenario.cluster.pipelines
