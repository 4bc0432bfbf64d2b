"""Defaults of the pods of all stages, below each stage's own pod."""

from typing import Any

import pytest
from pydantic import ValidationError
from support.operator.scenario import ORDER, Scenario, a_pipeline

from finetune_operator.api.stages.pod import Pod, PodDefaults
from finetune_operator.core.settings import Settings

MORE_MEMORY = {"resources": {"limits": {"memory": "64Gi"}}}


def train_pod(defaults: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Return the pod of train over these defaults, as in YAML and without what is at its default."""
    stage = a_pipeline(podDefaults=defaults, train={"pod": own}).stage("train")
    assert stage
    return stage.pod.model_dump(mode="json", by_alias=True, exclude_defaults=True)


MERGES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "env by name": (
        {"env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]},
        {
            "env": [
                {
                    "name": "B",
                    "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}},
                },
                {"name": "C"},
            ]
        },
        {
            "env": [
                {"name": "A", "value": "1"},
                {
                    "name": "B",
                    "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}},
                },
                {"name": "C"},
            ]
        },
    ),
    "image pull secrets by name": (
        {"imagePullSecrets": [{"name": "one"}, {"name": "two"}]},
        {"imagePullSecrets": [{"name": "two"}, {"name": "three"}]},
        {"imagePullSecrets": [{"name": "one"}, {"name": "two"}, {"name": "three"}]},
    ),
    "envFrom joined": (
        {"envFrom": [{"secretRef": {"name": "hub"}}]},
        {"envFrom": [{"configMapRef": {"name": "settings"}, "prefix": "S_"}]},
        {
            "envFrom": [
                {"secretRef": {"name": "hub"}},
                {"configMapRef": {"name": "settings"}, "prefix": "S_"},
            ]
        },
    ),
    "tolerations joined": (
        {"tolerations": [{"key": "dedicated", "value": "nlp"}]},
        {"tolerations": [{"key": "dedicated", "value": "gpu"}]},
        {
            "tolerations": [
                {"key": "dedicated", "value": "nlp"},
                {"key": "dedicated", "value": "gpu"},
            ]
        },
    ),
    "resources merged": (
        {
            "resources": {
                "requests": {"cpu": 2},
                "limits": {"memory": "16Gi", "ephemeral-storage": "1Gi"},
            }
        },
        {
            "resources": {
                "requests": {"memory": "8Gi"},
                "limits": {"memory": "64Gi", "nvidia.com/gpu": 1},
            }
        },
        {
            "resources": {
                "requests": {"cpu": "2", "memory": "8Gi"},
                "limits": {
                    "memory": "64Gi",
                    "ephemeral-storage": "1Gi",
                    "nvidia.com/gpu": "1",
                },
            }
        },
    ),
    "labels merged": (
        {"labels": {"a": "1", "b": "2"}},
        {"labels": {"b": "3"}},
        {"labels": {"a": "1", "b": "3"}},
    ),
    "annotations merged": (
        {"annotations": {"a": "1", "b": "2"}},
        {"annotations": {"b": "3"}},
        {"annotations": {"a": "1", "b": "3"}},
    ),
    "node selector merged": (
        {"nodeSelector": {"zone": "a", "pool": "small"}},
        {"nodeSelector": {"pool": "big"}},
        {"nodeSelector": {"zone": "a", "pool": "big"}},
    ),
    "names replaced": (
        {
            "serviceAccountName": "all",
            "priorityClassName": "low",
            "imagePullPolicy": "Always",
        },
        {"serviceAccountName": "own", "schedulerName": "binpack"},
        {
            "serviceAccountName": "own",
            "priorityClassName": "low",
            "schedulerName": "binpack",
            "imagePullPolicy": "Always",
        },
    ),
}


@pytest.mark.parametrize(
    ("defaults", "own", "merged"), MERGES.values(), ids=MERGES.keys()
)
def test_own_pod_lies_over_the_defaults(defaults, own, merged):
    assert train_pod(defaults, own) == merged


@pytest.mark.parametrize(
    "defaults", [defaults for defaults, _, _ in MERGES.values()], ids=MERGES.keys()
)
def test_every_stage_without_a_pod_has_the_defaults(defaults):
    stages = a_pipeline(podDefaults=defaults).stages()
    assert tuple(stages) == ORDER
    assert all(stage.pod == Pod.model_validate(defaults) for stage in stages.values())


def test_spec_as_written_keeps_defaults_and_pods_apart():
    spec = a_pipeline(podDefaults=MORE_MEMORY)
    assert spec.stages()["train"].pod.resources.limits == {"memory": "64Gi"}
    assert spec.train.pod == Pod()


def test_defaults_and_own_resources_may_be_many_together():
    """Each alone has the largest number; both together were an error that stopped the pipeline for good."""
    defaults = {f"example.com/a{number}": 1 for number in range(16)}
    own = {f"example.com/b{number}": 1 for number in range(16)}
    merged = train_pod(
        {"resources": {"limits": defaults}}, {"resources": {"limits": own}}
    )
    assert merged["resources"]["limits"].keys() == {*defaults, *own}


def test_program_is_no_default():
    for field in ("image", "command", "args"):
        with pytest.raises(ValidationError, match=rf"podDefaults\.{field}"):
            a_pipeline(podDefaults={field: "x" if field == "image" else ["x"]})


@pytest.mark.parametrize("stage", [stage for stage in ORDER if stage != "deploy"])
def test_new_defaults_stop_the_attempt_and_the_next_resumes(stage):
    scenario = Scenario().run_before(stage)
    job = scenario.start(stage)
    before = scenario.stage(stage)
    scenario.edit(podDefaults=MORE_MEMORY)
    assert scenario.cluster.jobs[job].asked_to_stop
    scenario.cluster.evict(job, step=5, saved=5, disruption=None)
    after = scenario.reconcile_until_stable().stage(stage)
    assert (after.identity, after.attempts[0].reason) == (
        before.identity,
        "SpecChanged",
    )
    assert after.execution != before.execution
    assert scenario.cluster.jobs[
        scenario.attempt(stage).job
    ].template.pod.resources.limits == {"memory": "64Gi"}


def test_new_defaults_after_the_end_restart_only_the_server():
    scenario = Scenario().finish()
    before = scenario.created_jobs
    scenario.edit(podDefaults=MORE_MEMORY).finish()
    assert scenario.created_jobs == [*before, "deploy-a2"]


def test_defaults_that_an_own_pod_replaces_change_nothing():
    own = {"pod": MORE_MEMORY}
    scenario = Scenario(a_pipeline(train=own)).run("prepare")
    job = scenario.start("train")
    scenario.edit(podDefaults={"resources": {"limits": {"memory": "8Gi"}}})
    assert not scenario.cluster.jobs[job].asked_to_stop


def test_default_variable_is_in_the_identity_of_an_own_program():
    own = {"pod": {"command": ["python", "mine.py"]}}
    plain = Scenario(a_pipeline(train=own)).finish()
    other = Scenario(
        a_pipeline(train=own, podDefaults={"env": [{"name": "A", "value": "1"}]})
    ).finish()
    assert plain.stage("train").identity != other.stage("train").identity
    assert plain.stage("prepare").identity == other.stage("prepare").identity


def test_labels_of_jobs_are_below_all_others_and_not_on_servers():
    """A proxy may outlive a stage. A server needs it in a mesh."""
    labels = {"sidecar.istio.io/inject": "false", "mesh": "out"}
    settings = Settings(
        job_defaults=PodDefaults(labels=labels, annotations={"inject": "disabled"})
    )
    own = {"labels": {"sidecar.istio.io/inject": "true"}}
    scenario = Scenario(a_pipeline(train={"pod": own}), settings=settings).finish()
    templates = {
        job.template.stage: job.template for job in scenario.cluster.jobs.values()
    }
    injected = {
        name: template.labels.get("sidecar.istio.io/inject")
        for name, template in templates.items()
    }
    assert injected == {
        "prepare": "false",
        "train": "true",
        "evaluate": "false",
        "push": "false",
        "deploy": None,
    }
    assert templates["train"].labels["mesh"] == "out"
    assert templates["train"].pod.annotations == {"inject": "disabled"}
    assert templates["deploy"].pod.annotations == {}
