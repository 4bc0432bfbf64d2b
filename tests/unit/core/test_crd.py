import copy
import json
import re
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft4Validator
from pydantic import ValidationError

from finetune_cli.manifest import yaml_reader as documents
from finetune_operator.api.group import KIND
from finetune_operator.api.spec import STAGES, PipelineSpec
from finetune_operator.api.status import PipelineStatus
from finetune_operator.crd import generate as crdgen

ROOT = Path(__file__).parents[3]
LARGEST_FOR_CLIENT_SIDE_APPLY = 256 * 1024


def manifests():
    files = [*ROOT.glob("examples/**/*.y*ml"), *ROOT.glob("tests/data/*.yaml"), *ROOT.glob("operator/**/template.yaml")]
    for file in files:
        for document in documents.load(file).documents:
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
    """What the server does to unknown keys under strict field validation, which is kubectl's default."""
    schema = copy.deepcopy(schema)
    for _, part in list(walk(schema)):
        if "properties" in part and not part.get("x-kubernetes-preserve-unknown-fields"):
            part["additionalProperties"] = False
    return schema


@pytest.fixture(scope="module")
def definition():
    return yaml.safe_load(crdgen.FILE.read_text())


@pytest.fixture(scope="module")
def version(definition):
    return definition["spec"]["versions"][0]


@pytest.fixture(scope="module")
def schema(version):
    return version["schema"]["openAPIV3Schema"]


@pytest.fixture(scope="module")
def server(schema):
    return Draft4Validator(strict(schema))


@pytest.fixture(scope="module")
def everything():
    return documents.load(ROOT / "tests/data/everything.yaml").documents[0].plain()


def test_the_committed_file_is_what_the_models_say():
    assert crdgen.FILE.read_text() == crdgen.text()
    assert crdgen.main(["--check"]) == 0


def test_a_file_that_is_out_of_date_is_reported_with_the_command_that_mends_it(tmp_path, monkeypatch, capsys):
    stale = tmp_path / "crds" / "stale.yaml"
    monkeypatch.setattr(crdgen, "FILE", stale)
    assert crdgen.main([]) == 0
    stale.write_text(stale.read_text().replace("maximum: 1024", "maximum: 1025"))
    assert crdgen.main(["--check"]) == 1
    said = capsys.readouterr().err
    assert "maximum: 1025" in said
    assert "make crds" in said


def test_it_is_small_enough_for_client_side_apply():
    assert crdgen.FILE.stat().st_size < LARGEST_FOR_CLIENT_SIDE_APPLY


def test_kubectl_knows_it_by_its_short_name_and_in_all(definition):
    names = definition["spec"]["names"]
    assert definition["metadata"]["name"] == "finetunepipelines.finetune.dev"
    assert (names["shortNames"], names["categories"]) == (["ftp"], ["all"])


def test_columns_show_fields_that_the_status_has(version, schema):
    assert [column["name"] for column in version["additionalPrinterColumns"] if not column.get("priority")] == [
        "Phase", "Stage", "Progress", "Attempt", "Age",
    ]  # fmt: skip
    for column in version["additionalPrinterColumns"]:
        place = schema
        for step in re.sub(r"\[.*?\)\]", "", column["jsonPath"]).strip(".").split("."):
            if step == "creationTimestamp":
                break
            place = place["properties"][step]
            place = place.get("items", place)
        else:
            assert place["type"] == column["type"]


def test_every_field_of_the_spec_is_explained(schema):
    silent = [path for path, part in walk(schema["properties"]["spec"]) if "." in path and "description" not in part]
    assert [path for path in silent if not path.endswith(("items", "additionalProperties"))] == []


def test_the_test_manifest_has_every_field_of_the_spec(schema, everything):
    def missing(part, data, path):
        for name, inner in part.get("properties", {}).items():
            if not isinstance(data, dict) or name not in data:
                yield f"{path}.{name}"
            else:
                yield from missing(inner, data[name], f"{path}.{name}")

    left_out = set(missing(schema["properties"]["spec"], everything["spec"], "spec"))
    shared = {path for path in left_out if re.search(r"\.(resources|placement|retries)\.", path)}
    assert left_out - shared == {"spec.train.epochs"}


def test_what_is_optional_is_absent_and_never_null(schema):
    for path, part in walk(schema):
        assert "nullable" not in part, path
        assert part.get("default", 0) is not None, path
        assert "null" not in json.dumps(part.get("default", 0)), path


def test_defaults_of_nested_models_are_written_as_users_write_them(schema):
    train = schema["properties"]["spec"]["properties"]["train"]
    assert train["default"]["lora"]["targetModules"] == ["all-linear"]
    assert train["properties"]["lora"]["default"]["rank"] == 16


def test_defaults_are_valid_where_they_stand(schema):
    for path, part in walk(schema):
        if "default" in part:
            assert list(Draft4Validator(strict_part(part)).iter_errors(part["default"])) == [], path


def strict_part(part):
    return strict({"properties": {"it": part}})["properties"]["it"]


def test_status_before_the_operators_first_look_is_one_that_the_model_reads(schema):
    default = schema["properties"]["status"]["default"]
    assert PipelineStatus.model_validate(default).observed_generation == -1


def test_every_stage_can_be_asked_for(schema):
    assert {stage.name for stage in STAGES} <= schema["properties"]["spec"]["properties"].keys()


@pytest.mark.parametrize("manifest", list(manifests()))
def test_every_manifest_of_the_project_is_valid_for_the_server_and_for_the_operator(manifest, server):
    assert [error.message for error in server.iter_errors(manifest)] == []
    PipelineSpec.model_validate(manifest["spec"])


BROKEN = [
    ("model.uri", "s3 bucket"),
    ("model.uri", ""),
    ("model", None),
    ("dataset.format", "jsnol"),
    ("dataset.validationFraction", 0.6),
    ("dataset.url", "x"),
    ("seed", -1),
    ("seed", "7"),
    ("seed", 7.5),
    ("workspace.size", "many"),
    ("workspace.existingClaim", "My Claim"),
    ("prepare.contextLength", 0),
    ("prepare.image", ""),
    ("prepare.command", "python"),
    ("prepare.command", ["x"] * 65),
    ("prepare.args", [1]),
    ("prepare.resources.cpu", 2.5),
    ("prepare.resources.gpu.count", 17),
    ("prepare.env", {"A": 1}),
    ("prepare.env", {f"A{i}": "x" for i in range(129)}),
    ("prepare.placement.capacity", "cheap"),
    ("prepare.placement.nodeSelector", {"a": "b c"}),
    ("prepare.placement.tolerations", [{"value": "x"}]),
    ("prepare.placement.tolerations", [{"key": "x", "operator": "Is"}]),
    ("train.lora.rank", 0),
    ("train.lora.alpha", 0),
    ("train.lora.dropout", 1),
    ("train.lora.targetModules", []),
    ("train.lora.targetModules", ["a b"]),
    ("train.compile", "yes"),
    ("train.precision", "fp8"),
    ("train.optimizer.learningRate", 0),
    ("train.checkpoint.everySteps", True),
    ("train.earlyStopping", []),
    ("evaluate.tasks", {}),
    ("evaluate.tasks.ours", {"file": "a b"}),
    ("evaluate.gate", {"task": "ours"}),
    ("push.target", "hf://org/name"),
    ("deploy.engine", "triton"),
    ("deploy.prompt", "x" * 4097),
    ("activeDeadlineSeconds", 0),
]


@pytest.mark.parametrize(("path", "value"), BROKEN, ids=lambda part: str(part)[:40])
def test_a_broken_value_is_refused_by_the_server_and_by_the_operator(path, value, everything, server):
    manifest = copy.deepcopy(everything)
    place = manifest["spec"]
    *parents, last = path.split(".")
    for step in parents:
        place = place.setdefault(step, {})
    place[last] = value
    assert list(server.iter_errors(manifest)) != []
    with pytest.raises(ValidationError):
        PipelineSpec.model_validate_json(json.dumps(manifest["spec"]), strict=True)
