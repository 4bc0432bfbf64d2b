"""`finetune convert`: configs of axolotl and TRL in the shapes in which they are published."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune_cli.__main__ import main
from finetune_cli.manifest.manifest import read

CONFIGS = Path(__file__).parents[2] / "data" / "configs"
ALL = sorted(CONFIGS.glob("*/*.yaml"))
EXPECTED: dict[str, dict[str, Any]] = {
    "axolotl/qlora-7b": {
        "model.uri": "hf://NousResearch/Llama-2-7b-hf",
        "train.method": "QLoRA",
        "train.lora.targetModules": ["all-linear"],
        "train.optimizer.learningRate": 0.0002,
        "prepare.contextLength": 4096,
        "seed": 42,
        "validation.fraction": 0.05,
    },
    "axolotl/chat-lora": {
        "datasets.0.columns": {"messages": "conversations"},
        "datasets.0.revision": "v2",
        "train.optimizer.learningRate": 1e-5,
        "train.optimizer.maxGradNorm": 0.3,
        "train.optimizer.scheduler": "Linear",
        "train.earlyStopping.patience": 4,
        "train.checkpoint": {"everySteps": 100, "keep": 3},
        "seed": 7,
    },
    "axolotl/full": {
        "train.method": "Full",
        "train.lora": None,
        "train.optimizer.name": "AdamW8Bit",
        "train.optimizer.minLearningRateFraction": 0.1,
        "prepare.packing": False,
        "datasets.0.columns": {"text": "body"},
        "validation.fraction": 0.0,
    },
    "axolotl/dpo": {
        "train.objective": "DPO",
        "train.dpo.beta": 0.2,
        "train.maxSteps": 200,
        "train.epochs": None,
        "train.optimizer.warmupFraction": 0.05,
        "prepare.packing": None,
        "datasets.0.columns": {
            "prompt": "conversation",
            "chosen": "chosen",
            "rejected": "rejected",
        },
    },
    "axolotl/own-type": {
        "datasets.0.uri": "file:///data/train_data.json",
        "datasets.0.columns": {
            "instruction": "question",
            "input": "context",
            "output": "answer",
        },
        "train.optimizer.warmupFraction": 0.1,
        "push.targets": [{"uri": "hf://org/result", "format": "Adapter"}],
    },
    "axolotl/8bit": {"tracking.wandb": {"project": "openllama", "entity": "team"}},
    "axolotl/sharegpt": {
        "datasets.1.uri": "data/own.jsonl",
        "train.lora.variant": "RsLoRA",
        "train.lora.modulesToSave": ["embed_tokens", "lm_head"],
        "train.neftuneNoiseAlpha": 5.0,
        "train.optimizer.scheduler": "Constant",
    },
    "axolotl/orpo": {"train.objective": None},
    "axolotl/continue": {
        "train.startFrom.uri": "hf://org/adapter",
        "validation.split": "test",
        "datasets.0.config": "de",
        "tracking.mlflow.experiment": "tuning",
        "train.epochs": 0.5,
    },
    "axolotl/dora": {"train.lora.variant": "DoRA", "train.compile": None},
    "trl/sft-lora": {
        "train.epochs": 1,
        "train.lora.dropout": 0.05,
        "train.optimizer.scheduler": "Linear",
        "validation.split": "test",
        "train.gradientCheckpointing": True,
    },
    "trl/sft-full": {
        "train.method": "Full",
        "model.revision": "abc123",
        "datasets.0.columns": {"text": "body"},
        "datasets.0.config": "en",
        "train.optimizer.warmupFraction": 0.1,
        "prepare.contextLength": 4096,
    },
    "trl/dpo": {"train.objective": "DPO", "train.dpo.beta": 0.05},
    "trl/dpo-ipo": {"train.optimizer.learningRate": 1e-6},
    "trl/qlora": {
        "train.method": "QLoRA",
        "train.optimizer.name": "AdamW8Bit",
        "datasets.0.uri": "pairs.jsonl",
        "train.epochs": 3,
    },
    "trl/local": {"model.uri": "./base", "validation.fraction": 0.05},
    "trl/fp32": {
        "train.dtype": "FP32",
        "train.lora.variant": "RsLoRA",
        "train.gradientCheckpointing": False,
        "train.epochs": 3,
    },
    "trl/hub": {"train.optimizer.maxGradNorm": 0.5},
    "trl/adafactor": {"train.optimizer.scheduler": "Cosine"},
    "trl/dft": {"train.objective": None, "train.optimizer.learningRate": 2e-5},
}
"""Config -> fields of the spec, None for a field that is not set."""
NOTED: dict[str, set[str]] = {
    "axolotl/qlora-7b": {"datasets[0].type", "warmup_steps", "evals_per_epoch"},
    "axolotl/full": {"deepspeed"},
    "axolotl/dpo": {"chat_template"},
    "axolotl/8bit": {
        "datasets[0].type",
        "datasets[0].shards",
        "load_in_8bit",
        "fp16",
        "loss_watchdog_threshold",
    },
    "axolotl/sharegpt": {"chat_template", "tokens"},
    "axolotl/orpo": {"rl", "orpo_alpha", "chat_template"},
    "axolotl/continue": {"optimizer"},
    "axolotl/dora": {
        "datasets[0].type",
        "val_set_size",
        "lr_scheduler",
        "plugins",
        "liger_rope",
        "unfrozen_parameters",
        "torch_compile",
    },
    "trl/sft-full": {"lr_scheduler_kwargs"},
    "trl/dpo-ipo": {"loss_type"},
    "trl/local": {"eval_strategy", "save_steps"},
    "trl/fp32": {"deepspeed"},
    "trl/hub": {"trust_remote_code"},
    "trl/adafactor": {"optimizer", "lr_scheduler", "load_in_8bit"},
    "trl/dft": {"loss_type"},
    "trl/qlora": {"bnb_4bit_quant_type"},
}
"""Config -> the settings that its manifest does not express as they were."""


def name_of(path):
    return f"{path.parent.name}/{path.stem}"


def value_at(spec, path):
    for step in path.split("."):
        fields = dict(enumerate(spec)) if isinstance(spec, list) else spec or {}
        spec = fields.get(int(step) if step.isdigit() else step)
    return spec


@pytest.fixture
def convert(tmp_path, capsys):
    """A function that converts a config, and returns the manifest's spec and the settings of its notes."""

    def convert(path):
        output = tmp_path / "made.yaml"
        assert main(["convert", str(path), "-o", str(output), "--force"]) == 0
        noted = {line.split(": ")[1] for line in capsys.readouterr().err.splitlines()}
        assert read(output).name == path.stem
        return yaml.safe_load(output.read_text())["spec"], noted

    return convert


def test_every_config_is_expected():
    assert {name_of(path) for path in ALL} == {*EXPECTED}
    assert len(ALL) == 20


@pytest.mark.parametrize("path", ALL, ids=name_of)
def test_config_becomes_a_valid_manifest_with_its_values(convert, path):
    spec, _ = convert(path)
    expected = EXPECTED[name_of(path)]
    assert {field: value_at(spec, field) for field in expected} == expected


@pytest.mark.parametrize("path", ALL, ids=name_of)
def test_what_is_not_as_it_was_is_said(convert, path):
    _, noted = convert(path)
    assert noted >= NOTED.get(name_of(path), set())
    known = {
        *yaml.safe_load(path.read_text()),
        "datasets[0].type",
        "datasets[0].shards",
    }
    # Settings of defaults, or with one name for both tools.
    renamed = {"optimizer", "lr_scheduler", "lora_target_modules"}
    assert noted <= known | renamed


def test_converted_manifest_equals_a_hand_written_one(tmp_path, convert):
    written = tmp_path / "written.yaml"
    written.write_text(
        """
apiVersion: finetune.dev/v1alpha1
kind: FineTunePipeline
metadata: {name: local}
spec:
  model: {uri: ./base}
  datasets: [{uri: ./train.jsonl}]
  validation: {fraction: 0.05}
  seed: 42
  prepare: {contextLength: 1024, packing: false}
  train:
    method: LoRA
    lora: {rank: 16, alpha: 32, dropout: 0.05, targetModules: [all-linear]}
    epochs: 2
    microBatchSize: 8
    gradientCheckpointing: true
    optimizer: {learningRate: 2e-5, scheduler: Linear, warmupFraction: 0}
"""
    )
    spec, _ = convert(CONFIGS / "trl" / "local.yaml")
    made = tmp_path / "made.yaml"
    assert spec["train"]["epochs"] == 2
    # Equal specs have equal identities, so that one run uses the results of the other.
    assert read(made).spec == read(written).spec


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\n", "is no config of axolotl or TRL"),
        ("- 1\n", "it has no settings"),
        ("a: [\n", "cannot be read as YAML"),
    ],
)
def test_other_file_is_refused(tmp_path, capsys, text, message):
    file = tmp_path / "other.yaml"
    file.write_text(text)
    assert main(["convert", str(file)]) == 2
    assert message in capsys.readouterr().err


def test_existing_manifest_is_kept(tmp_path, capsys):
    output = tmp_path / "made.yaml"
    output.write_text("mine")
    assert main(["convert", str(ALL[0]), "-o", str(output)]) == 2
    assert output.read_text() == "mine"
    assert "--force" in capsys.readouterr().err


def test_patience_without_steps_of_validation_is_not_taken_over(tmp_path, capsys):
    config = tmp_path / "config.yaml"
    known = (CONFIGS / "axolotl/qlora-7b.yaml").read_text()
    config.write_text(f"{known}\nearly_stopping_patience: 3\n")
    assert main(["convert", str(config)]) == 0
    output = capsys.readouterr()
    assert "earlyStopping" not in yaml.safe_load(output.out)["spec"]["train"]
    assert "early_stopping_patience: not taken over" in output.err
