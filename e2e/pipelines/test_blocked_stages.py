"""Blocked and failed stages: each cause has its reason and a fix in the message; a fixed cause unblocks the stage."""

import base64
import json
import os
from typing import Any

import pytest

from e2e.pipelines.driver import (
    ORDER,
    Object,
    PipelineDriver,
    memory,
    merged,
    pipeline,
    variables,
)
from testcluster.kube_namespace import KubeNamespace

pytestmark = pytest.mark.usefixtures("operator")
ONE_GPU = {"resources": {"limits": {"nvidia.com/gpu": 1}}}


def wait_blocked(
    driver: PipelineDriver,
    reason: str,
    *fragments: str,
    stage: str = "prepare",
    seconds: float = 60,
) -> None:
    """Wait until a stage is blocked for the reason, and check that the Ready message holds the fragments."""
    driver.until(lambda: driver.condition("Ready").get("reason") == reason, seconds)
    message = driver.condition("Ready")["message"]
    assert message.startswith(f"{stage}: ")
    for fragment in fragments:
        assert fragment in message, message
    assert driver.condition("Finished")["status"] == "False"
    assert driver.condition("Reconciling")["reason"] == reason


def secret_variables(secret: str) -> Object:
    """Return the fields of a pod that has all keys of a Secret as variables."""
    return {"envFrom": [{"secretRef": {"name": secret}}]}


def test_missing_image_blocks_until_the_spec_is_edited(namespace: KubeNamespace):
    driver = PipelineDriver.start(
        namespace,
        pipeline("no-image", prepare={"pod": {"image": "localhost:1/nothing:1"}}),
    )
    wait_blocked(
        driver, "ImagePullFailed", "localhost:1/nothing:1", "check the stage's image"
    )
    driver.patch(
        prepare={"pod": {"image": pipeline("x")["spec"]["train"]["pod"]["image"]}}
    )
    driver.wait_finished()
    assert driver.stage("prepare")["failures"] == 0


def test_missing_secret_blocks_until_it_is_created(namespace: KubeNamespace):
    driver = PipelineDriver.start(
        namespace, pipeline("no-secret", prepare={"pod": secret_variables("hub-token")})
    )
    wait_blocked(
        driver, "SecretNotFound", 'secret "hub-token" not found', "pod.envFrom"
    )
    token = base64.b64encode(b"x").decode()
    namespace.create(
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "hub-token"},
            "data": {"T": token},
        }
    )
    driver.wait_finished(seconds=180)


def test_unmatched_node_selector_waits_for_capacity(namespace: KubeNamespace):
    unmatched = {"pod": {"nodeSelector": {"zone": "moon"}}}
    driver = PipelineDriver.start(namespace, pipeline("unmatched", prepare=unmatched))
    wait_blocked(driver, "WaitingForCapacity", "nodes are available")


def test_missing_gpu_waits_for_capacity(namespace: KubeNamespace):
    driver = PipelineDriver.start(
        namespace, pipeline("no-gpu", prepare={"pod": ONE_GPU})
    )
    wait_blocked(
        driver,
        "WaitingForCapacity",
        "no node has nvidia.com/gpu available",
        "device plugin",
    )


def test_unbound_volume_blocks(namespace: KubeNamespace):
    driver = PipelineDriver.start(
        namespace, pipeline("no-volume", workspace={"storageClassName": "nothing"})
    )
    wait_blocked(driver, "VolumeNotReady", "kubectl describe pvc")


def test_missing_existing_claim_blocks_until_it_is_created(namespace: KubeNamespace):
    driver = PipelineDriver.start(
        namespace, pipeline("no-claim", workspace={"existingClaim": "mine"})
    )
    wait_blocked(driver, "VolumeNotReady", "no claim mine")
    namespace.claim("mine")
    driver.wait_finished()


def test_workspace_of_another_pipeline_blocks_until_it_ends(namespace: KubeNamespace):
    namespace.claim("shared")
    first = PipelineDriver.start(
        namespace,
        pipeline("first", steps={"prepare": 40}, workspace={"existingClaim": "shared"}),
    )
    first.wait_state("prepare", "Running")
    second = PipelineDriver.start(
        namespace, pipeline("second", workspace={"existingClaim": "shared"})
    )
    wait_blocked(second, "WorkspaceInUse", "shared", "first")
    first.wait_finished()
    second.wait_finished(seconds=150)


def quota(namespace: KubeNamespace, **hard: str) -> None:
    namespace.create(
        {
            "apiVersion": "v1",
            "kind": "ResourceQuota",
            "metadata": {"name": "quota"},
            "spec": {"hard": hard},
        }
    )


@pytest.mark.parametrize(
    "resource", ["count/jobs.batch", "persistentvolumeclaims", "pods"]
)
def test_exceeded_quota_blocks_until_it_is_deleted(
    namespace: KubeNamespace, resource: str
):
    quota(namespace, **{resource: "0"})
    driver = PipelineDriver.start(namespace, pipeline("over-quota"))
    wait_blocked(driver, "WaitingForQuota", "exceeded quota")
    namespace.run("delete", "resourcequota", "quota")
    driver.wait_finished(seconds=240)


@pytest.mark.parametrize("field", ["serviceAccountName", "priorityClassName"])
def test_missing_account_or_priority_class_blocks(namespace: KubeNamespace, field: str):
    driver = PipelineDriver.start(
        namespace, pipeline("missing-dependency", prepare={"pod": {field: "ghost"}})
    )
    wait_blocked(driver, "ContainerNotStarted", "ghost", field)


def test_malformed_affinity_is_spec_invalid(namespace: KubeNamespace):
    malformed = {"pod": {"affinity": {"nodeAffinity": {"required": "maybe"}}}}
    driver = PipelineDriver.start(namespace, pipeline("malformed", prepare=malformed))
    wait_blocked(driver, "SpecInvalid", "affinity")


def test_process_over_its_memory_limit_fails_out_of_memory(namespace: KubeNamespace):
    growing = {
        "command": ["sh", "-c", "x=a; while :; do x=$x$x; done"],
        "resources": memory("24Mi"),
    }
    driver = PipelineDriver.start(namespace, pipeline("oom", prepare={"pod": growing}))
    driver.wait_finished("Failed")
    assert driver.condition("Ready")["reason"] == "OutOfMemory"
    assert "resources.limits.memory" in driver.condition("Ready")["message"]


def test_process_over_its_storage_limit_fails_and_names_it(namespace: KubeNamespace):
    """The kubelet evicts the pod without a DisruptionTarget, because it would happen again."""
    script = """
trap 'exit 75' TERM
dd if=/dev/zero of=/tmp/fill bs=1M count=150 2>/dev/null
while :; do sleep 1 & wait $!; done
"""
    size = {"ephemeral-storage": "20Mi"}
    filling = {
        "command": ["sh", "-c", script],
        "resources": merged(memory("256Mi"), {"requests": size, "limits": size}),
    }
    driver = PipelineDriver.start(
        namespace, pipeline("full-disk", prepare={"pod": filling})
    )
    driver.wait_finished("Failed", seconds=240)
    ready = driver.condition("Ready")
    assert ready["reason"] == "EphemeralStorageExceeded"
    assert "prepare.pod.resources.limits.ephemeral-storage to 40Mi" in ready["message"]
    assert driver.stage("prepare")["failures"] == 1


def test_missing_command_fails_with_its_name(namespace: KubeNamespace):
    typo = {"pod": {"command": ["shh"]}, "maxFailures": 0}
    driver = PipelineDriver.start(namespace, pipeline("typo", prepare=typo))
    driver.wait_finished("Failed", seconds=120)
    assert "shh" in driver.condition("Ready")["message"]


@pytest.mark.parametrize(
    ("code", "reason"),
    [("64", "SpecInvalid"), ("65", "DataInvalid"), ("66", "SourceNotFound")],
)
def test_permanent_exit_code_fails_without_a_retry(
    namespace: KubeNamespace, code: str, reason: str
):
    failing = {"pod": {"env": variables("prepare", FAIL_WITH=code)}}
    driver = PipelineDriver.start(
        namespace, pipeline(f"permanent-{code}", prepare=failing)
    )
    driver.wait_finished("Failed")
    assert driver.condition("Ready")["reason"] == reason
    assert driver.stage("prepare")["failures"] == 1


def test_corrupted_status_stalls_until_it_is_repaired(namespace: KubeNamespace):
    """A result that another client wrote into the status stalls the pipeline; removing it lets the stages go on."""
    driver = PipelineDriver.start(
        namespace, pipeline("corrupted", steps={"prepare": 60})
    )
    driver.wait_state("prepare", "Running")

    def patch_result(**change: Any) -> None:
        train = f"/status/stages/{ORDER.index('train')}"
        body = [
            {"op": "test", "path": f"{train}/name", "value": "train"},
            {**change, "path": f"{train}/result"},
        ]
        namespace.run(
            "patch",
            "ft",
            "corrupted",
            "--subresource=status",
            "--type=json",
            "-p",
            json.dumps(body),
        )

    patch_result(op="add", value={"stage": "nonsense"})
    driver.until(lambda: driver.condition("Stalled").get("reason") == "SpecInvalid")
    assert (
        "status" in driver.condition("Ready")["message"]
        or "result" in driver.condition("Ready")["message"]
    )
    patch_result(op="remove")
    driver.wait_finished()
    assert len(driver.jobs("prepare")) == 1


@pytest.mark.skipif(
    os.environ.get("FAULTS") != "all",
    reason="a minute, and tests/unit/controller/test_workqueue.py has the turns; set FAULTS=all",
)
def test_blocked_pipelines_do_not_delay_others(namespace: KubeNamespace):
    """Twenty good pipelines succeed while twenty blocked and failing pipelines exist."""
    bad = [
        pipeline(f"bad-{n:02}", prepare={"pod": change})
        for n, change in enumerate(
            [
                {"image": "localhost:1/nothing:1"},
                secret_variables("nothing"),
                {"nodeSelector": {"zone": "moon"}},
                ONE_GPU,
                {"serviceAccountName": "ghost"},
                {"affinity": {"nodeAffinity": {"required": "maybe"}}},
                {"env": variables("prepare", FAIL_WITH="70")},
                {"command": ["shh"]},
                {"env": variables("prepare", FAIL_WITH="65")},
                {"command": ["sh", "-c", "exit 0"]},
            ]
            * 2
        )
    ]
    bad_drivers = [PipelineDriver.start(namespace, manifest) for manifest in bad]
    good = [
        PipelineDriver.start(namespace, pipeline(f"good-{n:02}")) for n in range(20)
    ]
    for driver in good:
        driver.wait_finished(seconds=480)
    assert not [
        driver.name
        for driver in bad_drivers
        if driver.status.get("phase") == "Succeeded"
    ]
