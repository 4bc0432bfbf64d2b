"""An API server accepts the CRD, explains its fields, sets defaults, and refuses what the models refuse."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from finetune_trainer.contract import LossCurve, ValidationPoint
from testcluster.errors import TimedOut
from testcluster.kube_namespace import (
    KubeNamespace,
    crd_conditions,
    temporary_namespace,
    until,
    wait_until_established,
)
from testcluster.provider import Provider

ROOT = Path(__file__).parents[2]
MANIFEST = yaml.safe_load((ROOT / "examples" / "demo" / "pipeline.yaml").read_text())

CRD = "finetunepipelines.finetune.dev"
EXAMPLES = sorted((ROOT / "examples").glob("*/pipeline.yaml"))
ARGOCD = ROOT / "deploy" / "argocd" / "examples"


@pytest.fixture(scope="module")
def namespace(control_plane: Provider) -> Iterator[KubeNamespace]:
    """A namespace on an API server that serves the CRD."""
    control_plane.kube.apply((ROOT / "crds" / "finetunepipelines.yaml").read_text())
    wait_until_established(control_plane.kube, CRD)
    with temporary_namespace(control_plane.kube, "pipelines") as created:
        until(
            lambda: (
                "finetunepipelines"
                in control_plane.kube.run("api-resources", "--api-group=finetune.dev")
            ),
            30,
        )
        yield created


FULL = {"method": "Full", "lora": None}


def manifest_with(name: str, **stages) -> dict:
    """Return the demo's manifest under another name, with fields of stages replaced."""
    manifest = copy.deepcopy(MANIFEST)
    manifest["metadata"]["name"] = name
    for stage, fields in stages.items():
        manifest["spec"].setdefault(stage, {}).update(fields)
    return manifest


def variables(count: int) -> list[dict[str, str]]:
    """Return environment variables with values of the greatest length."""
    return [{"name": f"A{number}", "value": "x" * 4096} for number in range(count)]


def test_crd_is_established_with_a_structural_schema(namespace: KubeNamespace):
    conditions = crd_conditions(namespace.kube, CRD)
    assert conditions["Established"] == "True"
    assert conditions["NamesAccepted"] == "True"
    assert conditions.get("NonStructuralSchema", "False") == "False"


@pytest.mark.parametrize("name", ["post-sync-hook", "template-with-trigger"])
def test_api_server_accepts_pipelines_of_argo_cds_examples(
    namespace: KubeNamespace, name: str
):
    """A hook is a pipeline; a template is a pipeline in a ConfigMap."""
    [pipeline] = pipelines(ARGOCD / f"{name}.yaml")
    answer = namespace.run(
        "create",
        "--dry-run=server",
        "--validate=strict",
        "-f",
        "-",
        "-o",
        "json",
        given=json.dumps(pipeline),
    )
    assert json.loads(answer)["metadata"]["name"].startswith(
        pipeline["metadata"]["generateName"]
    )


def pipelines(file: Path) -> Iterator[dict]:
    for manifest in yaml.safe_load_all(file.read_text()):
        if manifest["kind"] == "ConfigMap":
            yield yaml.safe_load(manifest["data"]["pipeline.yaml"])
        elif manifest["kind"] == "FineTunePipeline":
            yield manifest


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.parent.name)
def test_api_server_accepts_examples(namespace: KubeNamespace, file: Path):
    answer = namespace.run(
        "create", "--dry-run=server", "--validate=strict", "-f", str(file), "-o", "json"
    )
    assert (
        json.loads(answer)["spec"]["model"]
        == yaml.safe_load(file.read_text())["spec"]["model"]
    )


def test_api_server_accepts_texts_up_to_the_limit(namespace: KubeNamespace):
    texts = {"env": variables(8), "command": ["x" * 4000] * 4, "args": ["x" * 4000] * 4}
    namespace.create(manifest_with("long", train={"pod": texts}))
    assert len(namespace.get("ft", "long")["spec"]["train"]["pod"]["args"]) == 4


def test_api_server_sets_defaults_of_the_demo(namespace: KubeNamespace):
    namespace.create(manifest_with("defaults"))
    spec = namespace.get("ft", "defaults")["spec"]
    assert spec["train"]["lora"]["targetModules"] == ["all-linear"]
    assert (spec["train"]["maxFailures"], spec["train"]["maxInterruptions"]) == (3, 20)


def test_kubectl_explain_shows_type_and_description(namespace: KubeNamespace):
    output = namespace.run("explain", "ft.spec.train.lora.rank")
    assert "rank" in output.lower()
    assert "<integer>" in output
    assert len(output.split("DESCRIPTION:")[1].strip()) > 20


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
                "push": {"targets": [{"uri": "pvc://a/b", "format": "Adapter"}]},
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
            "uri: is needed by revision, format and columns",
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


def test_strict_validation_names_an_unknown_field(namespace: KubeNamespace):
    with pytest.raises(TimedOut, match=r'unknown field "spec\.train\.lora\.rnak"'):
        namespace.run(
            "create",
            "--validate=strict",
            "-f",
            "-",
            given=json.dumps(manifest_with("typo", train={"lora": {"rnak": 8}})),
        )


def test_status_is_written_only_through_its_subresource(namespace: KubeNamespace):
    namespace.create(manifest_with("subresource") | {"status": {"phase": "Succeeded"}})
    assert "phase" not in namespace.get("ft", "subresource").get("status", {})
    namespace.run(
        "patch",
        "ft",
        "subresource",
        "--subresource=status",
        "--type=merge",
        "-p",
        '{"status":{"phase":"Running"}}',
    )
    assert namespace.get("ft", "subresource")["status"]["phase"] == "Running"
    columns = namespace.run("get", "ft", "subresource").splitlines()
    assert columns[0].split()[:2] == ["NAME", "PHASE"]
    assert "Running" in columns[1]


def test_status_accepts_reason_and_state_of_another_version(namespace: KubeNamespace):
    """After a rollback of the CRD, the older operator writes them back as it has read them."""
    namespace.create(manifest_with("rollback"))
    newer = {
        "status": {
            "stages": [{"name": "train", "state": "Dreaming", "reason": "NodeDrained"}]
        }
    }
    namespace.run(
        "patch",
        "ft",
        "rollback",
        "--subresource=status",
        "--type=merge",
        "-p",
        json.dumps(newer),
    )
    assert (
        namespace.get("ft", "rollback")["status"]["stages"] == newer["status"]["stages"]
    )


def test_status_stores_the_largest_loss_curve(namespace: KubeNamespace):
    validations = tuple(
        ValidationPoint(step=step, loss=2.3456) for step in range(1, 66)
    )
    curve = LossCurve(
        every_steps=10**9,
        step=64 * 10**9,
        losses=(1.2345, *[1e15] * 63),
        validations=validations,
    )
    written = {
        "stages": [
            {"name": "train", "lossCurve": curve.model_dump(mode="json", by_alias=True)}
        ]
    }
    namespace.create(manifest_with("curve"))
    namespace.run(
        "patch",
        "ft",
        "curve",
        "--subresource=status",
        "--type=merge",
        "-p",
        json.dumps({"status": written}),
    )
    [stage] = namespace.get("ft", "curve")["status"]["stages"]
    assert LossCurve.model_validate(stage["lossCurve"]) == curve


def test_pipeline_is_listed_by_short_name_and_under_all(namespace: KubeNamespace):
    namespace.create(manifest_with("found"))
    assert "found" in namespace.run("get", "ft")
    assert "finetunepipeline.finetune.dev/found" in namespace.run("get", "all")
