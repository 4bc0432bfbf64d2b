"""The weights of a model of which training changed all weights."""

from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from finetune_trainer.models.loading import load_config
from finetune_trainer.models.published_weights import PublishedWeights
from finetune_trainer.models.stored_weights import StoredWeights
from finetune_trainer.runtime.errors import ConfigInvalid


class FullWeights(PublishedWeights):
    """The tensors that training stored in fp32; buffers, which it does not change, are the base model's."""

    def __init__(self, model_folder: Path, trained: Path, dtype: torch.dtype) -> None:
        super().__init__(model_folder, dtype)
        self._trained = StoredWeights(trained)
        self.changed = frozenset(self._trained.meta)

    @override
    def _read_changed(self, name: str) -> torch.Tensor:
        return self._trained.read(name)

    @override
    def load_into(self, model: Any) -> None:
        for name, stored_name in stored_names(model, self._folder).items():
            # Set the data, so that layers that share the parameter stay tied.
            model.get_parameter(name).data = self.read(stored_name)


def stored_names(model: Any, folder: Path) -> dict[str, str]:
    """Return parameter name -> name of its tensor in the model's files.

    Raises ConfigInvalid if transformers builds a parameter from several stored tensors, as it does with experts.
    """
    stored = StoredWeights(folder).meta
    prefix = f"{model.base_model_prefix}."
    names = {}
    for name, parameter in model.named_parameters():
        # The files may name a tensor with or without the prefix of the base model.
        candidates = (name, name.removeprefix(prefix), prefix + name)
        matching = [candidate for candidate in candidates if candidate in stored]
        if not matching or stored[matching[0]].shape != parameter.shape:
            raise ConfigInvalid(
                f"train.method Full: {name} is not stored as one tensor in {folder}, as in models with fused experts: "
                "set train.method to LoRA"
            )
        names[name] = matching[0]
    return names


def config_of(folder: Path) -> bytes:
    """Return the bytes of config.json for weights in fp32."""
    config = load_config(folder)
    config.dtype = torch.float32
    text: str = config.to_json_string(use_diff=True)
    return text.encode()
