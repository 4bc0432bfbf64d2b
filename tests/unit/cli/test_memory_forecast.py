"""`finetune plan` says what memory and time a training takes, as far as they are known."""

import json
from datetime import timedelta
from typing import Any

import pytest
from support.cli.training_spec import spec_of
from support.operator.scenario import START, UID, a_pipeline

from finetune_cli.forecast.gpu_memory import GIB, gpus_of
from finetune_cli.forecast.memory import memory_lines
from finetune_cli.forecast.training_time import time_line
from finetune_operator.api.placement import PlacementDefaults
from finetune_operator.api.status import (
    AttemptStatus,
    Outcome,
    PipelineStatus,
    StageStatus,
)
from finetune_operator.core.pipeline import Key, Pipeline
from finetune_trainer.contract.memory import MemoryEstimate
from finetune_trainer.contract.preview import PreviewReport

LARGE = MemoryEstimate(
    parameters=8_000_000_000,
    trained_parameters=42_000_000,
    frozen_weights=15 * GIB,
    trained_weights=GIB // 8,
    gradients=GIB // 8,
    optimizer=GIB // 4,
    activations=25 * GIB,
    copies=GIB // 2,
)


def lines(
    tmp_path, memory: MemoryEstimate = LARGE, placement: Any = None, **train: Any
) -> list[str]:
    report = PreviewReport(memory=memory)
    return list(memory_lines(spec_of(tmp_path, **train), report, placement))


def gpu(**labels: str) -> dict[str, Any]:
    """Return a pod of a GPU on nodes with these labels."""
    names = {
        key.replace("__", "/").replace("_", "."): value for key, value in labels.items()
    }
    return {
        "pod": {"nodeSelector": names, "resources": {"limits": {"nvidia.com/gpu": "1"}}}
    }


def test_memory_is_shown_with_its_parts(tmp_path):
    [line] = lines(tmp_path)
    assert line == (
        "train: about 40.5 GiB of memory (15.0 GiB frozen base model, 128 MiB adapter, 128 MiB gradients, "
        "256 MiB optimizer, 25.0 GiB activations of 1 x 1,024 tokens), 8 B parameters, 42 M trained; "
        "PyTorch itself takes more"
    )


def test_step_that_cannot_be_simulated_is_said(tmp_path):
    memory = LARGE.model_copy(
        update={"activations": None, "activations_unknown": "no such operation"}
    )
    [line] = lines(tmp_path, memory)
    assert line.startswith("train: more than 15.5 GiB of memory")
    assert "activations not known: no such operation" in line


def test_memory_without_the_model_is_not_known(tmp_path):
    spec = spec_of(tmp_path)
    [line] = memory_lines(spec, None, None)
    assert line == "train: memory not known: the base model is not on this machine"
    [line] = memory_lines(spec, PreviewReport(memory_unknown="no rank"), None)
    assert line == "train: memory not known: no rank"


@pytest.mark.parametrize(
    ("labels", "gibibytes"),
    [
        ({"nvidia_com__gpu_product": "NVIDIA-A100-SXM4-40GB"}, 40),
        ({"nvidia_com__gpu_product": "NVIDIA-A100-SXM4-80GB-MIG-1g.10gb"}, 10),
        ({"nvidia_com__gpu_product": "Tesla-T4"}, 16),
        ({"cloud_google_com__gke-accelerator": "nvidia-l4"}, 24),
        ({"cloud_google_com__gke-accelerator": "nvidia-h100-80gb"}, 80),
        ({"nvidia_com__gpu_memory": "24576"}, 24),
    ],
)
def test_gpu_of_the_node_selector_is_known(tmp_path, labels, gibibytes):
    train = spec_of(tmp_path, **gpu(**labels)).stages()["train"]
    assert [device.size for device in gpus_of(train, None)] == [gibibytes * GIB]


@pytest.mark.parametrize("name", ["NVIDIA-A100", "nvidia-v100", "some-gpu"])
def test_gpu_with_several_sizes_is_not_guessed(tmp_path, name):
    train = spec_of(tmp_path, **gpu(nvidia_com__gpu_product=name)).stages()["train"]
    assert list(gpus_of(train, None)) == []


def test_slice_of_a_gpu_is_known_by_its_resource(tmp_path):
    pod = {"resources": {"limits": {"nvidia.com/mig-3g.40gb": "1"}}}
    train = spec_of(tmp_path, pod=pod).stages()["train"]
    assert [device.size for device in gpus_of(train, None)] == [40 * GIB]


def test_smaller_gpu_is_noted_with_the_fix(tmp_path):
    labels = {"nvidia_com__gpu_product": "NVIDIA-L4"}
    _, warning = lines(tmp_path, **gpu(**labels), microBatchSize=2)
    assert warning == (
        "train: needs about 40.5 GiB, and the GPU of nvidia.com/gpu.product: NVIDIA-L4 has 24.0 GiB: "
        "lower train.microBatchSize, set train.gradientCheckpointing to true, lower prepare.contextLength, "
        "or choose larger GPUs"
    )


@pytest.mark.parametrize(
    ("method", "fix"),
    [("LoRA", "set train.method to QLoRA"), ("Full", "set train.method to LoRA")],
)
def test_weights_that_do_not_fit_have_another_fix(tmp_path, method, fix):
    memory = LARGE.model_copy(update={"activations": GIB, "frozen_weights": 60 * GIB})
    labels = {"nvidia_com__gpu_product": "NVIDIA-L4"}
    _, warning = lines(tmp_path, memory, **gpu(**labels), method=method)
    assert fix in warning


def test_node_class_with_smaller_gpus_is_named(tmp_path):
    node_class = {
        "name": "cheap",
        "capacity": "Spot",
        "accelerator": "nvidia.com/gpu",
        "nodeSelector": {"cloud.google.com/gke-accelerator": "nvidia-l4"},
    }
    placement = PlacementDefaults.model_validate({"nodeClasses": [node_class]})
    pod = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
    _, warning = lines(tmp_path, placement=placement, pod=pod)
    assert (
        "the GPU of node class cheap (cloud.google.com/gke-accelerator: nvidia-l4) has 24.0 GiB"
        in warning
    )


def trained(step_seconds: float | None, steps: int = 50, **train: Any) -> Pipeline:
    """Return a pipeline with an attempt of the training."""
    attempt = AttemptStatus(
        number=2,
        job="train-a2",
        execution="e",
        identity="a" * 16,
        outcome=Outcome.INTERRUPTED,
        created_at=START,
        started_at=START,
        finished_at=START + timedelta(hours=1),
        start_step=0,
        last_step=steps,
        step_seconds=step_seconds,
    )
    status = StageStatus(identity="a" * 16, attempts=[attempt])
    return Pipeline(
        Key("team", "demo"),
        UID,
        1,
        a_pipeline(train=train),
        PipelineStatus(stages={"train": status}),
    )


def test_time_is_known_by_the_speed_of_an_attempt():
    before = trained(2.0, epochs=3)
    assert time_line(before.spec, before, 100) == (
        "train: about 10m for 300 steps, 2 s a step, as in attempt 2"
    )


def test_more_steps_take_longer_at_the_same_speed():
    before = trained(2.0, maxSteps=60)
    after = a_pipeline(train={"maxSteps": 1800, "optimizer": {"learningRate": 1e-4}})
    line = time_line(after, before, None)
    assert line == "train: about 1h for 1,800 steps, 2 s a step, as in attempt 2"


@pytest.mark.parametrize(
    "train",
    [{"microBatchSize": 2}, {"method": "Full"}, {"gradientCheckpointing": True}],
)
def test_speed_with_other_settings_is_not_taken_over(train):
    line = time_line(
        a_pipeline(train={"maxSteps": 60, **train}), trained(2.0, maxSteps=60), None
    )
    assert (
        line
        == "train: time not known: the attempts of this pipeline had another model or other settings"
    )


@pytest.mark.parametrize("before", [None, trained(None), trained(9.0, steps=1)])
def test_time_without_a_measured_step_is_not_known(before):
    line = time_line(a_pipeline(train={"maxSteps": 60}), before, None)
    assert (
        line == "train: time not known: no attempt of this pipeline has measured a step"
    )


def test_plan_has_memory_and_time(tiny_model, tmp_path, monkeypatch, capsys):
    from finetune_cli.__main__ import main  # noqa: PLC0415  as in the tests of commands

    monkeypatch.chdir(tmp_path)
    record = {"prompt": "What is 1 plus 2?", "completion": " 3"}
    (tmp_path / "data.jsonl").write_text(json.dumps(record) + "\n" + json.dumps(record))
    (tmp_path / "p.yaml").write_text(
        f"""
apiVersion: finetune.dev/v1alpha1
kind: FineTunePipeline
metadata: {{name: demo}}
spec:
  model: {{uri: "file://{tiny_model}"}}
  datasets: [{{uri: data.jsonl}}]
  validation: {{fraction: 0}}
  prepare: {{contextLength: 64}}
  train: {{dtype: FP32, microBatchSize: 4}}
"""
    )
    assert main(["plan", "p.yaml", "--json"]) == 0
    memory, time = json.loads(capsys.readouterr().out)["estimates"]
    assert "activations of 4 x 64 tokens" in memory
    assert "trained; PyTorch itself takes more" in memory
    assert "time not known: no attempt" in time
