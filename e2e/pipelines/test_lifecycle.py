"""A pipeline's life, seen from outside: objects, conditions, and what is in the workspace."""

import pytest

from e2e.pipelines.driver import PipelineDriver, pipeline
from testcluster.kube_namespace import KubeNamespace, until

pytestmark = pytest.mark.usefixtures("operator")


def test_stages_run_one_after_the_other_and_conditions_tell(namespace: KubeNamespace):
    story = PipelineDriver.start(namespace, pipeline("simple"))
    status = story.wait_finished()
    assert story.condition("Ready")["status"] == "True"
    assert story.condition("Ready")["reason"] == "AllStagesSucceeded"
    assert not story.condition("Reconciling")
    assert not story.condition("Stalled")
    assert [status["stages"][name]["state"] for name in ("prepare", "train", "evaluate")] == ["Succeeded"] * 3
    assert [status["stages"][name]["reason"] for name in ("push", "deploy")] == ["NotRequested"] * 2
    assert len(story.jobs()) == 3
    assert status["observedGeneration"] == story.object["metadata"]["generation"]
    events = namespace.run("get", "events", "--field-selector=involvedObject.kind=FineTunePipeline")
    assert events.count("StageSucceeded") == 3
    assert events.count("PipelineSucceeded") == 1


def test_suspend_saves_and_resume_goes_on_from_there(namespace: KubeNamespace):
    story = PipelineDriver.start(namespace, pipeline("paused", steps={"train": 60}))
    story.wait_state("train", "Running")
    story.change(suspend=True)
    story.until(lambda: story.stage("train")["attempts"][-1]["outcome"] == "Stopped")
    assert story.condition("Ready")["reason"] == "Suspended"
    assert namespace.run("get", "pods", "-l", "finetune.dev/stage=train", "-o", "name") == ""
    first = story.stage("train")["attempts"][0]
    assert first["exitCode"] == 75
    story.change(suspend=None)
    story.wait_finished()
    train = story.stage("train")
    assert (train["failures"], train["interruptions"], len(train["attempts"])) == (0, 0, 2)


def test_cancel_stops_for_good_until_retry(namespace: KubeNamespace):
    story = PipelineDriver.start(namespace, pipeline("cancelled", steps={"train": 60}))
    story.wait_state("train", "Running")
    story.annotate("cancel", "1")
    story.wait_finished("Cancelled")
    assert story.condition("Ready")["reason"] == "Cancelled"
    story.annotate("retry", "1")
    story.wait_finished()
    assert [job["metadata"]["labels"]["finetune.dev/attempt"] for job in story.jobs("prepare")] == ["1"]


def test_a_failure_is_tried_again_and_the_edit_that_mends_it_goes_on(namespace: KubeNamespace):
    broken = {"env": {"FAIL_WITH": "70"}, "retries": {"failures": 0}}
    story = PipelineDriver.start(namespace, pipeline("mended", train=broken))
    story.wait_finished("Failed")
    assert story.condition("Stalled")["reason"] == "RetriesExhausted"
    assert "the script was told to fail" in story.condition("Ready")["message"]
    story.change(train={"env": {"FAIL_WITH": None}})
    story.wait_finished()
    assert len(story.jobs("prepare")) == 1


def test_an_edit_of_how_a_stage_runs_resumes_it_and_of_what_it_makes_starts_it_afresh(namespace: KubeNamespace):
    story = PipelineDriver.start(namespace, pipeline("edited", steps={"train": 100}))
    story.wait_state("train", "Running")
    before = story.stage("train")["identity"]
    story.change(train={"resources": {"memory": "48Mi"}})
    story.until(lambda: len(story.stage("train")["attempts"]) == 2 and story.stage("train")["state"] == "Running")
    assert story.stage("train")["identity"] == before
    story.change(seed=1)
    story.until(lambda: story.stage("train")["identity"] != before)
    story.wait_finished()
    assert story.stage("train")["failures"] == 0


def test_time_limits_end_a_stage_and_a_pipeline(namespace: KubeNamespace):
    slow = PipelineDriver.start(namespace, pipeline("slow", steps={"train": 900}, train={"timeoutSeconds": 3}))
    slower = PipelineDriver.start(namespace, pipeline("slower", steps={"prepare": 900}, activeDeadlineSeconds=3))
    for story in (slow, slower):
        story.wait_finished("Failed")
        assert story.condition("Ready")["reason"] == "DeadlineExceeded"
    assert "timeoutSeconds" in slow.condition("Ready")["message"]
    assert "activeDeadlineSeconds" in slower.condition("Ready")["message"]


def test_a_finished_pipeline_goes_when_its_time_is_up(namespace: KubeNamespace):
    story = PipelineDriver.start(namespace, pipeline("brief", ttlSecondsAfterFinished=2))
    story.until(lambda: not story.object, 90)
    story.until(lambda: namespace.run("get", "jobs", "-o", "name") == "")
    assert namespace.get("pvc", "brief-workspace")


def test_a_finished_pipeline_stays_finished_when_its_jobs_are_deleted(namespace: KubeNamespace):
    story = PipelineDriver.start(namespace, pipeline("kept"))
    story.wait_finished()
    namespace.run("delete", "jobs", "--all")
    story.change(activeDeadlineSeconds=3600)
    story.until(lambda: story.status["observedGeneration"] == story.object["metadata"]["generation"])
    assert story.status["phase"] == "Succeeded"
    assert story.jobs() == []


@pytest.mark.parametrize("propagation", ["background", "foreground", "orphan"])
def test_deleting_a_pipeline_takes_its_jobs_along_and_leaves_its_work(namespace: KubeNamespace, propagation: str):
    story = PipelineDriver.start(namespace, pipeline("deleted", steps={"train": 900}))
    story.wait_state("train", "Running")
    namespace.run("delete", "ftp", "deleted", f"--cascade={propagation}", timeout=90)
    if propagation != "orphan":
        story.until(lambda: namespace.run("get", "jobs,pods", "-o", "name") == "")
    assert namespace.get("pvc", "deleted-workspace")
    again = PipelineDriver.start(namespace, pipeline("deleted", steps={"train": 5}))
    again.wait_finished()


def test_deleting_takes_everything_along_in_whatever_state(namespace: KubeNamespace):
    states = {
        "homeless": {"prepare": {"placement": {"nodeSelector": {"there": "is-none"}}}},
        "suspended": {"suspend": True},
        "failed": {"prepare": {"env": {"FAIL_WITH": "65"}}},
        "done": {},
    }
    stories = {name: PipelineDriver.start(namespace, pipeline(name, **changes)) for name, changes in states.items()}
    stories["failed"].wait_finished("Failed")
    stories["done"].wait_finished()
    stories["homeless"].until(stories["homeless"].jobs)
    stories["suspended"].until(lambda: stories["suspended"].status.get("phase") == "Suspended")
    namespace.run("delete", "ftp", "--all", timeout=90)
    ours = "app.kubernetes.io/managed-by=finetune-operator"
    until(lambda: not namespace.run("get", "jobs,pods", "-l", ours, "-o", "name").strip(), 60)
    assert "done-workspace" in namespace.run("get", "pvc", "-o", "name")


def test_a_workspace_that_is_not_to_stay_goes_with_its_pipeline(namespace: KubeNamespace):
    story = PipelineDriver.start(namespace, pipeline("fleeting", workspace={"whenDeleted": "Delete"}))
    story.wait_finished()
    namespace.run("delete", "ftp", "fleeting")
    story.until(lambda: not namespace.get("pvc", "fleeting-workspace"))


def test_the_fate_of_a_workspace_can_be_changed_later(namespace: KubeNamespace):
    story = PipelineDriver.start(namespace, pipeline("changed"))
    story.wait_finished()
    story.change(workspace={"whenDeleted": "Delete"})
    story.until(lambda: namespace.get("pvc", "changed-workspace")["metadata"].get("ownerReferences"))
    story.change(workspace={"whenDeleted": "Retain"})
    story.until(lambda: not namespace.get("pvc", "changed-workspace")["metadata"].get("ownerReferences"))


def test_a_name_of_253_characters(namespace: KubeNamespace):
    name = "n" + "-long" * 50 + "xy"
    assert len(name) == 253
    story = PipelineDriver.start(namespace, pipeline(name))
    story.wait_finished()
    assert all(len(job["metadata"]["name"]) <= 63 for job in story.jobs())
