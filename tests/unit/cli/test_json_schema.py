"""The JSON Schema for editors: it accepts every example, and refuses what `finetune validate` refuses by shape."""

import copy
import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from finetune_cli.__main__ import main
from finetune_cli.manifest.json_schema import manifest_schema
from finetune_cli.manifest.yaml import reader as yaml_reader

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = [
    (path, document)
    for path in sorted((ROOT / "examples").rglob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text())
    if document and document.get("kind") == "FineTunePipeline"
]


@pytest.fixture(scope="module")
def validator():
    """The validator of the schema, which is itself valid."""
    schema = manifest_schema()
    jsonschema.Draft7Validator.check_schema(schema)
    return jsonschema.Draft7Validator(schema)


@pytest.mark.parametrize(
    "document",
    [document for _, document in EXAMPLES],
    ids=[str(p.name) for p, _ in EXAMPLES],
)
def test_examples_are_valid(validator, document):
    assert [error.message for error in validator.iter_errors(document)] == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.trian", {}),
        ("spec.train.epoch", 1),
        ("spec.train.optimizer.learningRate", "1e-4"),
        ("spec.train.method", "lora"),
        ("spec.datasets", {"uri": "a.jsonl"}),
        ("kind", "Pod"),
    ],
)
def test_wrong_shape_is_refused(validator, path, value):
    document = copy.deepcopy(EXAMPLES[0][1])
    *parents, last = path.split(".")
    parent = document
    for name in parents:
        parent = parent.setdefault(name, {})
    parent[last] = value
    assert not validator.is_valid(document)


def test_every_field_has_a_description(capsys):
    assert main(["schema"]) == 0
    spec = json.loads(capsys.readouterr().out)["properties"]["spec"]
    missing = [
        name for name, field in spec["properties"].items() if "description" not in field
    ]
    assert missing == []


def test_init_writes_the_schema_that_its_manifest_names(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "made.yaml"]) == 0
    first, *_ = (tmp_path / "made.yaml").read_text().splitlines()
    file = tmp_path / first.partition("$schema=")[2]
    # YAML 1.2, as editors read it: PyYAML takes 2e-4 for a text.
    [document] = yaml_reader.load(tmp_path / "made.yaml").documents
    jsonschema.validate(document.plain(), json.loads(file.read_text()))
    assert "made.yaml: written" in capsys.readouterr().out
