"""The pods of a stage spread over zones or nodes: which pods count, and which constraints replace others."""

import json

import pytest
from pydantic import ValidationError
from support.operator.built_objects import built_objects
from support.operator.scenario import ALL_STAGES, a_pipeline, merged

from finetune_cli.__main__ import main
from finetune_cli.manifest.fields import without_effect

ZONE = {
    "maxSkew": 1,
    "topologyKey": "topology.kubernetes.io/zone",
    "whenUnsatisfiable": "DoNotSchedule",
}
NODE = {**ZONE, "topologyKey": "kubernetes.io/hostname"}
STAGES = ("prepare", "train", "evaluate", "push", "deploy")


def pods(**changes):
    """Return the templates of the pods of all stages."""
    manifest = {
        "metadata": {"name": "demo"},
        "spec": merged(ALL_STAGES, changes),
    }
    workloads = built_objects(manifest, "team").workloads
    return {stage: workloads[stage]["spec"]["template"] for stage in STAGES}


@pytest.mark.parametrize("stage", STAGES)
def test_pods_of_the_same_attempt_are_spread(stage):
    """Without a selector Kubernetes counts no pod, so that the constraint would have no effect."""
    pod = pods(podDefaults={"topologySpreadConstraints": [ZONE]})[stage]
    [constraint] = pod["spec"]["topologySpreadConstraints"]
    selected = constraint.pop("labelSelector")["matchLabels"]
    assert constraint == ZONE
    assert selected.items() <= pod["metadata"]["labels"].items()
    assert selected["finetune.dev/stage"] == stage
    assert "finetune.dev/attempt" in selected


def test_constraint_is_passed_on_with_all_its_fields():
    own = {**ZONE, "nodeTaintsPolicy": "Honor"}
    pod = {"pod": {"topologySpreadConstraints": [own]}}
    [constraint] = pods(deploy=pod)["deploy"]["spec"]["topologySpreadConstraints"]
    assert constraint.items() >= own.items()
    assert "topologySpreadConstraints" not in pods(deploy=pod)["train"]["spec"]


def test_constraint_of_a_stage_replaces_the_default():
    own = {**ZONE, "maxSkew": 3}
    prefers = {**ZONE, "whenUnsatisfiable": "ScheduleAnyway"}
    constraints = pods(
        podDefaults={"topologySpreadConstraints": [ZONE, NODE]},
        train={"pod": {"topologySpreadConstraints": [own, prefers]}},
    )["train"]["spec"]["topologySpreadConstraints"]
    assert [
        (entry["topologyKey"], entry["whenUnsatisfiable"], entry["maxSkew"])
        for entry in constraints
    ] == [
        (entry["topologyKey"], entry["whenUnsatisfiable"], entry["maxSkew"])
        for entry in (NODE, own, prefers)
    ]


def test_local_run_says_that_it_ignores_the_constraints():
    spec = a_pipeline(deploy={"pod": {"topologySpreadConstraints": [ZONE]}})
    assert "spec.deploy.pod.topologySpreadConstraints" in without_effect(spec)


@pytest.mark.parametrize(
    ("constraints", "error"),
    [
        ([{**ZONE, "maxSkew": 0}], "greater than or equal to 1"),
        ([{**ZONE, "topologyKey": "a zone"}], "pattern"),
        ([{**ZONE, "whenUnsatisfiable": "Never"}], "DoNotSchedule"),
        ([{"maxSkew": 1, "topologyKey": "zone"}], "required"),
        ([ZONE, {**ZONE, "maxSkew": 2}], "two entries have the same topologyKey"),
        ([{**ZONE, "labelSelector": {}}], "Extra inputs"),
    ],
)
def test_constraint_that_no_pod_may_have_is_refused(constraints, error):
    with pytest.raises(ValidationError) as refused:
        a_pipeline(train={"pod": {"topologySpreadConstraints": constraints}})
    assert error in str(refused.value)


def test_selector_is_refused_with_the_pods_that_are_spread(tmp_path, capsys):
    constraint = {**ZONE, "labelSelector": {"matchLabels": {"app": "a"}}}
    spec = merged(
        ALL_STAGES, {"deploy": {"pod": {"topologySpreadConstraints": [constraint]}}}
    )
    manifest = {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTunePipeline",
        "metadata": {"name": "demo"},
        "spec": spec,
    }
    file = tmp_path / "p.yaml"
    file.write_text(json.dumps(manifest))
    assert main(["validate", str(file)]) != 0
    assert "the pods of the same attempt are spread" in capsys.readouterr().out
