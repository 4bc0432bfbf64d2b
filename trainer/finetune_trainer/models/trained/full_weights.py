"""The weights of a model of which training changed all weights."""

from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from finetune_trainer.models.language_model import is_multimodal, language_names
from finetune_trainer.models.loading import empty_model, load_config
from finetune_trainer.models.stored_weights import StoredWeights
from finetune_trainer.models.trained.parameter_names import stored_names_of
from finetune_trainer.models.trained.published_weights import PublishedWeights
from finetune_trainer.models.trained.tied_layers import tied_layers
from finetune_trainer.runtime.errors import ConfigInvalid


class FullWeights(PublishedWeights):
    """The tensors that training stored in fp32; buffers, which it does not change, are the base model's."""

    def __init__(self, model_folder: Path, trained: Path, dtype: torch.dtype) -> None:
        super().__init__(model_folder, dtype)
        self._trained = StoredWeights(trained)
        self._copies = self._copies_of_tied()
        self.changed = frozenset({*self._trained.meta, *self._copies})

    def _copies_of_tied(self) -> dict[str, str]:
        """Return stored name of a second copy -> stored name of the trained tensor.

        Some base models store the weight of embedding and output head twice, and the model has one parameter for both.
        """
        model = empty_model(self._folder)
        stored = stored_names_of(model, self._stored.meta)
        names = [stored.get(f"{layer}.weight") for layer in tied_layers(model) or ()]
        trained = [name for name in names if name in self._trained.meta]
        if len(trained) != 1:
            return {}
        return {name: trained[0] for name in names if name and name != trained[0]}

    @override
    def _read_changed(self, name: str) -> torch.Tensor:
        return self._trained.read(self._copies.get(name, name))

    @override
    def load_into(self, model: Any) -> None:
        for name, stored_name in trained_names(model, self._folder).items():
            # Set the data, so that layers that share the parameter stay tied.
            model.get_parameter(name).data = self.read(stored_name)


def trained_names(model: Any, folder: Path) -> dict[str, str]:
    """Return name of each parameter that training changes -> name of its tensor in the model's files.

    These are the parameters of a multimodal model's language model. Raise ConfigInvalid if transformers builds one of
    them from several stored tensors, as it does with experts.
    """
    stored = stored_names_of(model, StoredWeights(folder).meta)
    layers = language_names(model)
    names = {}
    for name, _ in model.named_parameters():
        if is_multimodal(model) and name.rpartition(".")[0] not in layers:
            continue
        if name not in stored:
            raise ConfigInvalid(
                f"train.method Full: {name} is not stored as one tensor in {folder}, as in models with fused experts: "
                "set train.method to LoRA"
            )
        names[name] = stored[name]
    return names


def config_of(folder: Path) -> bytes:
    """Return the bytes of config.json for weights in fp32."""
    config = load_config(folder)
    config.dtype = torch.float32
    text: str = config.to_json_string(use_diff=True)
    return text.encode()
