"""The memory that a GPU copies a checkpoint to is there before the first step."""

import weakref

import pytest
import torch
from support.training import documents, run_train, train_config, write_rows

from finetune_trainer.training import loop, sharding


@pytest.fixture
def allocated(monkeypatch):
    """Shapes and dtypes of what is pinned, which needs a GPU; each must stay until the last one is allocated."""
    found: list[tuple[torch.Size, torch.dtype]] = []
    alive: list[weakref.ref[torch.Tensor]] = []

    def pinned_like(tensor: torch.Tensor) -> torch.Tensor:
        assert all(each() is not None for each in alive), "PyTorch hands out the same memory again"
        memory = torch.empty(tensor.shape, dtype=tensor.dtype)
        alive.append(weakref.ref(memory))
        found.append((memory.shape, memory.dtype))
        return memory

    monkeypatch.setattr(sharding, "pinned_like", pinned_like)
    return found


def kinds(tensors):
    return [(tensor.shape, tensor.dtype) for tensor in tensors.values()]


@pytest.mark.parametrize("optimizer", ["AdamW", "AdamW8Bit"])
def test_reserved_memory_is_that_of_a_snapshot(tiny_model, tmp_path, monkeypatch, allocated, optimizer):
    write_rows(tmp_path, documents(24))
    snapshots = []
    reserve = loop.TrainingRun.reserve_snapshot

    def reserve_as_on_gpu(run):
        with monkeypatch.context() as patch:
            patch.setattr(run.model, "device", torch.device("cuda"))
            reserve(run)

    def save(run, _checkpoints):
        snapshots.append(run.snapshot())

    monkeypatch.setattr(loop.TrainingRun, "reserve_snapshot", reserve_as_on_gpu)
    monkeypatch.setattr(loop, "save", save)
    run_train(train_config(tiny_model, max_steps=6, optimizer={"name": optimizer}), tmp_path)
    assert allocated
    assert sorted(allocated, key=str) == sorted(kinds(snapshots[0].weights) + kinds(snapshots[0].optimizer), key=str)


def test_copy_that_is_too_large_for_pinned_memory_reserves_none(monkeypatch, allocated):
    small, large = {"a": torch.zeros(3)}, {"b": torch.zeros(9), "c": torch.zeros(1)}
    monkeypatch.setattr(sharding, "PINNED_BYTES", 36)
    sharding.reserve_copies(small, large)
    assert allocated == kinds(small)
