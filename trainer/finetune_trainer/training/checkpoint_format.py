"""The files of one checkpoint: the complete state of a run at a step boundary, without pickled code.

    adapter_model.safetensors   the adapter, in PEFT's format: a checkpoint can be served as it is
    adapter_config.json         (method Full: model.safetensors and config.json, the model in transformers' format)
    best.safetensors            the weights with the lowest validation loss so far, after the first validation
    optimizer.safetensors       the optimizer state: moments and step of every parameter
    state.json                  the counters
    manifest.json               sizes and SHA-256 of the files, and the run and step of the checkpoint

Every checkpoint holds the best weights, so none depends on another one.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load

from finetune_trainer.runtime.artifacts import CorruptArtifact
from finetune_trainer.training.determinism import Tensors
from finetune_trainer.training.state import State
from finetune_trainer.training.trainable import WeightsFormat, save_tensors

BEST = "best.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"


@dataclass(frozen=True)
class Snapshot:
    """A copy of the state at a step boundary, in memory that training does not write to."""

    state: State
    weights: Tensors
    optimizer: Tensors
    best: Tensors | None


@dataclass(frozen=True)
class Layout:
    """The tensor names, shapes and dtypes that a checkpoint of this run must have; the values are ignored."""

    weights: Tensors
    optimizer: Tensors
    steps: int
    """Total number of optimizer steps of the run."""
    format: WeightsFormat
    """The files of the weights."""


def write_files(folder: Path, snapshot: Snapshot, weights_format: WeightsFormat) -> None:
    """Write a snapshot into an empty folder; raise OSError if a file cannot be written."""
    weights_format.write(snapshot.weights, folder)
    save_tensors(snapshot.optimizer, folder / OPTIMIZER)
    if snapshot.best is not None:
        save_tensors(snapshot.best, folder / BEST)
    (folder / STATE).write_text(snapshot.state.model_dump_json(indent=1))


def read_files(folder: Path, layout: Layout) -> Snapshot:
    """Read a snapshot; raise CorruptArtifact, naming the file and the problem, unless it matches the layout."""
    state = _state(folder / STATE, layout.steps)
    optimizer = _tensors(folder / OPTIMIZER)
    if not optimizer:
        raise CorruptArtifact(f"{folder.name}/{OPTIMIZER} has no optimizer state")
    # A parameter that never had a gradient has no optimizer state; any other one must have all its tensors.
    with_state = {name.rpartition(".")[0] for name in optimizer}
    expected = {name: like for name, like in layout.optimizer.items() if name.rpartition(".")[0] in with_state}
    best = None if state.best_step is None else _checked(folder / BEST, layout.weights)
    return Snapshot(
        state=state,
        weights=_checked(folder / layout.format.file, layout.weights),
        optimizer=_checked(folder / OPTIMIZER, expected, optimizer),
        best=best,
    )


def _state(path: Path, steps: int) -> State:
    try:
        state = State.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise CorruptArtifact(f"{path.parent.name}/{path.name} cannot be read: {error}") from None
    if not 0 < state.step <= steps:
        raise CorruptArtifact(
            f"{path.parent.name}/{path.name} is at step {state.step}, this run has steps 1 to {steps}"
        )
    return state


def _tensors(path: Path) -> Tensors:
    try:
        found: Tensors = load(path.read_bytes())
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise CorruptArtifact(f"{path.parent.name}/{path.name} cannot be read: {error}") from None
    return found


def _checked(path: Path, layout: Tensors, found: Tensors | None = None) -> Tensors:
    """Return the file's tensors.

    Raises CorruptArtifact unless they have the layout's names, shapes and dtypes, and finite values.
    """
    found = _tensors(path) if found is None else found
    where = f"{path.parent.name}/{path.name}"
    if differing := sorted(set(found) ^ set(layout)):
        raise CorruptArtifact(
            f"{where} {'has an unexpected' if differing[0] in found else 'lacks the'} tensor {differing[0]}"
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
