"""The Job, as the API server is given it."""

import json

import pytest
from support.scenario import Scenario, a_pipeline

from finetune_operator.core.pipeline import Key, Pipeline
from finetune_operator.kubernetes.resources import claim as volume
from finetune_operator.kubernetes.resources.job import build_job, escape_expansion
from finetune_trainer.contract import Environment


def written(changes=None, stage="train"):
    pipeline = a_pipeline(**(changes or {}))
    scenario = Scenario(pipeline).finish()
    [template] = [one.template for one in scenario.cluster.jobs.values() if one.template.stage == stage]
    owner = Pipeline(Key("team", "demo"), "uid-1", 1, pipeline)
    return build_job(owner, template)


def pod_of(made):
    return made["spec"]["template"]["spec"]


def env_of(made):
    [container] = pod_of(made)["containers"]
    return {one["name"]: one["value"] for one in container["env"]}


def test_it_is_one_attempt_that_a_disruption_fails_at_once_with_evidence():
    made = written()["spec"]
    assert (made["backoffLimit"], made["podReplacementPolicy"]) == (0, "Failed")
    first, second = made["podFailurePolicy"]["rules"]
    assert first == {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    assert second["onExitCodes"]["values"] == [64, 65, 66, 77]


def test_its_pod_is_what_pod_security_calls_restricted_and_has_no_token():
    pod = pod_of(written())
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


def test_the_process_finds_its_places_and_no_variable_is_expanded():
    env = env_of(written({"train": {"env": {"WHO": "$(HOSTNAME) $(X)"}}}))
    assert env["WHO"] == "$$(HOSTNAME) $$(X)"
    places = Environment.read(env)
    assert (str(places.workspace), str(places.claims)) == ("/workspace", "/claims")
    assert (str(places.termination_log), places.manifest_dir) == ("/dev/termination-log", None)


@pytest.mark.parametrize("text", ["plain", "$HOME", "$$", "a $(b) c", '{"x": "$(y)"}'])
def test_a_literal_is_what_the_kubelet_makes_of_it(text):
    assert escape_expansion(text).replace("$$(", "$(") == text


def test_the_port_of_progress_is_the_users_if_he_says_so():
    assert env_of(written())["FINETUNE_METRICS_PORT"] == "8080"
    assert env_of(written({"train": {"env": {"FINETUNE_METRICS_PORT": "0"}}}))["FINETUNE_METRICS_PORT"] == "0"


def test_claims_that_the_config_names_are_mounted_once_each():
    changes = {"model": {"uri": "pvc://data/base"}, "dataset": {"uri": "pvc://data/x.jsonl"}}
    pod = pod_of(written(changes, "prepare"))
    assert [volume["name"] for volume in pod["volumes"]] == ["workspace", "claim-0", "tmp"]
    assert pod["volumes"][1]["persistentVolumeClaim"] == {"claimName": "data"}
    assert {"name": "claim-0", "mountPath": "/claims/data"} in pod["containers"][0]["volumeMounts"]


def test_a_claim_that_is_the_workspace_too_is_one_volume():
    changes = {"model": {"uri": "pvc://mine/base"}, "workspace": {"existingClaim": "mine"}}
    pod = pod_of(written(changes, "prepare"))
    assert [volume["name"] for volume in pod["volumes"]] == ["workspace", "tmp"]
    assert {"name": "workspace", "mountPath": "/claims/mine"} in pod["containers"][0]["volumeMounts"]


def test_what_a_stage_asks_for_is_in_its_pod():
    wish = {
        "resources": {"cpu": "2", "memory": "4Gi", "gpu": {"count": 2}},
        "placement": {"capacity": "spot", "affinity": {"podAntiAffinity": {}}, "nodeSelector": {"pool": "big"}},
        "secretRefs": ["keys"],
        "serviceAccountName": "trainer",
        "priorityClassName": "low",
    }
    pod = pod_of(written({"train": wish}))
    [container] = pod["containers"]
    assert container["resources"] == {
        "requests": {"cpu": "2", "memory": "4Gi"},
        "limits": {"memory": "4Gi", "nvidia.com/gpu": "2"},
    }
    assert container["envFrom"] == [{"secretRef": {"name": "keys"}}]
    assert pod["nodeSelector"] == {"pool": "big"}
    assert pod["affinity"] == {"podAntiAffinity": {}}
    assert (pod["serviceAccountName"], pod["priorityClassName"]) == ("trainer", "low")
    keys = {toleration["key"] for toleration in pod["tolerations"]}
    assert keys >= {"spot", "nvidia.com/gpu", "node.kubernetes.io/unreachable"}


def test_the_workspace_outlives_the_pipeline_unless_it_is_told_not_to():
    def claim(when):
        spec = a_pipeline(workspace={"whenDeleted": when})
        return volume.build_claim(Pipeline(Key("team", "demo"), "uid-1", 1, spec))

    kept, gone = claim("Retain"), claim("Delete")
    assert kept["metadata"]["name"] == "demo-workspace"
    assert kept["metadata"]["ownerReferences"] == []
    assert [owner["uid"] for owner in gone["metadata"]["ownerReferences"]] == ["uid-1"]


def test_a_claim_of_that_name_that_is_somebody_elses_is_not_used():
    pipeline = Pipeline(Key("team", "demo"), "uid-1", 1, a_pipeline())
    foreign = {"metadata": {"name": "demo-workspace"}}
    assert "was not made for this pipeline" in volume.ownership_error(pipeline, foreign)
    assert volume.ownership_error(pipeline, volume.build_claim(pipeline)) is None


def test_a_job_is_plain_json():
    assert json.loads(json.dumps(written())) == written()
