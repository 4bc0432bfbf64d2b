"""The weights of a trained model, each computed when it is read, from what the base model and training stored.

A tensor that training changed is rounded once. All others keep their stored values.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from finetune_trainer.models.finite import check_cast, is_finite
from finetune_trainer.models.stored_weights import StoredWeights
from finetune_trainer.runtime.errors import ConfigInvalid
from finetune_trainer.runtime.progress.progress import log_line

DTYPE_KEYS = ("dtype", "torch_dtype")
"""Keys of config.json for the data type of the weights: of transformers 5, and of releases before."""


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
        """Return a tensor of the trained model; raise ConfigInvalid if training or the cast made it infinite or NaN."""
        tensor = self._read_unrounded(name)
        rounded = tensor.to(self._dtype_of(name))
        if not is_finite(rounded):
            check_cast(tensor, rounded, name)
            self._check_is_of_base(name)
        # safetensors saves contiguous tensors only.
        return rounded.contiguous()

    def _read_unrounded(self, name: str) -> torch.Tensor:
        if name in self.changed:
            return self._read_changed(name)
        return self._stored.read(self._sources[name])

    def _check_is_of_base(self, name: str) -> None:
        """Log that a tensor with infinite or NaN values is the base model's; raise ConfigInvalid if it is trained."""
        if name in self.changed:
            raise ConfigInvalid(
                f"the trained {name} has infinite or NaN values: train again from a base model without such values, "
                "or with a lower train.optimizer.learningRate"
            )
        log_line(
            f"{name} has infinite or NaN values in the base model; they are kept as they are"
        )

    def config(self) -> dict[str, Any]:
        """Return the base model's config.json with the new dtype, without code to execute."""
        config: dict[str, Any] = json.loads((self._folder / "config.json").read_bytes())
        config.pop("auto_map", None)
        self._set_dtype(config)
        if self.is_untied:
            _untie(config)
        return config

    def _set_dtype(self, config: dict[str, Any]) -> None:
        """Set the published dtype under the keys that the base model uses."""
        replaced = {_name_of(self._main_dtype)}
        if not any(key in config for key in DTYPE_KEYS):
            if self._dtype == self._main_dtype:
                return
            # Every release of transformers reads this key.
            config["torch_dtype"] = self._dtype_name
        replaced.update(config[key] for key in DTYPE_KEYS if key in config)
        for part in _parts(config):
            for key in DTYPE_KEYS:
                # A part with another dtype, such as a tower in fp32, keeps it, as its weights do.
                if key in part and (part is config or part[key] in replaced):
                    part[key] = self._dtype_name

    @property
    def _dtype_name(self) -> str:
        return _name_of(self._dtype)

    def _dtype_of(self, name: str) -> torch.dtype:
        """Return the published dtype of a tensor: `dtype`, unless the base model makes an exception of it."""
        stored = self._stored.meta[self._sources[name]].dtype
        if name in self.changed or stored == self._main_dtype:
            return self._dtype
        return stored


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _parts(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Return a configuration and all configurations in it, such as of a multimodal model's language model."""
    yield config
    for value in config.values():
        if isinstance(value, dict):
            yield from _parts(value)


def _untie(config: dict[str, Any]) -> None:
    """Set that embedding and output head have weights of their own."""
    config["tie_word_embeddings"] = False
    # The default of a language model's part may be to tie them.
    for name, part in config.items():
        if isinstance(part, dict) and (
            name == "text_config" or "tie_word_embeddings" in part
        ):
            part["tie_word_embeddings"] = False


def _main_dtype(tensors: Iterable[torch.Tensor]) -> torch.dtype:
    """Return the floating-point dtype of most weights. A base model may store a few tensors in fp32 on purpose."""
    sizes: dict[torch.dtype, int] = {}
    for tensor in tensors:
        if tensor.is_floating_point():
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
    return max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)
