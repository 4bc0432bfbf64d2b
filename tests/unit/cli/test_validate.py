"""The command validate, and how a file becomes documents."""

import json
from pathlib import Path

import pytest
from support.cli.manifest import MINIMAL

from finetune_cli.__main__ import main
from finetune_cli.diagnostics import InvalidManifest
from finetune_cli.manifest.manifest import read, read_all
from finetune_operator.api.stages.base import GatedSpec
from finetune_trainer.contract import uris

ROOT = Path(__file__).parents[3]


def test_valid_manifest_is_reported_and_exits_with_0(tmp_path, capsys):
    file = tmp_path / "pipeline.yaml"
    file.write_text(MINIMAL)
    assert main(["validate", str(file)]) == 0
    assert capsys.readouterr().out == f"{file}: valid\n"


def test_all_errors_of_a_file_are_reported_in_line_order(diagnose):
    text = """\
apiVersion: finetune.dev/v1
kind: FineTunePipline
metadata:
  nmae: x
spec:
  model: {uri: "ftp://bucket/model"}
  datasets:
  - format: JSONlines
  train:
    lora: {rank: 0}
    optmizer: {learningRate: 2}
    epochs: 1
    maxSteps: ten
    compile: "yes"
    pod:
      env:
      - {name: PORT, value: 8080}
  push:
    placement: {capacity: Spot}
    when: GatesPassed
"""
    assert diagnose(text) == [
        "1: apiVersion: must be finetune.dev/v1alpha1 (got 'finetune.dev/v1')",
        "2: kind: must be FineTunePipeline (got 'FineTunePipline')",
        "4: metadata.nmae: unknown key; did you mean name?",
        f"6: spec.model.uri: {uris.description_of(*uris.MODEL)} (got 'ftp://bucket/model')",
        "8: spec.datasets[0].format: must be written JSONLines (got 'JSONlines')",
        "8: spec.datasets[0].uri: is required; add uri: …",
        "10: spec.train.lora.rank: must be at least 1 (got 0)",
        "11: spec.train.optmizer: unknown key; did you mean optimizer?",
        "11: spec.train.optmizer.learningRate: must be at most 1 (got 2)",
        "13: spec.train.maxSteps: must be an integer (got 'ten'); write it in digits",
        "14: spec.train.compile: must be true or false (got 'yes'); write true, without quotes",
        '17: spec.train.pod.env[0].value: must be a string (got 8080); put it in quotes: "8080"',
        "18: spec.push.targets: is required; add targets: [{uri: …}]",
        f"19: spec.push.placement.capacity: {GatedSpec.rules[0].message}",
        "20: spec.push.when: GatesPassed needs a gate: add evaluate.gates, or set push.when to Always",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "1: is empty; `finetune init` writes a manifest to start from"),
        (
            "# nothing\n---\n",
            "1: is empty; `finetune init` writes a manifest to start from",
        ),
        (
            "- a\n",
            "1: must be a mapping with apiVersion, kind, metadata and spec (got a list)",
        ),
        (
            "hello",
            "1: must be a mapping with apiVersion, kind, metadata and spec (got 'hello')",
        ),
        ("a: 1\nb:\n\t- c\n", "3: not YAML: a tab; YAML is indented with spaces only"),
        (
            "a: 1\nb: c: d\n",
            "2: not YAML: a second ': ' in one value; put the text in quotes, or fix the indentation",
        ),
        ("a: 1\nb\nc: 1\n", "2: not YAML: a key without ': ' after it"),
        ("a: [1,\nb: 2\n", "1: not YAML: this [ is never closed"),
        ("a: 'x\nb: 2\n", "1: not YAML: this quote is never closed"),
        (
            "a:\n    b: 1\n  c: 2\n",
            "3: not YAML: indented differently from the lines it belongs to",
        ),
        ("a: *b\n", "1: not YAML: *b refers to &b, which is not defined before it"),
        ("a: @b\n", "1: not YAML: a value cannot begin with @; put it in quotes"),
        ('a: "\\q"\n', "1: not YAML: \\q is not an escape in double quotes"),
        (b"a: 1\nb: \xff\n", "2: is not UTF-8: byte 0xff; save the file as UTF-8"),
        (b"a: 1\nb: \x00\n", "2: character U+0000 is not allowed in YAML; remove it"),
        ("[" * 100_000, "1: not YAML: nested more than 64 levels deep"),
        (
            "a: &a [*a, *a]",
            "1: an alias contains itself or is nested more than 64 levels deep",
        ),
        (b"a" * 10_000_000, " is larger than 256 KiB"),
        (
            "apiVersion: v1\nkind: ConfigMap\ndata: {a: b}\n",
            "2: kind: this is no pipeline: it is of the kind 'ConfigMap', and not FineTunePipeline",
        ),
        (
            "apiVersion: apps/v1\nspec: {}\n",
            "1: apiVersion: must be finetune.dev/v1alpha1 (got 'apps/v1')",
        ),
    ],
)
def test_unreadable_file_is_reported_with_the_reason(text, message, diagnose):
    assert diagnose(text)[0].startswith(message)


def test_alias_bomb_is_rejected(diagnose):
    """Each alias refers nine times to the one before: written out, the document would have 9^29 values."""
    levels = (
        f"a{level}: &a{level} [{','.join([f'*a{level - 1}'] * 9)}]"
        for level in range(1, 30)
    )
    (diagnostic,) = diagnose("\n".join(["a0: &a0 [x, x]", *levels]))
    assert diagnostic.endswith(
        "has more than 50,000 values with its aliases written out"
    )


def test_duplicate_key_is_reported_with_both_lines(diagnose):
    assert diagnose(f"{MINIMAL}  seed: 1\n  seed: 2\n") == [
        "9: spec.seed: is given twice, first in line 8; keep one"
    ]


def test_key_that_is_not_a_string_must_be_quoted(diagnose):
    assert diagnose(f"{MINIMAL}  train: {{pod: {{labels: {{on: x}}}}}}\n") == [
        '8: spec.train.pod.labels: a key must be a string; put it in quotes: "on"'
    ]


def test_aliases_and_merge_keys_are_resolved(tmp_path):
    file = tmp_path / "pipeline.yaml"
    file.write_text(
        f"{MINIMAL}  prepare: &common {{pod: {{labels: {{A: a}}}}, maxFailures: 7}}\n"
        "  train: {<<: *common, pod: {labels: {A: b}}, maxSteps: 5}\n"
    )
    spec = read(file).spec
    assert (spec.train.max_failures, spec.train.pod.labels, spec.train.max_steps) == (
        7,
        {"A": "b"},
        5,
    )


def test_numbers_are_parsed_as_in_kubernetes(tmp_path):
    file = tmp_path / "pipeline.yaml"
    file.write_text(
        f"{MINIMAL}  seed: 0x1F\n"
        "  train: {maxSteps: 1_000, optimizer: {learningRate: 2e-4}, pod: {command: [x], args: [1:30]}}\n"
    )
    spec = read(file).spec
    assert (spec.seed, spec.train.max_steps, spec.train.optimizer.learning_rate) == (
        31,
        1000,
        2e-4,
    )
    assert spec.train.pod.args == ("1:30",)


def test_status_is_ignored_with_a_note(tmp_path, capsys):
    file = tmp_path / "pipeline.yaml"
    file.write_text(f"{MINIMAL}status: {{phase: Succeeded}}\n")
    assert main(["validate", str(file)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{file}:8: status: is ignored, as kubectl apply ignores it (note)",
        f"{file}: valid",
    ]


def test_metadata_from_kubectl_get_is_accepted(diagnose):
    metadata = "name: minimal\n  creationTimestamp: null\n  generation: 3\n  uid: x\n  managedFields: [{a: 1}]"
    assert diagnose(MINIMAL.replace("name: minimal", metadata)) == []


def test_validate_accepts_several_pipelines_and_read_only_one(tmp_path, capsys):
    file = tmp_path / "pipeline.yaml"
    file.write_text(f"{MINIMAL}---\n---\n{MINIMAL}")
    assert main(["validate", str(file)]) == 0
    assert capsys.readouterr().out == f"{file}: valid, 2 pipelines\n"
    with pytest.raises(InvalidManifest) as raised:
        read(file)
    assert (
        str(raised.value)
        == f"{file}:10: a second pipeline; this command accepts one pipeline per file"
    )


def test_invalid_document_does_not_affect_the_others(tmp_path):
    file = tmp_path / "pipeline.yaml"
    file.write_text(
        f"{MINIMAL.replace('uri: base', 'url: base')}---\n{MINIMAL}---\na: [\n"
    )
    result = read_all(file)
    assert [manifest.line for manifest in result.manifests] == [9]
    assert [diagnostic.line for diagnostic in result.diagnostics] == [6, 17]


def test_missing_file_and_folder_are_reported(tmp_path, capsys):
    assert main(["validate", str(tmp_path / "none.yaml"), str(tmp_path)]) == 2
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path}/none.yaml: no such file; `finetune init` writes a manifest",
        f"{tmp_path}: is a folder; give the manifest file in it",
    ]


def test_validate_json_lists_diagnostics_per_file(tmp_path, capsys):
    file = tmp_path / "pipeline.yaml"
    file.write_text(f"{MINIMAL}  seed: -1\n")
    assert main(["validate", "--json", str(file)]) == 2
    assert json.loads(capsys.readouterr().out) == {
        "files": [
            {
                "file": str(file),
                "valid": False,
                "pipelines": [],
                "problems": [
                    {
                        "line": 8,
                        "path": "spec.seed",
                        "message": "must be at least 0 (got -1)",
                    }
                ],
                "notes": [],
            }
        ]
    }


def test_read_returns_name_namespace_annotations_and_spec():
    manifest = read(ROOT / "tests/data/everything.yaml")
    assert manifest.name == "everything"
    assert manifest.namespace == "research"
    assert manifest.annotations == {"finetune.dev/retry": "1"}
    assert manifest.spec.train.lora
    assert manifest.spec.train.lora.variant == "RsLoRA"
