"""The generated CustomResourceDefinition, and that its schema and the models accept the same manifests."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft4Validator
from pydantic import ValidationError
from support.operator.scenario import ALL_STAGES

from finetune_cli.manifest.yaml import reader as yaml_reader
from finetune_operator.api.group import KIND
from finetune_operator.api.spec import STAGES, PipelineSpec
from finetune_operator.api.status import PipelineStatus
from finetune_operator.crd import generate
from finetune_operator.crd.policy import policy
from finetune_operator.crd.structural import UnsupportedSchema

ROOT = Path(__file__).parents[3]
CLIENT_SIDE_APPLY_BYTES = 256 * 1024
"""Limit of an annotation, in which client-side apply stores the whole object."""
ROOM_FOR_FIELDS = 8 * 1024
"""Bytes below the limit for fields to come, such as a field of each stage with its description."""


def manifests():
    files = [*ROOT.glob("examples/**/*.y*ml"), *ROOT.glob("tests/data/*.yaml")]
    for file in files:
        for document in yaml_reader.load(file).documents:
            manifest = document.plain()
            if isinstance(manifest, dict) and manifest.get("kind") == KIND:
                yield pytest.param(manifest, id=f"{file.relative_to(ROOT)}")


def walk(schema, path="$"):
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from walk(inner, f"{path}.{name}")
    for keyword in ("items", "additionalProperties"):
        if keyword in schema:
            yield from walk(schema[keyword], f"{path}.{keyword}")


def strict(schema):
    """Return the schema with unknown keys forbidden, as in strict field validation (kubectl's default)."""
    schema = copy.deepcopy(schema)
    for _, part in list(walk(schema)):
        if "properties" in part and not part.get(
            "x-kubernetes-preserve-unknown-fields"
        ):
            part["additionalProperties"] = False
    return schema


@pytest.fixture(scope="module")
def definition():
    return yaml.safe_load(generate.FILE.read_text())


@pytest.fixture(scope="module")
def version(definition):
    return definition["spec"]["versions"][0]


@pytest.fixture(scope="module")
def schema(version):
    return version["schema"]["openAPIV3Schema"]


@pytest.fixture(scope="module")
def validator(schema):
    """Validates as the API server does."""
    return Draft4Validator(strict(schema))


@pytest.fixture(scope="module")
def everything():
    return yaml_reader.load(ROOT / "tests/data/everything.yaml").documents[0].plain()


def test_committed_files_match_the_models():
    assert generate.FILE.read_text() == generate.text()
    assert generate.main(["--check"]) == 0


def test_check_of_stale_file_names_the_command_to_run(tmp_path, monkeypatch, capsys):
    stale = tmp_path / "crds" / "stale.yaml"
    monkeypatch.setattr(generate, "FILE", stale)
    assert generate.main([]) == 0
    stale.write_text(stale.read_text().replace("maximum: 1024", "maximum: 1025"))
    assert generate.main(["--check"]) == 1
    error = capsys.readouterr().err
    assert "maximum: 1025" in error
    assert "make crds" in error


def test_crd_is_small_enough_for_client_side_apply(definition):
    """The annotation has the object as JSON without blanks."""
    stored = json.dumps(definition, separators=(",", ":"))
    assert len(stored.encode()) < CLIENT_SIDE_APPLY_BYTES - ROOM_FOR_FIELDS


def test_crd_has_short_name_and_category_all(definition):
    names = definition["spec"]["names"]
    assert definition["metadata"]["name"] == "finetunepipelines.finetune.dev"
    assert names["shortNames"] == ["ft"]
    assert names["categories"] == ["all"]


def test_printer_columns_refer_to_status_fields(version):
    assert [column["name"] for column in version["additionalPrinterColumns"] if not column.get("priority")] == [
        "Phase", "Stage", "Progress", "Attempt", "Reason", "Age",
    ]  # fmt: skip
    for column in version["additionalPrinterColumns"]:
        part = {"properties": {"status": generate.status_schema()}}
        for name in re.sub(r"\[.*?\]", "", column["jsonPath"]).strip(".").split("."):
            if name == "metadata":
                break
            part = part["properties"][name]
            part = part.get("items", part)
        else:
            assert part["type"] == column["type"]


def test_every_field_of_the_spec_has_a_description(schema):
    missing = [
        path
        for path, part in walk(schema["properties"]["spec"])
        if "." in path and "description" not in part
    ]
    assert [
        path for path in missing if not path.endswith(("items", "additionalProperties"))
    ] == []


def test_complete_manifest_has_every_field_of_the_spec(schema, everything):
    def missing(part, data, path):
        for name, inner in part.get("properties", {}).items():
            if not isinstance(data, dict) or name not in data:
                yield f"{path}.{name}"
            else:
                yield from missing(inner, data[name], f"{path}.{name}")

    absent = set(missing(schema["properties"]["spec"], everything["spec"], "spec"))
    columns = {path for path in absent if ".columns." in path}  # of one kind of record
    own_claim = {"size", "storageClassName", "accessMode", "whenDeleted"}
    assert absent - columns == {
        "spec.train.epochs",
        "spec.validation.fraction",
        *(f"spec.workspace.{field}" for field in own_claim),
    }  # excluded by maxSteps, uri and existingClaim


def test_schema_has_no_nulls(schema):
    for path, part in walk(schema):
        assert "nullable" not in part, path
        assert part.get("default", 0) is not None, path
        assert "null" not in json.dumps(part.get("default", 0)), path


def test_defaults_of_nested_models_are_in_camel_case(schema):
    train = schema["properties"]["spec"]["properties"]["train"]
    assert train["default"]["optimizer"]["learningRate"] == 2e-4
    assert train["properties"]["lora"]["properties"]["targetModules"]["default"] == [
        "all-linear"
    ]
    assert train["properties"]["checkpoint"]["default"]["everySeconds"] == 180


def test_defaults_are_valid_for_their_schema(schema):
    for path, part in walk(schema):
        if "default" in part:
            assert (
                list(Draft4Validator(strict_part(part)).iter_errors(part["default"]))
                == []
            ), path


def strict_part(part):
    return strict({"properties": {"field": part}})["properties"]["field"]


def test_default_status_is_readable_by_the_model(schema):
    default = schema["properties"]["status"]["default"]
    assert PipelineStatus.model_validate(default).observed_generation == -1


def test_every_stage_is_a_field_of_the_spec(schema):
    assert {stage.name for stage in STAGES} <= schema["properties"]["spec"][
        "properties"
    ].keys()


@pytest.mark.parametrize("manifest", list(manifests()))
def test_project_manifest_is_valid_for_schema_and_model(manifest, validator):
    assert [error.message for error in validator.iter_errors(manifest)] == []
    PipelineSpec.model_validate(manifest["spec"])


def test_long_texts_of_a_stage_are_refused_together():
    """Five stages with 128 variables of 4,096 characters were accepted, and no etcd stores their objects."""
    most = [{"name": f"A{i}", "value": "x" * 4094} for i in range(15)]
    command = [
        "x"
        * (
            65536
            - sum(len(variable["name"]) + len(variable["value"]) for variable in most)
        )
    ]
    pod = {"env": most, "command": command}
    PipelineSpec.model_validate({**ALL_STAGES, "train": {"pod": pod}})
    for more in (
        {"env": [*most, {"name": "B"}]},
        {"args": ["x"]},
        {"command": [*command, "x"]},
    ):
        with pytest.raises(
            ValidationError,
            match=r"env, command, args have more than 65536 characters .* Secret",
        ):
            PipelineSpec.model_validate({**ALL_STAGES, "train": {"pod": pod | more}})


def test_long_texts_of_the_defaults_are_refused_together():
    full = [{"name": f"A{i:02}", "value": "x" * 4093} for i in range(16)]
    PipelineSpec.model_validate({**ALL_STAGES, "podDefaults": {"env": full}})
    with pytest.raises(
        ValidationError, match=r"env have more than 65536 characters .* Secret"
    ):
        PipelineSpec.model_validate(
            {**ALL_STAGES, "podDefaults": {"env": [*full, {"name": "B"}]}}
        )


def test_large_affinity_is_refused():
    affinity = {"nodeAffinity": ["x" * 100 for _ in range(200)]}
    with pytest.raises(ValidationError, match="at most 16,384 characters"):
        PipelineSpec.model_validate(
            {**ALL_STAGES, "train": {"pod": {"affinity": affinity}}}
        )


INVALID: list[tuple[str, Any]] = [
    ("model.uri", "s3 bucket"),
    ("model.uri", ""),
    ("model", None),
    ("datasets", []),
    ("datasets", [{"uri": "x"}] * 65),
    ("datasets", [{"uri": "x", "format": "jsnol"}]),
    ("datasets", [{"uri": "x", "weight": 0}]),
    ("datasets", [{"uri": "x", "columns": {"label": "y"}}]),
    ("datasets", [{"url": "x"}]),
    ("validation.fraction", 0.6),
    ("seed", -1),
    ("seed", "7"),
    ("seed", 7.5),
    ("workspace.size", "many"),
    ("workspace.existingClaim", "My Claim"),
    ("prepare.contextLength", 0),
    ("prepare.chatTemplate", ""),
    ("prepare.chatTemplate", "no template, and no URI"),
    ("prepare.chatTemplate", "s3://bucket/template.jinja"),
    ("prepare.chatTemplate", "{{ x }}" * 4096),
    ("prepare.chatTemplateArguments", {"effort": ["low"]}),
    ("prepare.chatTemplateArguments", {"effort": []}),
    ("prepare.chatTemplateArguments", {"effort": {}}),
    ("prepare.chatTemplateArguments", {"effort": {"level": 1}}),
    ("prepare.chatTemplateArguments", {"effort": "x" * 1025}),
    ("prepare.chatTemplateArguments", {"effort": 10**16}),
    ("prepare.chatTemplateArguments", {f"a{i}": True for i in range(17)}),
    ("workspace.size", "10"),
    ("prepare.pod.image", ""),
    ("prepare.pod.command", "python"),
    ("prepare.pod.command", ["x"] * 65),
    ("prepare.pod.args", [1]),
    ("prepare.pod.imagePullPolicy", "Sometimes"),
    ("prepare.pod.imagePullSecrets", ["registry"]),
    ("prepare.pod.resources.requests.cpu", 2.5),
    ("prepare.pod.resources.limits.memory", "many"),
    ("prepare.pod.resources.claims", []),
    ("prepare.pod.env", {"A": "1"}),
    ("prepare.pod.env", [{"name": "A", "value": 1}]),
    ("prepare.pod.env", [{"value": "1"}]),
    (
        "prepare.pod.env",
        [{"name": "A", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}}],
    ),
    (
        "prepare.pod.env",
        [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "keys"}}}],
    ),
    ("prepare.pod.env", [{"name": f"A{i}", "value": "x"} for i in range(129)]),
    ("prepare.pod.envFrom", [{"secretRef": "keys"}]),
    ("prepare.pod.envFrom", [{"secretRef": {"name": "keys"}}] * 17),
    ("prepare.pod.labels", {"a": "b c"}),
    ("prepare.pod.annotations", {"a": "x" * 1025}),
    ("prepare.pod.initContainers", []),
    ("prepare.pod.securityContext", {}),
    ("prepare.placement.capacity", "cheap"),
    ("prepare.placement.capacity", "spot"),
    ("prepare.pod.nodeSelector", {"a": "b c"}),
    ("prepare.pod.tolerations", [{"key": "x", "operator": "Is"}]),
    ("prepare.resources", {}),
    ("podDefaults.image", "mine:1"),
    ("podDefaults.command", ["x"]),
    ("podDefaults.args", ["x"]),
    ("train.lora.rank", 0),
    ("train.lora.alpha", 0),
    ("train.lora.dropout", 1),
    ("train.lora.targetModules", []),
    ("train.lora.targetModules", ["a b"]),
    ("train.compile", "yes"),
    ("train.dtype", "FP8"),
    ("train.objective", "PPO"),
    ("train.method", "lora"),
    ("train.optimizer.learningRate", 0),
    ("train.checkpoint.everySteps", True),
    ("train.earlyStopping", []),
    ("evaluate.tasks", {}),
    ("evaluate.tasks", []),
    ("evaluate.tasks", [{"file": "tasks/ours.yaml"}]),
    ("evaluate.tasks", [{"name": "ours", "file": "a b"}]),
    ("evaluate.gates", [{"task": "ours"}]),
    ("evaluate.gates", [{"value": 1}]),
    ("evaluate.gates", [{"task": "ours", "value": 1, "operator": "Above"}]),
    ("evaluate.gates", [{"task": "ours", "value": 1, "against": "base"}]),
    ("push.targets", []),
    ("push.targets", [{"uri": "hf://org"}]),
    ("push.targets", [{"uri": "pvc://models/a", "format": "GGUF"}]),
    ("deploy.engine", "triton"),
    ("deploy.smokeTest.prompt", "x" * 4097),
    ("maxRuntimeSeconds", 0),
]


@pytest.mark.parametrize(("path", "value"), INVALID, ids=lambda part: str(part)[:40])
def test_invalid_value_is_rejected_by_schema_and_model(
    path, value, everything, validator
):
    manifest = copy.deepcopy(everything)
    target = manifest["spec"]
    *parents, last = path.split(".")
    for name in parents:
        target = target.setdefault(name, {})
    target[last] = value
    assert list(validator.iter_errors(manifest)) != []
    with pytest.raises(ValidationError):
        PipelineSpec.model_validate_json(json.dumps(manifest["spec"]), strict=True)


def test_policy_has_every_rule_of_the_spec():
    spec = generate.spec_schema()
    expected = {
        (path.removeprefix("$."), rule["message"])
        for path, part in walk(spec, "spec")
        for rule in part.get("x-kubernetes-validations", ())
    }
    rules, binding = generate.rules_policy()
    text = "\n".join(
        variable["expression"] for variable in rules["spec"]["variables"]
    ).replace("\\'", "'")
    # `items` stands for the index, which the expression adds.
    missing = [
        (path, message)
        for path, message in expected
        if f"{path.rpartition('items')[2].lstrip('.')}: {message}'" not in text
    ]
    assert missing == []
    assert len(expected) > 150
    assert text.count("? '' :") == sum(
        len(part.get("x-kubernetes-validations", ())) for _, part in walk(spec)
    )
    assert binding["spec"]["policyName"] == rules["metadata"]["name"]


def test_rule_in_a_list_of_lists_cannot_be_a_policy():
    rule = {"x-kubernetes-validations": [{"rule": "self.a", "message": "no"}]}
    inner = {"type": "array", "items": rule}
    with pytest.raises(UnsupportedSchema, match="list of lists"):
        policy({"properties": {"a": {"type": "array", "items": inner}}})


def test_lists_and_objects_of_the_status_have_no_schema(schema):
    """Each schema below it would cost the API server time at every write of a status."""
    status = schema["properties"]["status"]["properties"]
    assert status.keys() == generate.status_schema()["properties"].keys()
    assert status["stages"]["items"].keys() == {
        "type",
        "x-kubernetes-preserve-unknown-fields",
    }
    assert "attempts" in status["stages"]["description"]
