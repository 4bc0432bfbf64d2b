"""A GPU that was asked for and cannot be used: the error names the cause."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.trainer.stages import run_to_failure
from support.trainer.training import environment, train_config

from finetune_trainer.contract import EvaluateConfig, EvaluateRecipe, ExitCode, Task
from finetune_trainer.runtime.errors import ConfigInvalid, ServiceUnavailable
from finetune_trainer.runtime.machine import gpu

PROPRIETARY = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\nGCC 12.2.0\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (builder@host)\n"


@pytest.fixture
def node(tmp_path, monkeypatch):
    """A node with a GPU whose files are in a folder, and a PyTorch with CUDA 13.0 that cannot initialise it."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    (tmp_path / "version").write_text(PROPRIETARY)
    monkeypatch.setattr(gpu, "DEVICES", tmp_path / "dev")
    monkeypatch.setattr(gpu, "DRIVER_VERSION", tmp_path / "version")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    set_cuda_error(monkeypatch, "CUDA driver initialization failed")
    return tmp_path


def set_cuda_error(monkeypatch, text):
    def init():
        raise RuntimeError(text)

    monkeypatch.setattr(torch.cuda, "init", init)


def cause(folder):
    with pytest.raises(ServiceUnavailable) as raised:
        gpu.check_gpu(replace(environment(folder), gpus=1))
    return str(raised.value)


def test_pytorch_without_cuda_is_named(node, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert f"this PyTorch ({torch.__version__}) is built without CUDA" in cause(node)


def test_container_without_device_is_named(node):
    (node / "dev" / "nvidia0").unlink()
    assert "the container has no GPU device" in cause(node)
    (node / "dev" / "kfd").touch()
    assert "no GPU device" not in cause(node)


@pytest.mark.parametrize(
    ("cuda", "version", "expected"),
    [
        (
            "13.0",
            PROPRIETARY,
            "the driver 535.129.03 is too old for this PyTorch, which has CUDA 13.0 and needs 580",
        ),
        ("12.8", PROPRIETARY.replace("535", "470"), "the driver 470.129.03 is too old"),
        (
            "12.8",
            PROPRIETARY,
            "PyTorch cannot use it: CUDA driver initialization failed",
        ),
        ("13.0", OPEN, "PyTorch cannot use it: CUDA driver initialization failed"),
        ("13.0", "unknown", "PyTorch cannot use it: CUDA driver initialization failed"),
    ],
    ids=["13-on-535", "12-on-470", "12-on-535", "13-on-580", "unknown"],
)
def test_driver_too_old_is_named_with_both_versions(
    node, monkeypatch, cuda, version, expected
):
    (node / "version").write_text(version)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert expected in cause(node)


def test_old_driver_without_a_version_file_is_named(node, monkeypatch):
    (node / "version").unlink()
    set_cuda_error(
        monkeypatch,
        "The NVIDIA driver on your system is too old (found version 12020).",
    )
    assert "the driver of this node is too old" in cause(node)
    assert "found version 12020" in cause(node)


def test_hidden_device_is_named(node, monkeypatch):
    (node / "version").write_text(OPEN)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    assert "check CUDA_VISIBLE_DEVICES" in cause(node)


@pytest.mark.parametrize("stage", ["train", "evaluate"])
def test_stage_does_not_fall_back_to_the_cpu_in_silence(node, tiny_model, stage):
    configs: dict[str, Any] = {
        "train": train_config(tiny_model),
        "evaluate": EvaluateConfig(
            identity="e",
            prepare="p",
            train="t",
            model={"uri": f"file://{tiny_model}"},
            recipe=EvaluateRecipe(tasks=(Task(name="a"),)),
        ),
    }
    message, code = run_to_failure(configs[stage], replace(environment(node), gpus=1))
    assert message.startswith(
        "pod.resources asks for a GPU, but the driver 535.129.03 is too old"
    )
    assert code == ExitCode.UNAVAILABLE


def test_without_a_request_the_cpu_is_used(node):
    gpu.check_gpu(environment(node))


def test_request_with_a_usable_gpu_passes(node, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    gpu.check_gpu(replace(environment(node), gpus=1), processes=2)


def test_fewer_gpus_than_processes_are_a_config_error(node, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(
        ConfigInvalid, match="4 processes train in this place, but it has 2 GPUs"
    ):
        gpu.check_gpu(environment(node), processes=4)
