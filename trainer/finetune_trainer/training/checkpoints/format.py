"""The files of a checkpoint: the complete state of a run at a step boundary, without pickled code.

    adapter_model.safetensors   the adapter, in PEFT's format: a checkpoint can be served as it is
    adapter_config.json         (method Full: model.safetensors and config.json, the model in transformers' format)
    best.safetensors            the weights with the lowest validation loss so far, after the first validation
    optimizer.safetensors       the optimizer state: moments and step of every parameter
    state.json                  the counters
    manifest.json               sizes and SHA-256 of the files, and the run and step of the checkpoint

Every checkpoint holds the best weights, so none depends on another checkpoint.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from typing_extensions import override

from finetune_trainer.runtime.artifacts import CorruptArtifact
from finetune_trainer.training.determinism import Tensors
from finetune_trainer.training.methods.trainable import WeightsFormat, save_tensors
from finetune_trainer.training.state import State

BEST = "best.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"


@dataclass(frozen=True)
class Snapshot:
    """A copy of the state at a step boundary, in memory that training does not write to, or in files."""

    state: State
    weights: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, torch.Tensor]
    best: Mapping[str, torch.Tensor] | None


@dataclass(frozen=True)
class Layout:
    """The tensor names, shapes and dtypes that a checkpoint of this run must have; the values are ignored."""

    weights: Tensors
    optimizer: Tensors
    steps: int
    """Total number of optimizer steps of the run."""
    format: WeightsFormat
    """The files of the weights."""


def write_files(
    folder: Path, snapshot: Snapshot, weights_format: WeightsFormat
) -> None:
    """Write a snapshot into an empty folder; raise OSError if a file cannot be written."""
    weights_format.write(dict(snapshot.weights), folder)
    save_tensors(dict(snapshot.optimizer), folder / OPTIMIZER)
    if snapshot.best is not None:
        save_tensors(dict(snapshot.best), folder / BEST)
    (folder / STATE).write_text(snapshot.state.model_dump_json(indent=1))


def read_files(folder: Path, layout: Layout) -> Snapshot:
    """Read a snapshot into memory; raise CorruptArtifact, naming file and problem, unless it fits the layout."""
    snapshot = open_files(folder, layout)
    best = snapshot.best
    if best is not None:
        best = dict(best)
    # Each dict reads, and so checks, all tensors of its file: a damaged tensor is known before training begins.
    return replace(
        snapshot,
        weights=dict(snapshot.weights),
        optimizer=dict(snapshot.optimizer),
        best=best,
    )


def open_files(folder: Path, layout: Layout) -> Snapshot:
    """Return a snapshot that reads each of its tensors only when the tensor is used.

    Raise CorruptArtifact if a file has other tensors than the layout. Reading a tensor may raise it, too.
    """
    state = _state(folder / STATE, layout.steps)
    optimizer = TensorFile(folder / OPTIMIZER)
    if not optimizer:
        raise CorruptArtifact(f"{folder.name}/{OPTIMIZER} has no optimizer state")
    # A parameter that never had a gradient has no optimizer state. Any other must have all its tensors.
    with_state = {name.rpartition(".")[0] for name in optimizer}
    expected = {
        name: like
        for name, like in layout.optimizer.items()
        if name.rpartition(".")[0] in with_state
    }
    # The state decides whether the file must exist: a lost file of best weights must not go unnoticed.
    best = None
    if state.best_step is not None:
        best = TensorFile(folder / BEST).expect(layout.weights)
    return Snapshot(
        state=state,
        weights=TensorFile(folder / layout.format.file).expect(layout.weights),
        optimizer=optimizer.expect(expected),
        best=best,
    )


def _state(path: Path, steps: int) -> State:
    try:
        state = State.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise CorruptArtifact(
            f"{path.parent.name}/{path.name} cannot be read: {error}"
        ) from None
    # Step 0 is never saved: a run without a finished step starts from the beginning.
    if not 0 < state.step <= steps:
        raise CorruptArtifact(
            f"{path.parent.name}/{path.name} is at step {state.step}, this run has steps 1 to {steps}"
        )
    return state


class TensorFile(Mapping[str, torch.Tensor]):
    """The tensors of a file. Each is read and checked when it is asked for, so that no two must be in memory."""

    def __init__(self, path: Path) -> None:
        """Open the file; raise CorruptArtifact if it cannot be read."""
        self._path = path
        self._layout = Tensors()
        # pread and not mmap: if the volume fails, a read of mapped memory kills the process.
        self._file: Any = self._read(
            lambda: safe_open(path, framework="pt", backend="pread")
        )
        self._names = tuple(self._file.keys())

    def expect(self, layout: Tensors) -> Self:
        """Set the names, shapes and dtypes that the tensors must have; raise CorruptArtifact if the names differ."""
        differing = sorted({*self._names} ^ {*layout})
        if differing:
            name = differing[0]
            problem = "has an unexpected" if name in self._names else "lacks the"
            raise CorruptArtifact(f"{self._where} {problem} tensor {name}")
        self._layout = layout
        return self

    @override
    def __getitem__(self, name: str) -> torch.Tensor:
        """Read a tensor; raise CorruptArtifact unless it has the shape and dtype of the layout, and finite values."""
        like = self._layout[name]
        tensor: torch.Tensor = self._read(lambda: self._file.get_tensor(name))
        if (tensor.shape, tensor.dtype) != (like.shape, like.dtype):
            raise CorruptArtifact(
                f"{self._where}: {name} is {tensor.dtype} {list(tensor.shape)}, "
                f"this run's is {like.dtype} {list(like.shape)}"
            )
        if not torch.isfinite(tensor).all():
            raise CorruptArtifact(f"{self._where}: {name} is not finite")
        return tensor

    @override
    def __contains__(self, name: object) -> bool:
        return name in self._names

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    @override
    def __len__(self) -> int:
        return len(self._names)

    @property
    def _where(self) -> str:
        return f"{self._path.parent.name}/{self._path.name}"

    def _read(self, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except (OSError, SafetensorError, ValueError) as error:
            raise CorruptArtifact(f"{self._where} cannot be read: {error}") from None
