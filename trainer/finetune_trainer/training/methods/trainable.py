"""What a method of training makes of the base model, and the files that its weights are saved in."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file

from finetune_trainer.training.determinism import Tensors

FILE_MODE = 0o644
"""safetensors creates files readable by their owner only, but the serving container may run as another user."""


@dataclass(frozen=True)
class WeightsFormat:
    """The files from which PEFT or transformers loads trained weights."""

    file: str
    """Name of the safetensors file."""
    others: Mapping[str, bytes]
    """The files beside it, by name. Their bytes are the same in any process."""

    def write(self, weights: Tensors, folder: Path) -> None:
        """Write the files; raise OSError if that fails."""
        save_tensors(weights, folder / self.file)
        for name, content in self.others.items():
            (folder / name).write_bytes(content)


@dataclass(frozen=True)
class Trainable:
    """A loaded model, prepared by a method of training."""

    module: Any
    """A model of transformers, or PEFT's around one."""
    weights: Tensors
    """What is saved: tensors by their names in the file, which share memory with the parameters that are trained."""
    format: WeightsFormat


def save_tensors(tensors: Tensors, path: Path) -> None:
    """Write a safetensors file; raise OSError if that fails."""
    try:
        save_file(tensors, os.fspath(path), metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path.name}: {error}") from error
    path.chmod(FILE_MODE)
