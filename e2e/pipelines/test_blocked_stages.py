"""What people get wrong and clusters lack: each has its reason, says how to mend it, and goes on when that is done."""

import base64
import json
from typing import Any

import pytest

from e2e.pipelines.driver import PipelineDriver, pipeline
from testcluster.kube_namespace import KubeNamespace

pytestmark = pytest.mark.usefixtures("operator")


def holds(story: PipelineDriver, reason: str, *words: str, stage: str = "prepare", seconds: float = 60) -> None:
    """Wait until the pipeline says why it waits."""
    story.until(lambda: story.condition("Ready").get("reason") == reason, seconds)
    message = story.condition("Ready")["message"]
    assert message.startswith(f"{stage}: ")
    for word in words:
        assert word in message, message
    assert story.condition("Finished")["status"] == "False"
    assert story.condition("Reconciling")["reason"] == reason


def test_an_image_that_cannot_be_pulled_until_it_is_another(namespace: KubeNamespace):
    story = PipelineDriver.start(namespace, pipeline("no-image", prepare={"image": "localhost:1/nothing:1"}))
    holds(story, "ImagePullFailed", "localhost:1/nothing:1", "check the stage's image")
    story.change(prepare={"image": pipeline("x")["spec"]["train"]["image"]})
    story.wait_finished()
    assert story.stage("prepare")["failures"] == 0


def test_a_secret_that_is_not_there_until_it_is(namespace: KubeNamespace):
    story = PipelineDriver.start(namespace, pipeline("no-secret", prepare={"secretRefs": ["hub-token"]}))
    holds(story, "SecretNotFound", 'secret "hub-token" not found', "secretRefs")
    token = base64.b64encode(b"x").decode()
    namespace.create({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "hub-token"}, "data": {"T": token}})
    story.wait_finished(seconds=180)


def test_no_node_of_that_kind(namespace: KubeNamespace):
    nowhere = {"placement": {"nodeSelector": {"zone": "moon"}}}
    story = PipelineDriver.start(namespace, pipeline("nowhere", prepare=nowhere))
    holds(story, "WaitingForCapacity", "nodes are available")


def test_no_accelerator(namespace: KubeNamespace):
    story = PipelineDriver.start(namespace, pipeline("no-gpu", prepare={"resources": {"gpu": {"count": 1}}}))
    holds(story, "WaitingForCapacity", "no node has nvidia.com/gpu to spare", "device plugin")


def test_a_volume_that_is_never_bound(namespace: KubeNamespace):
    story = PipelineDriver.start(namespace, pipeline("no-volume", workspace={"storageClassName": "nothing"}))
    holds(story, "VolumeNotReady", "kubectl describe pvc")


def test_an_existing_claim_that_does_not_exist_until_it_does(namespace: KubeNamespace):
    story = PipelineDriver.start(namespace, pipeline("no-claim", workspace={"existingClaim": "mine"}))
    holds(story, "VolumeNotReady", "no claim mine")
    namespace.claim("mine")
    story.wait_finished()


def test_a_claim_that_another_pipeline_works_on(namespace: KubeNamespace):
    namespace.claim("shared")
    first = PipelineDriver.start(
        namespace, pipeline("first", steps={"prepare": 40}, workspace={"existingClaim": "shared"})
    )
    first.wait_state("prepare", "Running")
    second = PipelineDriver.start(namespace, pipeline("second", workspace={"existingClaim": "shared"}))
    holds(second, "WorkspaceInUse", "shared", "first")
    first.wait_finished()
    second.wait_finished(seconds=150)


def quota(namespace: KubeNamespace, **hard: str) -> None:
    namespace.create(
        {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "quota"}, "spec": {"hard": hard}}
    )


@pytest.mark.parametrize("what", ["count/jobs.batch", "persistentvolumeclaims", "pods"])
def test_a_quota_that_is_used_up_until_it_is_not(namespace: KubeNamespace, what: str):
    quota(namespace, **{what: "0"})
    story = PipelineDriver.start(namespace, pipeline("too-much"))
    holds(story, "WaitingForQuota", "exceeded quota")
    namespace.run("delete", "resourcequota", "quota")
    story.wait_finished(seconds=240)


@pytest.mark.parametrize("field", ["serviceAccountName", "priorityClassName"])
def test_a_service_account_or_priority_class_that_is_not_there(namespace: KubeNamespace, field: str):
    story = PipelineDriver.start(namespace, pipeline("nobody", prepare={field: "ghost"}))
    holds(story, "DependencyNotReady", "ghost", field)


def test_an_affinity_that_is_none(namespace: KubeNamespace):
    nonsense = {"placement": {"affinity": {"nodeAffinity": {"required": "maybe"}}}}
    story = PipelineDriver.start(namespace, pipeline("nonsense", prepare=nonsense))
    holds(story, "SpecInvalid", "affinity")


def test_a_process_that_needs_more_memory_than_it_has(namespace: KubeNamespace):
    eats = {"command": ["sh", "-c", "x=a; while :; do x=$x$x; done"], "resources": {"memory": "24Mi"}}
    story = PipelineDriver.start(namespace, pipeline("hungry", prepare=eats))
    story.wait_finished("Failed")
    assert story.condition("Ready")["reason"] == "OutOfMemory"
    assert "resources.memory" in story.condition("Ready")["message"]


def test_a_command_that_is_not_there(namespace: KubeNamespace):
    story = PipelineDriver.start(namespace, pipeline("typo", prepare={"command": ["shh"], "retries": {"failures": 0}}))
    story.wait_finished("Failed", seconds=120)
    assert "shh" in story.condition("Ready")["message"]


@pytest.mark.parametrize(("code", "reason"), [("64", "SpecInvalid"), ("65", "DataInvalid"), ("66", "SourceNotFound")])
def test_an_exit_code_that_cannot_get_better_ends_it_at_once(namespace: KubeNamespace, code: str, reason: str):
    story = PipelineDriver.start(namespace, pipeline(f"hopeless-{code}", prepare={"env": {"FAIL_WITH": code}}))
    story.wait_finished("Failed")
    assert story.condition("Ready")["reason"] == reason
    assert story.stage("prepare")["failures"] == 1


def test_a_status_that_somebody_scribbled_into_is_left_alone_until_it_is_mended(namespace: KubeNamespace):
    story = PipelineDriver.start(namespace, pipeline("scribbled", steps={"prepare": 60}))
    story.wait_state("prepare", "Running")

    def scribble(result: Any) -> None:
        body = {"status": {"stages": {"train": {"result": result}}}}
        namespace.run("patch", "ftp", "scribbled", "--subresource=status", "--type=merge", "-p", json.dumps(body))

    scribble({"stage": "nonsense"})
    story.until(lambda: story.condition("Stalled").get("reason") == "SpecInvalid")
    assert "status" in story.condition("Ready")["message"] or "result" in story.condition("Ready")["message"]
    scribble(None)
    story.wait_finished()
    assert len(story.jobs("prepare")) == 1


def test_twenty_good_ones_do_not_wait_for_twenty_bad_ones(namespace: KubeNamespace):
    bad = [
        pipeline(f"bad-{n:02}", prepare=change)
        for n, change in enumerate(
            [
                {"image": "localhost:1/nothing:1"},
                {"secretRefs": ["nothing"]},
                {"placement": {"nodeSelector": {"zone": "moon"}}},
                {"resources": {"gpu": {"count": 1}}},
                {"serviceAccountName": "ghost"},
                {"placement": {"affinity": {"nodeAffinity": {"required": "maybe"}}}},
                {"env": {"FAIL_WITH": "70"}},
                {"command": ["shh"]},
                {"env": {"FAIL_WITH": "65"}},
                {"command": ["sh", "-c", "exit 0"]},
            ]
            * 2
        )
    ]
    stories = [PipelineDriver.start(namespace, manifest) for manifest in bad]
    good = [PipelineDriver.start(namespace, pipeline(f"good-{n:02}")) for n in range(20)]
    for story in good:
        story.wait_finished(seconds=240)
    assert not [story.name for story in stories if story.status.get("phase") == "Succeeded"]
