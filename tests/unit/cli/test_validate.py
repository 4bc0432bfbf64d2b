import json
from pathlib import Path

import pytest
import yaml

from finetune_cli.__main__ import main
from finetune_cli.diagnostics import InvalidManifest
from finetune_cli.manifest.manifest import read, read_all
from finetune_cli.manifest.messages import PATTERNS
from finetune_operator.api.stages.base import GatedSpec
from finetune_operator.crd import generate
from finetune_trainer.contract import uris

ROOT = Path(__file__).parents[3]
MINIMAL = """\
apiVersion: finetune.dev/v1alpha1
kind: FineTunePipeline
metadata:
  name: minimal
spec:
  model: {uri: base}
  datasets: [{uri: data.jsonl}]
"""


@pytest.fixture
def diagnose(tmp_path, monkeypatch):
    """A function that returns the diagnostics of a manifest's text, without the file's name."""
    monkeypatch.chdir(tmp_path)

    def diagnose(text):
        file = Path("pipeline.yaml")
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return [
            str(diagnostic).removeprefix("pipeline.yaml:")
            for diagnostic in read_all(file).diagnostics
        ]

    return diagnose


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
    formats = "Auto, JSONLines, JSON, CSV, Parquet"
    assert diagnose(text) == [
        "1: apiVersion: must be finetune.dev/v1alpha1 (got 'finetune.dev/v1')",
        "2: kind: must be FineTunePipeline (got 'FineTunePipline')",
        "4: metadata.nmae: unknown key; did you mean name?",
        f"6: spec.model.uri: {uris.description_of(*uris.MODEL)} (got 'ftp://bucket/model')",
        f"8: spec.datasets[0].format: must be one of {formats} (got 'JSONlines'); did you mean JSONLines?",
        "8: spec.datasets[0].uri: is required",
        "10: spec.train.lora.rank: must be at least 1 (got 0)",
        "11: spec.train.optmizer: unknown key; did you mean optimizer?",
        "11: spec.train.optmizer.learningRate: must be at most 1 (got 2)",
        "13: spec.train.maxSteps: must be an integer (got 'ten')",
        "13: spec.train.maxSteps: set epochs or maxSteps, not both",
        "14: spec.train.compile: must be true or false (got 'yes')",
        '17: spec.train.pod.env[0].value: must be a string (got 8080); put it in quotes: "8080"',
        "18: spec.push.targets: is required",
        f"19: spec.push.placement.capacity: {GatedSpec.rules[0].message}",
        "20: spec.push.when: GatesPassed needs a gate: add evaluate.gates, or set push.when to Always",
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("train: {lora: {rank: 8.5}}", "spec.train.lora.rank: must be an integer (got 8.5)"),
        ("train: {lora: {rank: '8'}}", "spec.train.lora.rank: must be an integer (got '8')"),
        ("train: {lora: {rank: true}}", "spec.train.lora.rank: must be an integer (got true)"),
        ("train: {lora: {alpha: 0}}", "spec.train.lora.alpha: must be more than 0 (got 0)"),
        ("train: {lora: {dropout: 1}}", "spec.train.lora.dropout: must be less than 1 (got 1)"),
        (
            "train: {lora: {dropout: .nan}}",
            "spec.train.lora.dropout: must be a finite number (got '.nan')",
        ),
        ("train: {lora: 16}", "spec.train.lora: must be a mapping (got 16)"),
        ("train: {lora: [rank]}", "spec.train.lora: must be a mapping (got a list)"),
        (
            "train: {lora: {targetModules: q_proj}}",
            "spec.train.lora.targetModules: must be a list (got 'q_proj')",
        ),
        (
            "train: {lora: {targetModules: []}}",
            "spec.train.lora.targetModules: must have at least 1 entry (got a list)",
        ),
        (
            "train: {pod: {command: [x], args: [a, no]}}",
            'spec.train.pod.args[1]: must be a string, but unquoted no means false; write "no"',
        ),
        (
            "train: {pod: {command: [x], args: [a, y]}}",
            'spec.train.pod.args[1]: must be a string, but unquoted y means true; write "y"',
        ),
        (
            "train: {pod: {command: [x], args: [a, 1e5]}}",
            'spec.train.pod.args[1]: must be a string (got 100000.0); put it in quotes: "1e5"',
        ),
        (
            "train: {pod: {command: [x], args: [a, {b: c}]}}",
            "spec.train.pod.args[1]: must be a string (got a mapping)",
        ),
        ("train: {rank: 8}", "spec.train.rank: unknown key; did you mean lora.rank?"),
        ("train: {max_steps: 8}", "spec.train.max_steps: unknown key; did you mean maxSteps?"),
        ("train: {epochs: 10000000}", "spec.train.epochs: must be at most 10,000 (got 10000000)"),
        ("train:", "spec.train: is empty; set a value or remove the key"),
        (
            "train: {pod: {command: [x, ~]}}",
            "spec.train.pod.command[1]: is empty; set a value or remove the key",
        ),
        (
            "train: {pod: {env: [{name: A-B, value: x}]}}",
            "spec.train.pod.env[0].name: must consist of letters, digits and _, with no digit first (got 'A-B')",
        ),
        (
            "train: {pod: {nodeSelector: {'a/b': c d}}}",
            "spec.train.pod.nodeSelector[a/b]: must be a label value: letters, digits, _, . and -, with",
        ),
        (
            "train: {placement: {capacity: Spto}}",
            "spec.train.placement.capacity: must be one of Auto, OnDemand, Spot (got 'Spto'); did you mean Spot?",
        ),
        ("seed: 99999999999", "spec.seed: must be at most 2,147,483,647 (got 99999999999)"),
        ("seed: 0x" + "f" * 99, "spec.seed: must fit into a signed 64-bit integer (got '0xfff"),
        ("evaluate: {tasks: []}", "spec.evaluate.tasks: must have at least 1 entry (got a list)"),
        (
            "evaluate: {tasks: [{name: a}], gates: [{task: b, value: 0.5}]}",
            "spec.evaluate.gates: every task must be a name in evaluate.tasks",
        ),
        (
            "deploy: {when: Always}",
            "spec.deploy: needs a published model: add an entry with format Merged to push.targets",
        ),
        (
            "whenExpired: Delete",
            "spec.whenExpired: has no effect without a time: add ttlSecondsAfterFinished, or remove whenExpired",
        ),
        (
            "zzzz: 1",
            "spec.zzzz: unknown key; known keys are model, datasets, validation, podDefaults,",
        ),
        (
            "seed: &s 1\n  train: {pod: {image: *s}}",
            'spec.train.pod.image: must be a string (got 1); put it in quotes: "1"',
        ),
        (
            "seed: !!python/object:os.system 1",
            "spec.seed: has a tag (!…), which is not supported; remove it",
        ),
        (
            'train: {pod: {image: "\\ud800"}}',
            "spec.train.pod.image: holds half of a UTF-16 surrogate pair, which is not a character",
        ),
    ],
)
def test_wrong_value_is_reported_with_line_and_path(line, message, diagnose):
    diagnostics = diagnose(f"{MINIMAL}  {line}\n")
    expected_line = 9 if "\n" in line else 8
    assert diagnostics[0].startswith(f"{expected_line}: {message}")
    assert len(diagnostics) == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "My_Model",
            "metadata.name: must consist of lower-case letters, digits, - and ., with a letter or digit at both ends",
        ),
        ("a..b", "metadata.name: must consist of lower-case letters"),
        ("a" * 254, "metadata.name: must have at most 253 characters"),
        ("12", 'metadata.name: must be a string (got 12); put it in quotes: "12"'),
        ("", "metadata.name: is empty; set a value or remove the key"),
    ],
)
def test_name_that_kubernetes_rejects_is_an_error(name, message, diagnose):
    (diagnostic,) = diagnose(MINIMAL.replace("name: minimal", f"name: {name}"))
    assert diagnostic.startswith(f"4: {message}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "1: is empty; `finetune init` writes a manifest to start from"),
        ("# nothing\n---\n", "1: is empty; `finetune init` writes a manifest to start from"),
        ("- a\n", "1: must be a mapping with apiVersion, kind, metadata and spec (got a list)"),
        ("hello", "1: must be a mapping with apiVersion, kind, metadata and spec (got 'hello')"),
        ("a: 1\nb:\n\t- c\n", "3: not YAML: a tab; YAML is indented with spaces only"),
        (
            "a: 1\nb: c: d\n",
            "2: not YAML: a second ': ' in one value; put it in quotes, or fix the indentation",
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
        ("a: &a [*a, *a]", "1: an alias contains itself or is nested more than 64 levels deep"),
        (b"a" * 10_000_000, " is larger than 256 KiB"),
        (
            "apiVersion: v1\nkind: ConfigMap\ndata: {a: b}\n",
            "2: kind: must be FineTunePipeline (got 'ConfigMap')",
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
    levels = (f"a{level}: &a{level} [{','.join([f'*a{level - 1}'] * 9)}]" for level in range(1, 30))
    (diagnostic,) = diagnose("\n".join(["a0: &a0 [x, x]", *levels]))
    assert diagnostic.endswith("has more than 50,000 values with its aliases written out")


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
    assert (spec.seed, spec.train.max_steps, spec.train.optimizer.learning_rate) == (31, 1000, 2e-4)
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
    file.write_text(f"{MINIMAL.replace('uri: base', 'url: base')}---\n{MINIMAL}---\na: [\n")
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
                    {"line": 8, "path": "spec.seed", "message": "must be at least 0 (got -1)"}
                ],
                "notes": [],
            }
        ]
    }


def test_read_returns_name_namespace_annotations_and_spec():
    manifest = read(ROOT / "tests/data/everything.yaml")
    assert (manifest.name, manifest.namespace) == ("everything", "research")
    assert manifest.annotations == {"finetune.dev/retry": "1"}
    assert manifest.spec.train.lora.variant == "RsLoRA"


def test_every_pattern_of_the_schema_has_a_message():
    def patterns(schema):
        match schema:
            case dict():
                if isinstance(schema.get("pattern"), str):
                    yield schema["pattern"]
                for inner in schema.values():
                    yield from patterns(inner)
            case list():
                for inner in schema:
                    yield from patterns(inner)

    found = set(patterns(yaml.safe_load(generate.FILE.read_text())))
    assert found
    assert found <= PATTERNS.keys()


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("datasets: []", "7: spec.datasets: must have at least 1 entry (got a list)"),
        ("datasets: [{uri: hf://org/data, config: en, split: train}]", None),
        (
            "datasets: [{uri: hf://org/data/x.csv, split: train}]",
            "datasets[0].config: config and split belong to a hub",
        ),
        (
            "datasets: [{uri: x}, {uri: pvc://a/x, config: en}]",
            "datasets[1].config: config and split belong to a hub",
        ),
        ("datasets: [{uri: x, columns: {messages: a, tools: b}}]", None),
        ("datasets: [{uri: x, columns: {completion: a}}]", None),
        (
            "datasets: [{uri: x, columns: {prompt: a, text: b}}]",
            "datasets[0].columns: must name fields of one kind",
        ),
        (
            "datasets: [{uri: x, columns: {}}]",
            "datasets[0].columns: must name fields of one kind of record",
        ),
        ("datasets: [{uri: x, weight: 101}]", "datasets[0].weight: must be at most 100 (got 101)"),
        ("validation: {uri: x, columns: {text: a}, format: CSV}", None),
        ("validation: {fraction: 0}", None),
        ("validation: {format: Auto}", "validation.fraction: set fraction or uri, and not both"),
        (
            "validation: {fraction: 0.1, uri: x}",
            "validation.fraction: set fraction or uri, and not both",
        ),
        (
            "validation: {fraction: 0.1, revision: v1}",
            "validation.uri: is needed by revision, format and columns",
        ),
        (
            "validation: {uri: x, split: test}",
            "validation.config: config and split belong to a hub data set",
        ),
    ],
)
def test_contradiction_in_the_data_is_reported(diagnose, data, expected):
    head, _, least = MINIMAL.rpartition("  datasets")
    found = diagnose(
        f"{head}  {data}\n" + ("" if data.startswith("datasets") else f"  datasets{least}")
    )
    assert [expected in line for line in found] == [True] if expected else found == []
