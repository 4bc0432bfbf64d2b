"""What the pod of a stage may say, and which mistakes are refused, in Python and in the CRD."""

import pytest
import yaml
from pydantic import ValidationError
from support.operator.scenario import a_pipeline

from finetune_operator.api.stages.pod import BYTES
from finetune_operator.crd import generate
from finetune_operator.kubernetes.resources.server import without_devices


def spec_schema():
    crd = yaml.safe_load(generate.FILE.read_text())
    return crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"][
        "spec"
    ]["properties"]


def rules_of(part) -> dict[str, str]:
    """Return the rules in CEL of a part of the schema, by the field that their message names."""
    return {
        validation["message"].partition(":")[0]: validation["rule"]
        for validation in part["x-kubernetes-validations"]
    }


TINY = [16, "16", "999999", "0", "500m", "16k", "16Ki"]
LARGE = [1_000_000, "1000000", "1M", "1Mi", "16Gi", "0.5Ti", "16G"]


@pytest.mark.parametrize("amount", TINY)
@pytest.mark.parametrize("field", ["requests", "limits"])
@pytest.mark.parametrize("resource", ["memory", "ephemeral-storage"])
def test_amount_below_a_megabyte_is_refused(field, resource, amount):
    pod = {"resources": {field: {resource: amount}}}
    for changes in ({"train": {"pod": pod}}, {"podDefaults": pod}):
        with pytest.raises(
            ValidationError,
            match=rf"{field}\.{resource}: is less than a megabyte; write 16Gi for",
        ):
            a_pipeline(**changes)


@pytest.mark.parametrize("amount", LARGE)
def test_amount_of_a_megabyte_is_accepted(amount):
    own = a_pipeline(
        train={"pod": {"resources": {"limits": {"memory": amount}}}},
        workspace={"size": amount},
    )
    assert own.train.pod.resources.limits["memory"] == own.workspace.size == str(amount)


@pytest.mark.parametrize("amount", [10, *TINY])
def test_workspace_below_a_megabyte_is_refused(amount):
    with pytest.raises(ValidationError, match=r"workspace\.size"):
        a_pipeline(workspace={"size": amount})


def test_crd_refuses_tiny_amounts_that_are_integers():
    """A pattern says nothing about an integer, so that the API server needs a rule; integration tests evaluate it."""
    schema = spec_schema()
    of_workspace = [
        validation["rule"]
        for validation in schema["workspace"]["x-kubernetes-validations"]
    ]
    assert f"!has(self.size) || string(self.size).matches('{BYTES}')" in of_workspace
    for pod in (
        schema["podDefaults"],
        *(schema[name]["properties"]["pod"] for name in ("prepare", "train", "deploy")),
    ):
        rules = rules_of(pod["properties"]["resources"])
        assert rules.keys() == {
            *("requests", "requests.memory", "requests.ephemeral-storage"),
            *("limits", "limits.memory", "limits.ephemeral-storage"),
        }
        assert (
            f"string(self.limits['memory']).matches('{BYTES}')"
            in rules["limits.memory"]
        )


def test_crd_refuses_gates_with_the_same_keys():
    schema = spec_schema()["evaluate"]
    rules = {
        validation["message"]: validation["rule"]
        for validation in schema["x-kubernetes-validations"]
    }
    rule = rules[
        "gates: two gates have the same task, metric, operator and against: remove one"
    ]
    assert (
        "(has(a.metric) ? a.metric : 'acc') == (has(b.metric) ? b.metric : 'acc')"
        in rule
    )
    assert "a.task == b.task" in rule


@pytest.mark.parametrize(
    "share",
    ["nvidia.com/gpumem", "nvidia.com/gpumem-percentage", "nvidia.com/gpucores"],
)
def test_share_of_a_device_is_no_accelerator(share):
    """HAMi counts its memory in megabytes: each would get a process."""
    pod = {"resources": {"limits": {"nvidia.com/gpu": 1, share: 3000}}}
    spec = a_pipeline(
        prepare={"pod": pod}, train={"pod": pod, "processesPerNode": 1}, deploy=None
    )
    assert spec.train.pod.resources.accelerators == 1
    assert spec.train.processes == 1
    assert without_devices(spec.train.pod.resources).limits == {}


def test_small_amounts_of_other_resources_are_accepted():
    limits = {"cpu": "500m", "nvidia.com/gpu": 1, "example.com/license": 3}
    assert (
        a_pipeline(
            train={"pod": {"resources": {"limits": limits}}}
        ).train.pod.resources.accelerators
        == 1
    )


@pytest.mark.parametrize(
    ("pod", "message"),
    [
        (
            {
                "env": [
                    {
                        "name": "A",
                        "value": "1",
                        "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}},
                    }
                ]
            },
            "set value or valueFrom",
        ),
        (
            {"env": [{"name": "A", "valueFrom": {}}]},
            "set exactly one of secretKeyRef, configMapKeyRef, fieldRef",
        ),
        (
            {
                "env": [
                    {
                        "name": "A",
                        "valueFrom": {
                            "fieldRef": {"fieldPath": "spec.nodeName"},
                            "secretKeyRef": {"name": "s", "key": "k"},
                        },
                    }
                ]
            },
            "set exactly one of secretKeyRef, configMapKeyRef, fieldRef",
        ),
        (
            {"env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]},
            "two entries have the same name A",
        ),
        ({"envFrom": [{"prefix": "A_"}]}, "set exactly one of secretRef, configMapRef"),
        (
            {"envFrom": [{"secretRef": {"name": "s"}, "configMapRef": {"name": "c"}}]},
            "set exactly one of secretRef, configMapRef",
        ),
        (
            {"imagePullSecrets": [{"name": "s"}, {"name": "s"}]},
            "two entries have the same name s",
        ),
        (
            {"env": [{"name": "FINETUNE_GPUS", "value": "4"}]},
            "names with the prefix FINETUNE_ are reserved",
        ),
        (
            {
                "env": [
                    {
                        "name": "FINETUNE_CONFIG",
                        "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}},
                    }
                ]
            },
            "names with the prefix FINETUNE_ are reserved",
        ),
        (
            {"labels": {"finetune.dev/stage": "x"}},
            r"labels: keys of the operator \(finetune.dev/\) and of Jobs",
        ),
        (
            {"labels": {"batch.kubernetes.io/job-name": "x"}},
            r"\(batch.kubernetes.io/, controller-uid, job-name\) are reserved: choose",
        ),
        (
            {"tolerations": [{"key": "a", "operator": "Exists", "value": "b"}]},
            "value: operator Exists matches any value: remove value",
        ),
        (
            {"resources": {"requests": {"cpu": 4}, "limits": {"cpu": "2"}}},
            "requests: must not be above limits",
        ),
        (
            {"resources": {"requests": {"nvidia.com/gpu": 1}}},
            "devices such as nvidia.com/gpu need an equal limit",
        ),
        (
            {"annotations": {"finetune.dev/serving": "{}"}},
            "annotations: keys with the prefix finetune.dev/ are",
        ),
    ],
)
@pytest.mark.parametrize("where", ["podDefaults", "train"])
def test_contradiction_in_a_pod_is_refused_with_the_fix(where, pod, message):
    with pytest.raises(ValidationError, match=message):
        a_pipeline(**{where: pod if where == "podDefaults" else {"pod": pod}})
