"""The memory that a GPU copies a checkpoint to is there before the first step."""

import weakref
from types import SimpleNamespace

import pytest
import torch
from support.trainer.training import documents, run_train, train_config, write_rows

from finetune_trainer.training import loop
from finetune_trainer.training.distributed import sharding


@pytest.fixture
def training(monkeypatch):
    """Training as on a GPU: `pinned` has the kinds of what is pinned, `snapshots` what checkpoints are made of."""
    recorded = SimpleNamespace(pinned=[], snapshots=[])
    alive: list[weakref.ref[torch.Tensor]] = []

    def pinned_like(tensor: torch.Tensor) -> torch.Tensor:
        assert all(reference() is not None for reference in alive), (
            "PyTorch hands out the same memory again"
        )
        memory = torch.empty(tensor.shape, dtype=tensor.dtype)
        alive.append(weakref.ref(memory))
        recorded.pinned.append((memory.shape, memory.dtype))
        return memory

    reserve = loop.TrainingRun.reserve_snapshot

    def reserve_as_on_gpu(run: loop.TrainingRun) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(run.model, "device", torch.device("cuda"))
            reserve(run)

    monkeypatch.setattr(sharding, "pinned_like", pinned_like)
    monkeypatch.setattr(loop.TrainingRun, "reserve_snapshot", reserve_as_on_gpu)
    monkeypatch.setattr(
        loop,
        "save",
        lambda run, _checkpoints: recorded.snapshots.append(run.snapshot()),
    )
    return recorded


def kinds(tensors):
    return [(tensor.shape, tensor.dtype) for tensor in tensors.values()]


@pytest.mark.parametrize("optimizer", ["AdamW", "AdamW8Bit"])
@pytest.mark.parametrize("validation", [(), documents(4)])
def test_reserved_memory_is_that_of_a_snapshot(
    tiny_model, tmp_path, training, optimizer, validation
):
    write_rows(tmp_path, documents(24), validation)
    changes = {
        "method": "Full",
        "lora": None,
        "optimizer": {"name": optimizer},
    }  # large enough for moments of 8 bits
    run_train(train_config(tiny_model, max_steps=12, eval_steps=2, **changes), tmp_path)
    last = training.snapshots[-1]
    expected = kinds(last.weights) + kinds(last.optimizer) + kinds(last.best or {})
    assert (last.best is not None) == bool(validation)
    assert any(dtype == torch.uint8 for _, dtype in expected) == (
        optimizer == "AdamW8Bit"
    )
    assert sorted(training.pinned, key=str) == sorted(expected, key=str)


def test_copy_that_is_too_large_for_pinned_memory_reserves_none(monkeypatch, training):
    small = {"a": torch.zeros(3)}
    large = {
        "b": torch.zeros(9),
        "c": torch.zeros(1),
    }
    monkeypatch.setattr(sharding, "PINNED_BYTES", 36)
    sharding.reserve_copies(small, large)
    assert training.pinned == kinds(small)


def test_copies_are_in_pinned_memory_where_there_is_a_gpu():
    if torch.cuda.is_available():
        assert sharding.pinned_like(torch.zeros(3)).is_pinned()
    else:
        with pytest.raises(RuntimeError, match=r"(?i)accelerator|driver|CUDA"):
            sharding.pinned_like(torch.zeros(3))
