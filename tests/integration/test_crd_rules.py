"""An API server refuses what the models refuse, with the rules in the schema of the CRD or in a policy."""

import json
from collections.abc import Iterator

import pytest
from support.operator.crd_rules import delete_policies
from support.operator.demo_manifest import manifest_with
from support.operator.operator_process import GROUP

from finetune_operator.crd import generate
from testcluster.errors import TimedOut
from testcluster.kube_namespace import KubeNamespace, temporary_namespace, until
from testcluster.provider import Provider


@pytest.fixture(scope="module")
def namespace(control_plane: Provider, rules: list[dict]) -> Iterator[KubeNamespace]:
    """A namespace on an API server that checks the rules."""
    kube = control_plane.kube
    kube.apply(rules)
    until(lambda: "finetunepipelines" in kube.run("api-resources", GROUP), 30)
    with temporary_namespace(kube, f"rules-in-{len(rules)}-objects") as created:
        until(lambda: breaks_a_rule(created), 30)
        yield created
    delete_policies(kube)


def breaks_a_rule(namespace: KubeNamespace) -> bool:
    """Return whether the API server refuses a broken rule: it reads a policy some time after its creation."""
    manifest = manifest_with("probe", push={"placement": {"capacity": "Spot"}})
    try:
        namespace.run(
            "create", "--dry-run=server", "-f", "-", given=json.dumps(manifest)
        )
    except TimedOut as error:
        return "placement.capacity" in str(error)
    return False


FULL = {"method": "Full", "lora": None}


def variables(count: int) -> list[dict[str, str]]:
    """Return environment variables with values of the greatest length."""
    return [{"name": f"A{number}", "value": "x" * 4096} for number in range(count)]


def test_api_server_accepts_texts_up_to_the_limit(namespace: KubeNamespace):
    texts = {
        "env": variables(8),
        "command": ["x" * 4000] * 4,
        "args": ["x" * 4000] * 4,
    }
    namespace.create(manifest_with("long", train={"pod": texts}))
    assert len(namespace.get("ft", "long")["spec"]["train"]["pod"]["args"]) == 4


def test_api_server_counts_no_share_of_a_device(namespace: KubeNamespace):
    pod = {"resources": {"limits": {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 3000}}}
    train = {"processesPerNode": 1, "pod": pod}
    namespace.create(manifest_with("share", prepare={"pod": pod}, train=train))
    assert namespace.get("ft", "share")["spec"]["train"]["processesPerNode"] == 1


@pytest.mark.parametrize(
    ("stages", "error"),
    [
        ({"train": {"lora": {"rank": 0}}}, "spec.train.lora.rank"),
        (
            {"push": {"placement": {"capacity": "Spot"}}},
            "spec.push.*placement.capacity: must be OnDemand",
        ),
        (
            {"prepare": {"pod": {"resources": {"limits": {"nvidia.com/gpu": 2}}}}},
            "spec.prepare.*pod.resources.limits: has more than one accelerator",
        ),
        (
            {
                "train": {
                    "processesPerNode": 2,
                    "pod": {"resources": {"limits": {"nvidia.com/gpu": 4}}},
                }
            },
            "spec.train.*processesPerNode: is not the number of accelerators",
        ),
        (
            {"train": {"nodes": 2}},
            "train.nodes: all nodes mount the workspace: set workspace.accessMode",
        ),
        (
            {"train": {"pod": {"resources": {"requests": {"memory": 16}}}}},
            "spec.train.pod.resources.*requests.memory: is less than a megabyte",
        ),
        (
            {"train": {"pod": {"env": variables(16)}}},
            "spec.train.*have more than 65536 characters",
        ),
        (
            {"train": {"pod": {"command": ["x" * 4000] * 9, "args": ["x" * 4000] * 9}}},
            "spec.train.*have more than 65536",
        ),
        (
            {"train": {"placement": {"capacity": "moon"}}},
            "spec.train.placement.capacity",
        ),
        (
            {
                "push": {
                    "targets": [{"uri": "pvc://a/b"}],
                    "placement": {"capacity": "Auto"},
                }
            },
            "spec.push.*placement.capacity: must be OnDemand",
        ),
        (
            {
                "evaluate": {
                    "gates": [{"task": "missing", "metric": "acc", "value": 0.5}]
                }
            },
            "gates: every task must be",
        ),
        (
            {"train": {"earlyStopping": {}, "evalSteps": None}},
            "earlyStopping: needs repeated validation: set evalSteps",
        ),
        (
            {"train": {"method": "Full", "lora": {"rank": 8}}},
            "lora: method Full trains no adapter: remove lora",
        ),
        (
            {"train": {"parallelism": "FSDP", "method": "QLoRA"}},
            "parallelism: FSDP shards no weights of 4 bits and no moments of 8: set method to LoRA or Full",
        ),
        (
            {"train": {"parallelism": "FSDP", "optimizer": {"name": "AdamW8Bit"}}},
            "parallelism: FSDP shards no weights of 4 bits and no moments of 8: set method to LoRA or Full",
        ),
        (
            {"train": {"compile": True, "lora": {"variant": "DoRA"}}},
            "compile: DoRA cannot be compiled: set compile",
        ),
        (
            {"train": FULL, "evaluate": {"weights": "Adapter"}},
            "evaluate.weights: train.method Full trains no adapter",
        ),
        (
            {
                "train": FULL,
                "push": {
                    "targets": [
                        {"uri": "pvc://a/b", "format": "Adapter"},
                        {"uri": "pvc://a/c", "format": "Merged"},
                    ]
                },
            },
            "push.targets: train.method Full trains no adapter",
        ),
    ],
)
def test_api_server_refuses_an_invalid_field_by_its_path(
    namespace: KubeNamespace, stages, error
):
    with pytest.raises(TimedOut, match=error):
        namespace.create(manifest_with("refused", **stages))


def test_api_server_accepts_as_many_data_sets_as_the_limit(namespace: KubeNamespace):
    manifest = manifest_with("many")
    dataset = {
        "uri": "hf://org/" + "x" * 1000,
        "split": "train",
        "columns": {"text": "y" * 256},
        "weight": 0.3,
    }
    manifest["spec"]["datasets"] = [dataset] * 64
    namespace.create(manifest)
    assert namespace.get("ft", "many")["spec"]["datasets"] == [dataset] * 64


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        (
            {"datasets": [{"uri": "pvc://a/b.csv", "split": "train"}]},
            r"datasets\[0\].*config and split belong to a hub",
        ),
        (
            {"datasets": [{"uri": "x", "columns": {"text": "a", "prompt": "b"}}]},
            "must name fields of one kind of record",
        ),
        (
            {"datasets": [{"uri": "x", "columns": {}}]},
            "must name fields of one kind of record",
        ),
        ({"datasets": []}, "spec.datasets"),
        ({"deadline": "tomorrow"}, "spec.deadline"),
        ({"validation": {}}, "set fraction or uri, and not both"),
        (
            {"validation": {"fraction": 0.1, "uri": "x"}},
            "set fraction or uri, and not both",
        ),
        (
            {"validation": {"fraction": 0.1, "format": "CSV"}},
            "uri: is needed by revision, config, split, format and columns",
        ),
    ],
)
def test_api_server_refuses_a_contradiction_in_the_data(
    namespace: KubeNamespace, fields, error
):
    manifest = manifest_with("data")
    manifest["spec"] |= fields
    with pytest.raises(TimedOut, match=error):
        namespace.create(manifest)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        (
            {"whenExpired": "Delete", "ttlSecondsAfterFinished": 1},
            "whenExpired: Delete would delete the server",
        ),
        (
            {"whenExpired": "Retain"},
            "whenExpired: has no effect without a time: add ttlSecondsAfterFinished",
        ),
    ],
)
def test_api_server_refuses_a_contradicting_expiry(
    namespace: KubeNamespace, fields, error
):
    manifest = manifest_with("expiry", deploy={})
    manifest["spec"] |= fields
    with pytest.raises(TimedOut, match=error):
        namespace.create(manifest)


def test_api_server_reports_all_broken_rules_at_once(namespace: KubeNamespace):
    manifest = manifest_with(
        "several",
        train={"compile": True, "lora": {"variant": "DoRA"}},
        push={"placement": {"capacity": "Spot"}},
    )
    manifest["spec"] |= {"whenExpired": "Retain"}
    with pytest.raises(TimedOut, match="whenExpired: has no effect") as refused:
        namespace.create(manifest)
    for mistake in ("compile: DoRA cannot", "placement.capacity: must be OnDemand"):
        assert mistake in str(refused.value)


def test_field_from_before_a_rule_may_stay(
    namespace: KubeNamespace, control_plane: Provider, rules: list[dict]
):
    """Its pipeline can be cancelled, loses its finalizers, and is edited elsewhere."""
    kube = control_plane.kube
    delete_policies(kube)
    kube.apply([generate.definition(rules=False)])
    until(lambda: not breaks_a_rule(namespace), 30)
    namespace.create(manifest_with("old", push={"placement": {"capacity": "Spot"}}))
    kube.apply(rules)
    until(lambda: breaks_a_rule(namespace), 30)
    namespace.run("annotate", "ft", "old", "finetune.dev/cancel=now")
    change(namespace, {"seed": 7})
    with pytest.raises(TimedOut, match=r"placement\.capacity: must be OnDemand"):
        change(namespace, {"push": {"maxFailures": 7}})


def change(namespace: KubeNamespace, spec: dict) -> None:
    patch = json.dumps({"spec": spec})
    namespace.run("patch", "ft", "old", "--type=merge", "-p", patch)
