"""Build the Job of an attempt and the claim of a workspace."""

import json

import pytest
from support.operator.scenario import Scenario, a_pipeline

from finetune_operator.core.pipeline import Key, Pipeline
from finetune_operator.kubernetes.resources.claim import build_claim, ownership_error
from finetune_operator.kubernetes.resources.job import build_job, escape_expansion
from finetune_trainer.contract import Environment


def job_of(changes=None, stage="train", notices=""):
    pipeline = a_pipeline(**(changes or {}))
    scenario = Scenario(pipeline).finish()
    [template] = [
        job.template
        for job in scenario.cluster.jobs.values()
        if job.template.stage == stage
    ]
    owner = Pipeline(Key("team", "demo"), "uid-1", 1, pipeline)
    return build_job(owner, template, notices)


def pod_of(job):
    return job["spec"]["template"]["spec"]


def env_of(job):
    [container] = pod_of(job)["containers"]
    return {variable["name"]: variable["value"] for variable in container["env"]}


def test_job_is_one_attempt_that_fails_on_disruption():
    spec = job_of()["spec"]
    assert spec["backoffLimit"] == 0
    assert spec["podReplacementPolicy"] == "Failed"
    first, second = spec["podFailurePolicy"]["rules"]
    assert first == {
        "action": "FailJob",
        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
    }
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
    assert {mount["mountPath"] for mount in container["volumeMounts"]} >= {
        "/workspace",
        "/tmp",
    }


def test_environment_has_the_paths_and_escaped_variables():
    env = env_of(
        job_of(
            {"train": {"pod": {"env": [{"name": "TEXT", "value": "$(HOSTNAME) $(X)"}]}}}
        )
    )
    assert env["TEXT"] == "$$(HOSTNAME) $$(X)"
    environment = Environment.read(env)
    assert (str(environment.workspace), str(environment.claims)) == (
        "/workspace",
        "/claims",
    )
    assert (str(environment.termination_log), environment.manifest_dir) == (
        "/dev/termination-log",
        None,
    )


def test_requested_gpus_are_in_the_environment():
    assert Environment.read(env_of(job_of())).gpus == 0
    assert (
        Environment.read(
            env_of(
                job_of(
                    {"train": {"pod": {"resources": {"limits": {"nvidia.com/gpu": 1}}}}}
                )
            )
        ).gpus
        == 1
    )
    several = {
        "command": ["torchrun"],
        "resources": {"limits": {"nvidia.com/gpu": 4}},
    }
    assert Environment.read(env_of(job_of({"train": {"pod": several}}))).gpus == 4


@pytest.mark.parametrize("text", ["plain", "$HOME", "$$", "a $(b) c", '{"x": "$(y)"}'])
def test_kubelet_expansion_restores_the_escaped_text(text):
    assert escape_expansion(text).replace("$$", "$") == text


def test_metrics_port_of_the_stage_env_wins():
    assert env_of(job_of())["FINETUNE_METRICS_PORT"] == "8080"
    off = [{"name": "FINETUNE_METRICS_PORT", "value": "0"}]
    assert (
        env_of(job_of({"train": {"pod": {"env": off}}}))["FINETUNE_METRICS_PORT"] == "0"
    )


@pytest.mark.parametrize(
    ("env", "ports"),
    [
        ([], [8080]),
        ([{"name": "FINETUNE_METRICS_PORT", "value": "9100"}], [9100]),
        ([{"name": "FINETUNE_METRICS_PORT", "value": "0"}], []),
        ([{"name": "FINETUNE_METRICS_PORT", "value": "70000"}], []),
        ([{"name": "FINETUNE_METRICS_PORT", "value": "http"}], []),
        (
            [
                {
                    "name": "FINETUNE_METRICS_PORT",
                    "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}},
                }
            ],
            [],
        ),
    ],
    ids=["default", "another", "none", "too large", "no number", "not known"],
)
def test_container_names_the_port_of_its_metrics(env, ports):
    [container] = pod_of(job_of({"train": {"pod": {"env": env}}}))["containers"]
    assert container["ports"] == [
        {"name": "metrics", "containerPort": port} for port in ports
    ]


def test_claims_of_the_config_are_mounted_once_each():
    changes = {
        "model": {"uri": "pvc://data/base"},
        "datasets": [{"uri": "pvc://data/x-*.jsonl"}],
    }
    pod = pod_of(job_of(changes, "prepare"))
    assert [volume["name"] for volume in pod["volumes"]] == [
        "workspace",
        "claim-0",
        "tmp",
    ]
    assert pod["volumes"][1]["persistentVolumeClaim"] == {
        "claimName": "data",
        "readOnly": True,
    }
    assert {"name": "claim-0", "mountPath": "/claims/data", "readOnly": True} in pod[
        "containers"
    ][0]["volumeMounts"]


def writable_claims(pod):
    """Return the claims that the pod may write to, and check that mounts and volumes agree."""
    claims = {
        volume["name"]: volume.get("persistentVolumeClaim") for volume in pod["volumes"]
    }
    for mount in pod["containers"][0]["volumeMounts"]:
        claim = claims[mount["name"]]
        assert claim is None or mount.get("readOnly") == claim.get("readOnly")
    return {
        claim["claimName"]
        for claim in claims.values()
        if claim and not claim.get("readOnly")
    }


@pytest.mark.parametrize(
    ("stage", "writable"),
    [
        ("prepare", {"demo-workspace"}),
        ("train", {"demo-workspace"}),
        ("evaluate", {"demo-workspace"}),
        ("push", {"demo-workspace", "models"}),
    ],
)
def test_stage_writes_only_to_the_workspace_and_the_target(stage, writable):
    tasks = [{"name": "exam", "file": "pvc://exams/task.yaml"}]
    sources = {
        "model": {"uri": "pvc://base/m"},
        "datasets": [{"uri": "pvc://data/x.jsonl"}],
    }
    assert (
        writable_claims(
            pod_of(job_of({**sources, "evaluate": {"tasks": tasks}}, stage))
        )
        == writable
    )


def test_claim_of_both_source_and_target_is_writable_for_push():
    changes = {"model": {"uri": "pvc://models/base"}}
    assert writable_claims(pod_of(job_of(changes, "push"))) == {
        "demo-workspace",
        "models",
    }
    assert writable_claims(pod_of(job_of(changes, "train"))) == {"demo-workspace"}


def test_claim_that_is_also_the_workspace_is_one_volume():
    changes = {
        "model": {"uri": "pvc://mine/base"},
        "workspace": {"existingClaim": "mine"},
    }
    pod = pod_of(job_of(changes, "prepare"))
    assert [volume["name"] for volume in pod["volumes"]] == ["workspace", "tmp"]
    assert {"name": "workspace", "mountPath": "/claims/mine"} in pod["containers"][0][
        "volumeMounts"
    ]
    assert writable_claims(pod) == {"mine"}


def test_pod_has_resources_and_placement_of_the_stage():
    own = {
        "resources": {
            "requests": {"cpu": 2, "memory": "4Gi"},
            "limits": {"memory": "4Gi", "nvidia.com/gpu": 1},
        },
        "affinity": {"podAntiAffinity": {}},
        "nodeSelector": {"pool": "big"},
        "envFrom": [{"secretRef": {"name": "keys"}}],
        "serviceAccountName": "trainer",
        "priorityClassName": "low",
        "schedulerName": "binpack",
        "runtimeClassName": "nvidia",
        "imagePullSecrets": [{"name": "registry"}],
        "imagePullPolicy": "Always",
    }
    pod = pod_of(job_of({"train": {"pod": own, "placement": {"capacity": "Spot"}}}))
    [container] = pod["containers"]
    assert container["resources"] == {
        "requests": {"cpu": "2", "memory": "4Gi"},
        "limits": {"memory": "4Gi", "nvidia.com/gpu": "1"},
    }
    assert container["envFrom"] == [{"secretRef": {"name": "keys"}}]
    assert pod["nodeSelector"] == {"pool": "big"}
    assert pod["affinity"] == {"podAntiAffinity": {}}
    assert pod["serviceAccountName"] == "trainer"
    assert pod["priorityClassName"] == "low"
    assert pod["schedulerName"] == "binpack"
    assert pod["runtimeClassName"] == "nvidia"
    assert (pod["imagePullSecrets"], container["imagePullPolicy"]) == (
        [{"name": "registry"}],
        "Always",
    )
    keys = {toleration["key"] for toleration in pod["tolerations"]}
    assert keys >= {"spot", "nvidia.com/gpu", "node.kubernetes.io/unreachable"}


def test_claim_has_an_owner_only_when_deleted_with_it():
    def claim(when_deleted):
        spec = a_pipeline(workspace={"whenDeleted": when_deleted})
        return build_claim(Pipeline(Key("team", "demo"), "uid-1", 1, spec))

    retained = claim("Retain")
    deleted = claim("Delete")
    assert retained["metadata"]["name"] == "demo-workspace"
    assert retained["metadata"]["ownerReferences"] == []
    assert [owner["uid"] for owner in deleted["metadata"]["ownerReferences"]] == [
        "uid-1"
    ]


def test_foreign_claim_of_the_same_name_is_not_used():
    pipeline = Pipeline(Key("team", "demo"), "uid-1", 1, a_pipeline())
    foreign = {"metadata": {"name": "demo-workspace"}}
    assert "was not created for this pipeline" in str(
        ownership_error(pipeline, foreign)
    )
    assert ownership_error(pipeline, build_claim(pipeline)) is None


def test_job_survives_a_json_round_trip():
    assert json.loads(json.dumps(job_of())) == job_of()


def test_attempt_and_pipeline_are_in_the_environment():
    env = env_of(job_of())
    assert env["FINETUNE_ATTEMPT"] == "1"
    assert env["FINETUNE_PIPELINE_UID"]


@pytest.mark.parametrize(("stage", "provider"), [("train", "EC2"), ("prepare", None)])
def test_only_training_watches_for_notices(stage, provider):
    assert (
        env_of(job_of(stage=stage, notices="EC2")).get("FINETUNE_INTERRUPTION_NOTICES")
        == provider
    )
    assert "FINETUNE_INTERRUPTION_NOTICES" not in env_of(job_of(stage=stage))
