"""Wrong values in a manifest: each is reported with its line, its path and the fix."""

import pytest
import yaml
from support.cli.manifest import MINIMAL

from finetune_cli.manifest.messages.messages import PATTERNS
from finetune_operator.crd import generate


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "train: {lora: {rank: 8.5}}",
            "spec.train.lora.rank: must be an integer (got 8.5)",
        ),
        (
            "train: {lora: {rank: '8'}}",
            "spec.train.lora.rank: must be an integer (got '8')",
        ),
        (
            "train: {lora: {rank: true}}",
            "spec.train.lora.rank: must be an integer (got true)",
        ),
        (
            "train: {lora: {alpha: 0}}",
            "spec.train.lora.alpha: must be more than 0 (got 0)",
        ),
        (
            "train: {lora: {dropout: 1}}",
            "spec.train.lora.dropout: must be less than 1 (got 1)",
        ),
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
        (
            "train: {max_steps: 8}",
            "spec.train.max_steps: unknown key; did you mean maxSteps?",
        ),
        (
            "train: {epochs: 10000000}",
            "spec.train.epochs: must be at most 10,000 (got 10000000)",
        ),
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
        (
            "seed: 99999999999",
            "spec.seed: must be at most 2,147,483,647 (got 99999999999)",
        ),
        (
            "seed: 0x" + "f" * 99,
            "spec.seed: must fit into a signed 64-bit integer (got '0xfff",
        ),
        (
            "evaluate: {tasks: []}",
            "spec.evaluate.tasks: must have at least 1 entry (got a list)",
        ),
        (
            "evaluate: {tasks: [{name: a}], gates: [{task: b, value: 0.5}]}",
            "spec.evaluate.gates[0].task: evaluate.tasks has no task 'b'; the tasks are a",
        ),
        (
            "evaluate: {tasks: [{name: sums}], gates: [{task: sums, value: 1}, {task: sum, value: 0.5}]}",
            "spec.evaluate.gates[1].task: evaluate.tasks has no task 'sum'; did you mean sums?",
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

    in_schema = set(patterns(yaml.safe_load(generate.FILE.read_text())))
    assert in_schema
    assert in_schema <= PATTERNS.keys()


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
        (
            "datasets: [{uri: x, weight: 101}]",
            "datasets[0].weight: must be at most 100 (got 101)",
        ),
        ("validation: {uri: x, columns: {text: a}, format: CSV}", None),
        ("validation: {fraction: 0}", None),
        (
            "validation: {format: Auto}",
            "validation.fraction: set fraction or uri, and not both",
        ),
        (
            "validation: {fraction: 0.1, uri: x}",
            "validation.fraction: set fraction or uri, and not both",
        ),
        (
            "validation: {fraction: 0.1, revision: v1}",
            "validation.uri: is needed by revision, config, split, format and columns",
        ),
        (
            "validation: {uri: x, split: test}",
            "validation.config: config and split belong to a hub data set",
        ),
    ],
)
def test_contradiction_in_the_data_is_reported(diagnose, data, expected):
    head, _, least = MINIMAL.rpartition("  datasets")
    text = f"{head}  {data}\n"
    if not data.startswith("datasets"):
        text += f"  datasets{least}"
    lines = diagnose(text)
    if expected is None:
        assert lines == []
    else:
        assert [expected in line for line in lines] == [True]
