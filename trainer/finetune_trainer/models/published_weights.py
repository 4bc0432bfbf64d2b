"""The weights of a trained model, each computed when it is read, from what the base model and training stored.

A tensor that training changed is rounded once. All others keep their stored values.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from finetune_trainer.models.stored_weights import StoredWeights


class PublishedWeights(ABC):
    """The tensors of a trained model by their stored names."""

    is_untied = False
    """Whether embedding and output head have different weights, though not in the base model."""
    changed: frozenset[str]
    """Stored names of the tensors that training changed."""

    def __init__(self, model_folder: Path, dtype: torch.dtype) -> None:
        self._folder = model_folder
        self._dtype = dtype
        self._stored = StoredWeights(model_folder)
        self._main_dtype = _main_dtype(self._stored.meta.values())
        self._sources = {name: name for name in self._stored.meta}
        """Name in the trained model -> name in the base model."""

    @abstractmethod
    def _read_changed(self, name: str) -> torch.Tensor:
        """Return a tensor that training changed, in fp32."""

    @abstractmethod
    def load_into(self, model: Any) -> None:
        """Set what training changed in the base model, which has the dtype to publish."""

    @property
    def meta(self) -> dict[str, torch.Tensor]:
        """Shape and dtype of every tensor, as tensors without storage."""
        return {
            name: torch.empty_like(
                self._stored.meta[source], dtype=self._dtype_of(name)
            )
            for name, source in sorted(self._sources.items())
        }

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor of the trained model."""
        # safetensors saves contiguous tensors only.
        return self._read_unrounded(name).to(self._dtype_of(name)).contiguous()

    def _read_unrounded(self, name: str) -> torch.Tensor:
        if name in self.changed:
            return self._read_changed(name)
        return self._stored.read(self._sources[name])

    def config(self) -> dict[str, Any]:
        """Return the base model's config.json with the new dtype, without code to execute."""
        config: dict[str, Any] = json.loads((self._folder / "config.json").read_bytes())
        config.pop("auto_map", None)
        # Nested configurations, as of a multimodal model's text model, have a dtype of their own.
        config["dtype"] = self._dtype_name
        for part in (
            config,
            *(value for value in config.values() if isinstance(value, dict)),
        ):
            part |= {
                key: self._dtype_name for key in ("dtype", "torch_dtype") if key in part
            }
            if self.is_untied and (part is config or "tie_word_embeddings" in part):
                part["tie_word_embeddings"] = False
        return config

    @property
    def _dtype_name(self) -> str:
        return str(self._dtype).removeprefix("torch.")

    def _dtype_of(self, name: str) -> torch.dtype:
        """Return the published dtype of a tensor: `dtype`, unless the base model makes an exception of it."""
        stored = self._stored.meta[self._sources[name]].dtype
        if name in self.changed or stored == self._main_dtype:
            return self._dtype
        return stored


def _main_dtype(tensors: Iterable[torch.Tensor]) -> torch.dtype:
    """Return the floating-point dtype of most weights. A base model may store a few tensors in fp32 on purpose."""
    sizes: dict[torch.dtype, int] = {}
    for tensor in tensors:
        if tensor.is_floating_point():
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
    return max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)
