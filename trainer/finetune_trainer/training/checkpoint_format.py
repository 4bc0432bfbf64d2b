"""One checkpoint: everything that a run is at a step's boundary, as files that hold no code.

    adapter_model.safetensors   the adapter, in PEFT's format: a checkpoint can be served as it is
    adapter_config.json
    best_adapter.safetensors    the adapter with the lowest validation loss so far, once there is one
    optimizer.safetensors       both moments and the step of every parameter
    random.safetensors          the generators
    state.json                  the counters
    manifest.json               sizes, SHA-256, and of which run and step this is

The best adapter is in each of them, so a checkpoint needs no other one to be whole.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load

from finetune_trainer.runtime.artifacts import CorruptArtifact
from finetune_trainer.training.determinism import Tensors
from finetune_trainer.training.model import ADAPTER, ADAPTER_CONFIG, save_tensors
from finetune_trainer.training.state import State

BEST = "best_adapter.safetensors"
OPTIMIZER = "optimizer.safetensors"
RANDOM = "random.safetensors"
STATE = "state.json"

GPU = frozenset({"cuda"})
"""Generators that only a machine with an accelerator has."""


@dataclass(frozen=True)
class Snapshot:
    """A boundary, in memory that training does not write to."""

    state: State
    adapter: Tensors
    optimizer: Tensors
    random: Tensors
    best: Tensors | None


@dataclass(frozen=True)
class Layout:
    """Names, shapes and types that a checkpoint of this run must have; the tensors' values do not matter."""

    adapter: Tensors
    optimizer: Tensors
    random: Tensors
    steps: int
    """Optimizer steps in all."""


def write_files(folder: Path, snapshot: Snapshot, adapter_config: bytes) -> None:
    """Write a snapshot into an empty folder; raise OSError where the disk does not take it."""
    save_tensors(snapshot.adapter, folder / ADAPTER)
    save_tensors(snapshot.optimizer, folder / OPTIMIZER)
    save_tensors(snapshot.random, folder / RANDOM)
    if snapshot.best is not None:
        save_tensors(snapshot.best, folder / BEST)
    (folder / ADAPTER_CONFIG).write_bytes(adapter_config)
    (folder / STATE).write_text(snapshot.state.model_dump_json(indent=1))


def read_files(folder: Path, layout: Layout) -> Snapshot:
    """Read a snapshot; raise Damaged, saying which file and how, where it cannot be one of this run."""
    state = _state(folder / STATE, layout.steps)
    optimizer = _tensors(folder / OPTIMIZER)
    if not optimizer:
        raise CorruptArtifact(f"{folder.name}/{OPTIMIZER} holds no moments")
    # A parameter that never had a gradient has no moments; one that had has all of them.
    seen = {name.rpartition(".")[0] for name in optimizer}
    expected = {name: like for name, like in layout.optimizer.items() if name.rpartition(".")[0] in seen}
    best = None if state.best_step is None else _like(folder / BEST, layout.adapter)
    return Snapshot(
        state=state,
        adapter=_like(folder / ADAPTER, layout.adapter),
        optimizer=_like(folder / OPTIMIZER, expected, optimizer),
        random=_generators(folder / RANDOM, layout.random),
        best=best,
    )


def _state(path: Path, steps: int) -> State:
    try:
        state = State.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise CorruptArtifact(f"{path.parent.name}/{path.name} cannot be read: {error}") from None
    if not 0 < state.step <= steps:
        raise CorruptArtifact(
            f"{path.parent.name}/{path.name} is at step {state.step}, which is not one of 1 to {steps}"
        )
    return state


def _tensors(path: Path) -> Tensors:
    try:
        found: Tensors = load(path.read_bytes())
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise CorruptArtifact(f"{path.parent.name}/{path.name} cannot be read: {error}") from None
    return found


def _like(path: Path, layout: Tensors, found: Tensors | None = None) -> Tensors:
    """Raise Damaged unless the tensors have the layout's names, shapes and types and finite values."""
    found = _tensors(path) if found is None else found
    where = f"{path.parent.name}/{path.name}"
    if differing := sorted(set(found) ^ set(layout)):
        raise CorruptArtifact(
            f"{where} {'has a strange' if differing[0] in found else 'lacks the'} tensor {differing[0]}"
        )
    for name, like in layout.items():
        if (found[name].shape, found[name].dtype) != (like.shape, like.dtype):
            raise CorruptArtifact(
                f"{where}: {name} is {found[name].dtype} {list(found[name].shape)}, "
                f"this run's is {like.dtype} {list(like.shape)}"
            )
        if not torch.isfinite(found[name]).all():
            raise CorruptArtifact(f"{where}: {name} is not finite")
    return found


def _generators(path: Path, layout: Tensors) -> Tensors:
    found = _tensors(path)
    # A run may go on without the GPU it began with, or with one; the loop's owner says that aloud.
    common = {name: like for name, like in layout.items() if name == "cpu" or name in found}
    found = _like(path, common, {name: tensor for name, tensor in found.items() if name not in GPU or name in common})
    try:
        torch.Generator().set_state(found["cpu"])
    except (RuntimeError, TypeError) as error:
        raise CorruptArtifact(f"{path.parent.name}/{path.name} is no generator's state: {error}") from None
    return found
