"""Mistakes in data sets, in gates and in tolerations: one error for each, or a note, or none."""

from pathlib import Path

import pytest

from finetune_cli.manifest.manifest import read_text

HEAD = """\
apiVersion: finetune.dev/v1alpha1
kind: FineTunePipeline
metadata: {name: demo}
spec:
  model: {uri: base}
"""
DATA = "  datasets: [{uri: data.jsonl}]\n"


def errors_of(body: str) -> list[tuple[str, str]]:
    """Return field and message of each error."""
    result = read_text(Path("p.yaml"), HEAD + body)
    return [(error.path, error.message) for error in result.diagnostics]


def notes_of(body: str) -> list[tuple[str, str]]:
    result = read_text(Path("p.yaml"), HEAD + DATA + body)
    assert result.diagnostics == []
    return [(note.path, note.message) for note in result.warnings]


@pytest.mark.parametrize(
    ("split", "fix"),
    [
        ("train[:10%]", "write split: train and weight: 0.1, for a random sample of that size"),
        ("train[20%:50%]", "write split: train and weight: 0.3, for a random sample of that size"),
        ("train[:500]", "write train, and weight for a random sample: a part of a split is not read"),
        ("train[-100:]", "write train, and weight for a random sample: a part of a split is not read"),
        ("train+validation", "add a data set for each: split: train, split: validation"),
    ],
)  # fmt: skip
def test_part_of_a_split_is_refused_with_what_to_write(split, fix):
    [(path, message)] = errors_of(
        f'  datasets: [{{uri: "hf://org/name", split: "{split}"}}]\n'
    )
    assert path == "spec.datasets[0].split"
    assert message.endswith(fix), message


def test_part_of_a_split_to_validate_with_has_no_weight():
    body = DATA + '  validation: {uri: "hf://org/name", split: "test[:10%]"}\n'
    [(path, message)] = errors_of(body)
    assert path == "spec.validation.split"
    assert message.endswith("write test: a part of a split is not read"), message


@pytest.mark.parametrize(
    "fields",
    ["split: test", "config: en", "revision: abc", "columns: {text: body}", "fraction: 0.1, split: test",
     "format: CSV", "split: test, config: en"],
)  # fmt: skip
def test_validation_without_its_uri_has_one_error(fields):
    [(path, message)] = errors_of(DATA + f"  validation: {{{fields}}}\n")
    assert path == "spec.validation.uri"
    assert (
        message
        == "is needed by revision, config, split, format and columns: add uri, or remove them"
    )


@pytest.mark.parametrize("fields", ["", "fraction: 0.1, uri: a.jsonl"])
def test_validation_needs_a_fraction_or_a_uri(fields):
    [(path, message)] = errors_of(DATA + f"  validation: {{{fields}}}\n")
    assert path == "spec.validation.fraction"
    assert message.startswith("set fraction or uri, and not both")


def test_split_of_a_folder_to_validate_with_is_refused():
    [(path, _)] = errors_of(DATA + "  validation: {uri: a.jsonl, split: test}\n")
    assert path == "spec.validation.config"


@pytest.mark.parametrize(
    ("columns", "hint"),
    [
        ("{conversations: chat}", "it is called messages here"),
        ("{conversation: chat}", "it is called messages here"),
        ("{question: q}", "it is called instruction here"),
        ("{response: r}", "it is called output, or beside prompt completion, here"),
        ("{functions: f}", "it is called tools here"),
    ],
)
def test_field_of_columns_under_another_name_is_named(columns, hint):
    [(_, message)] = errors_of(
        f"  datasets: [{{uri: data.jsonl, columns: {columns}}}]\n"
    )
    assert message == f"unknown key; {hint}"


def gate(metric: str, operator: str) -> str:
    return (
        f"  evaluate: {{tasks: [{{name: wikitext}}], gates: "
        f"[{{task: wikitext, metric: {metric}, operator: {operator}, value: 0.5}}]}}\n"
    )


@pytest.mark.parametrize(
    ("metric", "operator", "better", "fix"),
    [
        ("word_perplexity", "GreaterThan", "lower", "LessThan"),
        ('"bits_per_byte,none"', "GreaterThanOrEqual", "lower", "LessThan"),
        ("validation_loss", "GreaterThan", "lower", "LessThan"),
        ("acc", "LessThan", "higher", "GreaterThan"),
        ("f1", "LessThanOrEqual", "higher", "GreaterThan"),
    ],
)
def test_gate_that_a_worse_model_passes_is_noted(metric, operator, better, fix):
    [(path, message)] = notes_of(gate(metric, operator))
    assert path == "spec.evaluate.gates[0].operator"
    assert f"a {better} number is better" in message
    assert message.endswith(f"set operator to {fix}, unless you mean it")


@pytest.mark.parametrize(
    ("metric", "operator"),
    [
        ("word_perplexity", "LessThan"),
        ("acc", "GreaterThan"),
        ("my_metric", "GreaterThan"),
    ],
)
def test_gate_in_the_right_direction_has_no_note(metric, operator):
    assert notes_of(gate(metric, operator)) == []


@pytest.mark.parametrize(
    "toleration",
    [
        '{key: a, operator: "", value: b}',
        '{key: a, effect: ""}',
        '{operator: Exists, effect: "", key: ""}',
    ],
)
def test_empty_texts_of_a_toleration_are_accepted(toleration):
    assert (
        errors_of(DATA + f"  train: {{pod: {{tolerations: [{toleration}]}}}}\n") == []
    )
