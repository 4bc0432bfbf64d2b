"""The lifecycle of a pipeline: its objects, its conditions, and the content of its workspace."""

from typing import Any

import pytest

from e2e.pipelines.driver import PipelineDriver, memory, pipeline, variables
from testcluster.errors import TimedOut
from testcluster.kube_namespace import KubeNamespace, until

pytestmark = pytest.mark.usefixtures("operator")


def test_successful_pipeline_reports_stages_and_conditions(namespace: KubeNamespace):
    driver = PipelineDriver.start(namespace, pipeline("simple"))
    status = driver.wait_finished()
    assert driver.condition("Ready")["status"] == "True"
    assert driver.condition("Ready")["reason"] == "AllStagesSucceeded"
    assert not driver.condition("Reconciling")
    assert not driver.condition("Stalled")
    assert [
        status["stages"][name]["state"] for name in ("prepare", "train", "evaluate")
    ] == ["Succeeded"] * 3
    assert [status["stages"][name]["reason"] for name in ("push", "deploy")] == [
        "NotRequested"
    ] * 2
    assert len(driver.jobs()) == 3
    assert status["observedGeneration"] == driver.object["metadata"]["generation"]

    def own_events() -> str:
        return namespace.run(
            "get", "events", "--field-selector=involvedObject.kind=FineTunePipeline"
        )

    driver.until(
        lambda: "PipelineSucceeded" in own_events()
    )  # the operator creates it after the status
    events = own_events()
    assert "StageSucceeded" not in events  # the conditions show it
    assert events.count("PipelineSucceeded") == 1


def test_suspended_training_saves_and_resumes(namespace: KubeNamespace):
    driver = PipelineDriver.start(namespace, pipeline("paused", steps={"train": 60}))
    driver.wait_state("train", "Running")
    driver.patch(suspend=True)
    driver.until(lambda: driver.stage("train")["attempts"][-1]["outcome"] == "Stopped")
    assert driver.condition("Ready")["reason"] == "Suspended"
    driver.until(
        lambda: (
            namespace.run("get", "pods", "-l", "finetune.dev/stage=train", "-o", "name")
            == ""
        )
    )
    first = driver.stage("train")["attempts"][0]
    assert first["exitCode"] == 75
    driver.patch(suspend=None)
    driver.wait_finished()
    train = driver.stage("train")
    assert (train["failures"], train["interruptions"], len(train["attempts"])) == (
        0,
        0,
        2,
    )


def test_cancelled_pipeline_runs_again_after_retry(namespace: KubeNamespace):
    driver = PipelineDriver.start(namespace, pipeline("cancelled", steps={"train": 60}))
    driver.wait_state("train", "Running")
    driver.annotate("cancel", "1")
    driver.wait_finished("Cancelled")
    assert driver.condition("Ready")["reason"] == "Cancelled"
    driver.annotate("retry", "1")
    driver.wait_finished()
    assert [
        job["metadata"]["labels"]["finetune.dev/attempt"]
        for job in driver.jobs("prepare")
    ] == ["1"]


def test_failed_pipeline_continues_after_an_edit(namespace: KubeNamespace):
    broken = {"pod": {"env": variables("train", FAIL_WITH="70")}, "maxFailures": 0}
    driver = PipelineDriver.start(namespace, pipeline("repaired", train=broken))
    driver.wait_finished("Failed")
    assert driver.condition("Stalled")["reason"] == "RetriesExhausted"
    with pytest.raises(
        TimedOut, match="condition not met"
    ):  # how the chart's notes tell success from failure
        namespace.run("wait", "--for=condition=Ready", "--timeout=0", "ft/repaired")
    assert "FAIL_WITH is set" in driver.condition("Ready")["message"]
    driver.patch(train={"pod": {"env": variables("train")}})
    driver.wait_finished()
    assert len(driver.jobs("prepare")) == 1


def test_edit_resumes_or_restarts_a_running_stage(namespace: KubeNamespace):
    """An edit of `resources` keeps the identity and resumes the stage; an edit of `seed` changes it and starts anew."""
    driver = PipelineDriver.start(namespace, pipeline("edited", steps={"train": 100}))
    driver.wait_state("train", "Running")
    before = driver.stage("train")["identity"]
    driver.patch(train={"pod": {"resources": memory("48Mi")}})
    driver.until(
        lambda: (
            len(driver.stage("train")["attempts"]) == 2
            and driver.stage("train")["state"] == "Running"
        )
    )
    assert driver.stage("train")["identity"] == before
    driver.patch(seed=1)
    driver.until(lambda: driver.stage("train")["identity"] != before)
    driver.wait_finished()
    assert driver.stage("train")["failures"] == 0


def test_time_limits_of_stage_and_pipeline_fail_the_pipeline(namespace: KubeNamespace):
    slow = PipelineDriver.start(
        namespace,
        pipeline("slow", steps={"train": 900}, train={"maxRuntimeSeconds": 3}),
    )
    slower = PipelineDriver.start(
        namespace, pipeline("slower", steps={"prepare": 900}, maxRuntimeSeconds=3)
    )
    for driver in (slow, slower):
        driver.wait_finished("Failed")
        assert driver.condition("Ready")["reason"] == "DeadlineExceeded"
    assert "train.maxRuntimeSeconds" in slow.condition("Ready")["message"]
    assert (
        "all stages together ran longer than maxRuntimeSeconds"
        in slower.condition("Ready")["message"]
    )


def test_expired_pipeline_is_deleted_and_keeps_its_claim(namespace: KubeNamespace):
    driver = PipelineDriver.start(
        namespace, pipeline("brief", ttlSecondsAfterFinished=2, whenExpired="Delete")
    )
    driver.until(lambda: not driver.object, 90)
    driver.until(lambda: namespace.run("get", "jobs", "-o", "name") == "")
    assert namespace.get("pvc", "brief-workspace")


def test_finished_pipeline_stays_finished_without_its_jobs(namespace: KubeNamespace):
    driver = PipelineDriver.start(namespace, pipeline("kept"))
    driver.wait_finished()
    namespace.run("delete", "jobs", "--all")
    driver.patch(maxRuntimeSeconds=3600)
    driver.until(
        lambda: (
            driver.status["observedGeneration"]
            == driver.object["metadata"]["generation"]
        )
    )
    assert driver.status["phase"] == "Succeeded"
    assert driver.jobs() == []


@pytest.mark.parametrize("propagation", ["background", "foreground", "orphan"])
def test_deleted_pipeline_keeps_its_workspace(
    namespace: KubeNamespace, propagation: str
):
    """Deleting a running pipeline deletes its Jobs, except with --cascade=orphan.

    A new pipeline uses the same workspace, but not while an orphaned Job may write to it.
    """
    driver = PipelineDriver.start(namespace, pipeline("deleted", steps={"train": 900}))
    driver.wait_state("train", "Running")
    namespace.run("delete", "ft", "deleted", f"--cascade={propagation}", timeout=90)
    if propagation != "orphan":
        driver.until(lambda: namespace.run("get", "jobs,pods", "-o", "name") == "")
    assert namespace.get("pvc", "deleted-workspace")
    recreated = PipelineDriver.start(namespace, pipeline("deleted", steps={"train": 5}))
    if propagation == "orphan":
        recreated.until(
            lambda: recreated.stage("prepare").get("reason") == "WorkspaceInUse"
        )
        namespace.run("delete", "jobs", "--all")
    recreated.wait_finished()


def test_deletion_removes_jobs_and_pods_in_every_state(namespace: KubeNamespace):
    states: dict[str, dict[str, Any]] = {
        "unschedulable": {"prepare": {"pod": {"nodeSelector": {"there": "is-none"}}}},
        "suspended": {"suspend": True},
        "failed": {"prepare": {"pod": {"env": variables("prepare", FAIL_WITH="65")}}},
        "done": {},
    }
    drivers = {
        name: PipelineDriver.start(namespace, pipeline(name, **changes))
        for name, changes in states.items()
    }
    drivers["failed"].wait_finished("Failed")
    drivers["done"].wait_finished()
    drivers["unschedulable"].until(drivers["unschedulable"].jobs)
    drivers["suspended"].until(
        lambda: drivers["suspended"].status.get("phase") == "Suspended"
    )
    namespace.run("delete", "ft", "--all", timeout=90)
    managed = "app.kubernetes.io/managed-by=finetune-operator"
    until(
        lambda: (
            not namespace.run("get", "jobs,pods", "-l", managed, "-o", "name").strip()
        ),
        60,
    )
    assert "done-workspace" in namespace.run("get", "pvc", "-o", "name")


def test_workspace_with_when_deleted_delete_is_deleted(namespace: KubeNamespace):
    driver = PipelineDriver.start(
        namespace, pipeline("temporary", workspace={"whenDeleted": "Delete"})
    )
    driver.wait_finished()
    namespace.run("delete", "ft", "temporary")
    driver.until(lambda: not namespace.get("pvc", "temporary-workspace"))


def test_edit_of_when_deleted_changes_owner_of_the_workspace(namespace: KubeNamespace):
    driver = PipelineDriver.start(namespace, pipeline("changed"))
    driver.wait_finished()
    driver.patch(workspace={"whenDeleted": "Delete"})
    driver.until(
        lambda: namespace.get("pvc", "changed-workspace")["metadata"].get(
            "ownerReferences"
        )
    )
    driver.patch(workspace={"whenDeleted": "Retain"})
    driver.until(
        lambda: (
            not namespace.get("pvc", "changed-workspace")["metadata"].get(
                "ownerReferences"
            )
        )
    )


def test_name_of_253_characters_succeeds(namespace: KubeNamespace):
    name = "n" + "-long" * 50 + "xy"
    assert len(name) == 253
    driver = PipelineDriver.start(namespace, pipeline(name))
    driver.wait_finished()
    assert all(len(job["metadata"]["name"]) <= 63 for job in driver.jobs())
