"""`--set FIELD=VALUE`: the manifest is read as if the file had the value."""

import pytest
from support.cli.manifest import MINIMAL

from finetune_cli.diagnostics import InvalidManifest, UsageError
from finetune_cli.manifest.manifest import read
from finetune_cli.manifest.overrides import parse_overrides


@pytest.fixture
def read_with(tmp_path):
    """A function that reads the manifest with overrides."""
    file = tmp_path / "pipeline.yaml"
    file.write_text(MINIMAL)
    return lambda *texts: read(file, parse_overrides(texts))


def value_at(model, path):
    for name in path.split("."):
        model = model[int(name)] if name.isdigit() else getattr(model, name)
    return model


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("train.epochs=7", "spec.train.epochs", 7),
        ("spec.train.epochs=7", "spec.train.epochs", 7),
        (
            "train.optimizer.learningRate=1e-4",
            "spec.train.optimizer.learning_rate",
            1e-4,
        ),
        ("train.lora.rank=4", "spec.train.lora.rank", 4),
        ("train.lora={rank: 4, alpha: 8}", "spec.train.lora.alpha", 8),
        ("datasets[0].uri=other.jsonl", "spec.datasets.0.uri", "other.jsonl"),
        ("datasets[1].uri=second.jsonl", "spec.datasets.1.uri", "second.jsonl"),
        (
            "train.lora.targetModules=[q, v]",
            "spec.train.lora.target_modules",
            ("q", "v"),
        ),
        ("metadata.name=other", "name", "other"),
        ("suspend=true", "spec.suspend", True),
    ],
)
def test_field_has_the_given_value(read_with, text, path, value):
    assert value_at(read_with(text), path) == value


def test_key_with_dots_is_given_in_brackets(read_with):
    manifest = read_with("train.pod.nodeSelector[example.com/pool]=a100")
    assert manifest.spec.train.pod.node_selector == {"example.com/pool": "a100"}


def test_last_of_two_values_counts(read_with):
    assert read_with("train.epochs=2", "train.epochs=3").spec.train.epochs == 3


def test_body_that_a_cluster_gets_has_the_value(read_with):
    assert read_with("train.epochs=7").body["spec"]["train"]["epochs"] == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train.epochs", "must be FIELD=VALUE"),
        ("=3", "must be FIELD=VALUE"),
        ("train..epochs=3", "must be FIELD=VALUE"),
        ("datasets[5].uri=a.jsonl", "name one by its index, from [0] to [1]"),
        ("model={uri: [", "--set model={uri: ["),
    ],
)
def test_what_is_no_field_is_refused(read_with, text, message):
    with pytest.raises(UsageError) as refusal:
        read_with(text)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train.epoch=3", "spec.train.epoch: unknown key; did you mean epochs?"),
        ("train.epochs=many", "spec.train.epochs: must be "),
        ("seed=", "spec.seed: is empty; set a value or remove the key"),
        ("datasets.uri=a.jsonl", "write datasets: [{uri: a.jsonl}]"),
    ],
)
def test_wrong_value_has_the_error_of_the_field(read_with, text, message):
    with pytest.raises(InvalidManifest) as refusal:
        read_with(text)
    assert message in str(refusal.value)
