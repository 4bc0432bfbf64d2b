"""Volumes, the time to stop and the mounts of a pod: which kinds a user may add, and where they are."""

import pytest
from pydantic import ValidationError
from support.operator.built_objects import built_objects
from support.operator.scenario import ALL_STAGES, a_pipeline, merged

from finetune_operator.api.stages.pod import PodDefaults

CA = {"name": "company", "configMap": {"name": "company-ca"}}
MOUNT = {"name": "company", "mountPath": "/etc/company"}
STAGES = ("prepare", "train", "evaluate", "push", "deploy")


def pods(**changes):
    """Return the specs of the pods of all stages."""
    manifest = {
        "metadata": {"name": "demo"},
        "spec": merged(ALL_STAGES, changes),
    }
    workloads = built_objects(manifest, "team").workloads
    return {stage: workloads[stage]["spec"]["template"]["spec"] for stage in STAGES}


@pytest.mark.parametrize("stage", STAGES)
def test_default_volume_reaches_each_container_of_a_stage(stage):
    pod = pods(
        podDefaults={
            "volumes": [CA],
            "volumeMounts": [MOUNT],
        }
    )[stage]
    assert CA in pod["volumes"]
    for container in (*pod.get("initContainers", ()), *pod["containers"]):
        assert {**MOUNT, "readOnly": True} in container["volumeMounts"]


def test_mount_of_a_stage_replaces_the_default_at_its_path():
    own = {"name": "own", "secret": {"secretName": "own", "defaultMode": 256}}
    there = {"name": "own", "mountPath": "/etc/company"}
    twice = {"name": "own", "mountPath": "/etc/other", "subPath": "a/b"}
    pod = pods(
        podDefaults={
            "volumes": [CA],
            "volumeMounts": [MOUNT],
        },
        train={
            "pod": {
                "volumes": [own],
                "volumeMounts": [there, twice],
            }
        },
    )["train"]
    [container] = pod["containers"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert mounts["/etc/company"] == "own"
    assert mounts["/etc/other"] == "own"
    assert own in pod["volumes"]


def test_claim_is_mounted_for_reading():
    claim = {"name": "cache", "persistentVolumeClaim": {"claimName": "cache"}}
    pod = pods(train={"pod": {"volumes": [claim]}})["train"]
    [volume] = [volume for volume in pod["volumes"] if volume["name"] == "cache"]
    assert volume["persistentVolumeClaim"] == {"claimName": "cache", "readOnly": True}


@pytest.mark.parametrize("stage", STAGES)
def test_stage_has_its_own_time_to_stop(stage):
    own = {stage: {"pod": {"terminationGracePeriodSeconds": 300}}}
    times = {
        name: pod["terminationGracePeriodSeconds"]
        for name, pod in pods(
            podDefaults={"terminationGracePeriodSeconds": 60}, **own
        ).items()
    }
    assert times == {**dict.fromkeys(STAGES, 60), stage: 300}


@pytest.mark.parametrize(
    "pod",
    [
        {"volumes": [{"name": "host", "hostPath": {"path": "/"}}]},
        {"volumes": [{"name": "empty"}]},
        {"volumes": [{**CA, "secret": {"secretName": "a"}}]},
        {"volumes": [{**CA, "name": "workspace"}]},
        {"volumes": [{**CA, "name": "claim-0"}]},
        {"volumes": [CA, CA]},
        {"volumes": [{"name": "none", "projected": {"sources": [{}]}}]},
        {
            "volumes": [
                {
                    "name": "token",
                    "projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]},
                }
            ]
        },
        {
            "volumes": [
                {
                    "name": "data",
                    "persistentVolumeClaim": {"claimName": "a", "readOnly": False},
                }
            ]
        },
        {"volumeMounts": [MOUNT, MOUNT]},
        *(
            {"volumeMounts": [{**MOUNT, "mountPath": path}]}
            for path in (
                *("/", "/workspace", "/workspace/a", "/claims/a", "/models", "/tmp"),
                *("/dev/shm", "/proc", "etc", "/etc/../tmp", "/a:b", "/etc/"),
            )
        ),
        *(
            {"volumeMounts": [{**MOUNT, "subPath": path}]}
            for path in ("/a", "..", "a/../b", "a/..")
        ),
        {"terminationGracePeriodSeconds": 5},
    ],
    ids=str,
)
def test_what_a_job_may_not_have_is_refused(pod):
    with pytest.raises(ValidationError):
        a_pipeline(podDefaults=pod)


def test_paths_beside_the_operators_are_accepted():
    mounts = [
        {"name": "company", "mountPath": path}
        for path in ("/workspaces", "/tmp/a", "/etc/ssl/certs", "/opt/.hidden")
    ]
    assert len(PodDefaults.model_validate({"volumeMounts": mounts}).volume_mounts) == 4
