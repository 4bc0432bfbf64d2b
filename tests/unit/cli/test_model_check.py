"""`validate --check` looks at the base model and the recipe; one test starts real processes of the trainer."""

import json
import shutil

import pytest
import yaml

from finetune_cli.__main__ import main

RECORDS = [
    {"prompt": f"What is {number} plus 2?", "completion": f" {number + 2}"}
    for number in range(50)
]


@pytest.fixture
def folder(tiny_model, tmp_path, monkeypatch):
    """The current folder, with a model and records."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_model, tmp_path / "base")
    lines = [json.dumps(record) for record in RECORDS]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    return tmp_path


def validate(folder, capsys, **changes):
    """Check p.yaml with these changes to its spec; return exit code and output."""
    spec = {
        "model": {"uri": "base"},
        "datasets": [{"uri": "data.jsonl"}],
        "train": {},
        **changes,
    }
    kind = {"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTunePipeline"}
    manifest = {**kind, "metadata": {"name": "demo"}, "spec": spec}
    (folder / "p.yaml").write_text(yaml.safe_dump(manifest, sort_keys=False))
    code = main(["validate", "--check", "p.yaml"])
    return code, capsys.readouterr().out


@pytest.mark.usefixtures("trainer_here")
def test_quantized_model_is_refused_at_its_line(folder, capsys):
    config = json.loads((folder / "base/config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes"}
    (folder / "base/config.json").write_text(json.dumps(config))
    code, out = validate(folder, capsys)
    assert code == 2
    assert "p.yaml:7: spec.model.uri: is already quantized (bitsandbytes)" in out


@pytest.mark.usefixtures("trainer_here")
def test_settings_that_do_not_suit_the_model_have_their_lines(folder, capsys):
    train = {"lora": {"targetModules": ["c_attn"]}}
    code, out = validate(folder, capsys, train=train, prepare={"contextLength": 1024})
    assert code == 2
    assert ": spec.prepare.contextLength: " in out
    assert "set prepare.contextLength to 512 or less" in out
    assert "spec.train.lora.targetModules: c_attn matches no layer" in out


@pytest.mark.usefixtures("trainer_here")
def test_three_epochs_that_are_one_step_are_noted(folder, capsys):
    train = {"epochs": 3, "microBatchSize": 4, "gradientAccumulationSteps": 8}
    code, out = validate(folder, capsys, train=train, prepare={"contextLength": 512})
    assert code == 0
    assert "train: 1 step in all: a step takes 32 rows, and the data has " in out


def test_manifest_of_init_is_valid_for_the_model(folder, capsys):
    """The commands of the quickstart: init, then validate."""
    assert main(["init", "--model", "./base", "--data", "data.jsonl"]) == 0
    code = main(["validate", "--check", "pipeline.yaml"])
    assert (code, "in all" in capsys.readouterr().out) == (0, False)
