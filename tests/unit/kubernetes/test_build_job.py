"""Build the Job of an attempt and the claim of a workspace."""

import json

import pytest
from support.scenario import Scenario, a_pipeline

from finetune_operator.core.pipeline import Key, Pipeline
from finetune_operator.kubernetes.resources.claim import build_claim, ownership_error
from finetune_operator.kubernetes.resources.job import build_job, escape_expansion
from finetune_trainer.contract import Environment


def job_of(changes=None, stage="train"):
    pipeline = a_pipeline(**(changes or {}))
    scenario = Scenario(pipeline).finish()
    [template] = [one.template for one in scenario.cluster.jobs.values() if one.template.stage == stage]
    owner = Pipeline(Key("team", "demo"), "uid-1", 1, pipeline)
    return build_job(owner, template)


def pod_of(job):
    return job["spec"]["template"]["spec"]


def env_of(job):
    [container] = pod_of(job)["containers"]
    return {one["name"]: one["value"] for one in container["env"]}


def test_job_is_one_attempt_that_fails_on_disruption():
    spec = job_of()["spec"]
    assert (spec["backoffLimit"], spec["podReplacementPolicy"]) == (0, "Failed")
    first, second = spec["podFailurePolicy"]["rules"]
    assert first == {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    assert second["onExitCodes"]["values"] == [64, 65, 66, 77]


def test_pod_meets_restricted_pod_security_and_has_no_token():
    pod = pod_of(job_of())
    [container] = pod["containers"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {mount["mountPath"] for mount in container["volumeMounts"]} >= {"/workspace", "/tmp"}


def test_environment_has_the_paths_and_escaped_variables():
    env = env_of(job_of({"train": {"env": {"TEXT": "$(HOSTNAME) $(X)"}}}))
    assert env["TEXT"] == "$$(HOSTNAME) $$(X)"
    environment = Environment.read(env)
    assert (str(environment.workspace), str(environment.claims)) == ("/workspace", "/claims")
    assert (str(environment.termination_log), environment.manifest_dir) == ("/dev/termination-log", None)


def test_requested_gpus_are_in_the_environment():
    assert Environment.read(env_of(job_of())).gpus == 0
    assert Environment.read(env_of(job_of({"train": {"resources": {"gpu": {}}}}))).gpus == 1
    several = {"command": ["torchrun"], "resources": {"gpu": {"count": 4}}}
    assert Environment.read(env_of(job_of({"train": several}))).gpus == 4


@pytest.mark.parametrize("text", ["plain", "$HOME", "$$", "a $(b) c", '{"x": "$(y)"}'])
def test_kubelet_expansion_restores_the_escaped_text(text):
    assert escape_expansion(text).replace("$$(", "$(") == text


def test_metrics_port_of_the_stage_env_wins():
    assert env_of(job_of())["FINETUNE_METRICS_PORT"] == "8080"
    assert env_of(job_of({"train": {"env": {"FINETUNE_METRICS_PORT": "0"}}}))["FINETUNE_METRICS_PORT"] == "0"


def test_claims_of_the_config_are_mounted_once_each():
    changes = {"model": {"uri": "pvc://data/base"}, "dataset": {"uri": "pvc://data/x.jsonl"}}
    pod = pod_of(job_of(changes, "prepare"))
    assert [volume["name"] for volume in pod["volumes"]] == ["workspace", "claim-0", "tmp"]
    assert pod["volumes"][1]["persistentVolumeClaim"] == {"claimName": "data"}
    assert {"name": "claim-0", "mountPath": "/claims/data"} in pod["containers"][0]["volumeMounts"]


def test_claim_that_is_also_the_workspace_is_one_volume():
    changes = {"model": {"uri": "pvc://mine/base"}, "workspace": {"existingClaim": "mine"}}
    pod = pod_of(job_of(changes, "prepare"))
    assert [volume["name"] for volume in pod["volumes"]] == ["workspace", "tmp"]
    assert {"name": "workspace", "mountPath": "/claims/mine"} in pod["containers"][0]["volumeMounts"]


def test_pod_has_resources_and_placement_of_the_stage():
    train = {
        "resources": {"cpu": "2", "memory": "4Gi", "gpu": {}},
        "placement": {"capacity": "spot", "affinity": {"podAntiAffinity": {}}, "nodeSelector": {"pool": "big"}},
        "secretRefs": ["keys"],
        "serviceAccountName": "trainer",
        "priorityClassName": "low",
    }
    pod = pod_of(job_of({"train": train}))
    [container] = pod["containers"]
    assert container["resources"] == {
        "requests": {"cpu": "2", "memory": "4Gi"},
        "limits": {"memory": "4Gi", "nvidia.com/gpu": "1"},
    }
    assert container["envFrom"] == [{"secretRef": {"name": "keys"}}]
    assert pod["nodeSelector"] == {"pool": "big"}
    assert pod["affinity"] == {"podAntiAffinity": {}}
    assert (pod["serviceAccountName"], pod["priorityClassName"]) == ("trainer", "low")
    keys = {toleration["key"] for toleration in pod["tolerations"]}
    assert keys >= {"spot", "nvidia.com/gpu", "node.kubernetes.io/unreachable"}


def test_claim_has_an_owner_only_when_deleted_with_it():
    def claim(when_deleted):
        spec = a_pipeline(workspace={"whenDeleted": when_deleted})
        return build_claim(Pipeline(Key("team", "demo"), "uid-1", 1, spec))

    retained, deleted = claim("Retain"), claim("Delete")
    assert retained["metadata"]["name"] == "demo-workspace"
    assert retained["metadata"]["ownerReferences"] == []
    assert [owner["uid"] for owner in deleted["metadata"]["ownerReferences"]] == ["uid-1"]


def test_foreign_claim_of_the_same_name_is_not_used():
    pipeline = Pipeline(Key("team", "demo"), "uid-1", 1, a_pipeline())
    foreign = {"metadata": {"name": "demo-workspace"}}
    assert "was not created for this pipeline" in ownership_error(pipeline, foreign)
    assert ownership_error(pipeline, build_claim(pipeline)) is None


def test_job_survives_a_json_round_trip():
    assert json.loads(json.dumps(job_of())) == job_of()
