"""The tensors in a model's safetensors files, each read by itself."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from finetune_trainer.runtime.errors import ConfigInvalid

DTYPE_NAMES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Names of dtypes in a safetensors header. Other dtypes belong to quantized weights."""

HEADER_START = 8
"""Bytes before the header of a safetensors file: its length."""
POINTER = b"version https://git-lfs"
"""The first bytes of a file that Git LFS has not downloaded."""


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that transformers loads from a model's folder, without duplicates, sorted."""
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if not index.is_file():
        return [path for path in [folder / SAFE_WEIGHTS_NAME] if path.is_file()]
    try:
        return sorted(
            {
                folder / name
                for name in json.loads(index.read_bytes())["weight_map"].values()
            }
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigInvalid(
            f"{index} cannot be read: {error!r}; use the index file of the model"
        ) from error


class StoredWeights:
    """All tensors of a model by their stored names; only the tensor that is being read is in memory."""

    def __init__(self, folder: Path) -> None:
        self.meta: dict[str, torch.Tensor] = {}
        """Shape and dtype of every tensor, as a tensor without storage."""
        self._files: dict[str, Path] = {}
        for path in weight_files(folder):
            self._add(path)

    def _add(self, path: Path) -> None:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  the file is no mapping
                    header = file.get_slice(name)
                    dtype = DTYPE_NAMES[header.get_dtype()]
                    self.meta[name] = torch.empty(
                        header.get_shape(), dtype=dtype, device="meta"
                    )
                    self._files[name] = path
        except KeyError as error:
            raise ConfigInvalid(
                f"{path} has weights of type {error}: use a base model that is not quantized"
            ) from None
        except (OSError, SafetensorError) as error:
            raise ConfigInvalid(
                f"{path} cannot be read: {damage_of(path) or error}; use intact safetensors files"
            ) from error

    def read(self, name: str) -> torch.Tensor:
        """Return a copy of a tensor."""
        # Opened for each tensor: closing the file releases its pages, which otherwise count as memory of the process.
        with safe_open(self._files[name], framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name).clone()
        return tensor


def damage_of(path: Path) -> str | None:
    """Return how a safetensors file is damaged; None if its beginning and its size are as they should be."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(HEADER_START)
        header = file.read(min(size, int.from_bytes(start, "little")))
    if (start + header).startswith(POINTER):
        return "it is a pointer of Git LFS, so run git lfs pull in the model's folder"
    if size < HEADER_START:
        return f"it has {size} bytes"
    try:
        tensors = json.loads(header)
        ends = [
            tensor["data_offsets"][1]
            for tensor in tensors.values()
            if "data_offsets" in tensor
        ]
        needed = HEADER_START + len(header) + max(ends, default=0)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return "its header is damaged, or it was not copied to its end"
    if size < needed:
        return f"it has {size:,} of {needed:,} bytes, so it was not copied to its end"
    return None
