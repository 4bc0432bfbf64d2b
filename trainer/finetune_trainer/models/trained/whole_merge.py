"""The base model with an adapter merged into it, all in memory: for adapters that cannot be merged layer by layer."""

from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers.core_model_loading import revert_weight_conversion
from typing_extensions import override

from finetune_trainer.models.loading import load_base
from finetune_trainer.models.trained.merged_weights import NotSeparable, mismatch
from finetune_trainer.models.trained.published_weights import PublishedWeights
from finetune_trainer.models.trained.tied_layers import tied_layers
from finetune_trainer.runtime.errors import ConfigInvalid
from finetune_trainer.runtime.foreign_warnings import without_deprecations
from finetune_trainer.runtime.progress.progress import log_line


class WholeMerge(PublishedWeights):
    """The merged model in fp32, as tensors by the names in the base model's files.

    It takes memory for the model in fp32. Raises ConfigInvalid if the merge would also change a layer that shares its
    weight with an adapted layer.
    """

    def __init__(
        self,
        model_folder: Path,
        adapter: Path,
        dtype: torch.dtype,
        reason: NotSeparable,
    ) -> None:
        super().__init__(model_folder, dtype)
        model = with_adapter(model_folder, adapter, torch.float32)
        _check_shared(model, reason)
        log_line(f"merging in memory, because {reason}")
        self._model = model.merge_and_unload(safe_merge=True)
        # transformers remembers how it joined the tensors of the files, and separates them again.
        self._tensors = revert_weight_conversion(
            self._model, dict(self._model.named_parameters())
        )
        unknown = self._tensors.keys() - self._sources.keys()
        if unknown:
            raise mismatch(model_folder, f"the files have no tensor {min(unknown)}")
        self.changed = frozenset(
            name
            for name, tensor in self._tensors.items()
            if not torch.equal(self._stored.read(name).float(), tensor)
        )

    @override
    def _read_changed(self, name: str) -> torch.Tensor:
        return self._tensors[name].detach()

    @override
    def load_into(self, model: Any) -> None:
        for name, parameter in model.named_parameters():
            parameter.data = self._model.get_parameter(name).to(parameter.dtype)


# PEFT asks transformers for it.
@without_deprecations("is_gradient_checkpointing")
def with_adapter(model_folder: Path, adapter: Path, dtype: torch.dtype) -> Any:
    """Load the base model with the adapter attached; the adapter's own weights stay fp32."""
    base = load_base(model_folder, dtype)
    try:
        return PeftModel.from_pretrained(base, str(adapter)).eval()
    except (ValueError, KeyError, RuntimeError) as error:
        raise mismatch(model_folder, error) from error


def _check_shared(model: Any, reason: NotSeparable) -> None:
    """Raise ConfigInvalid if an adapted layer shares its weight with another layer."""
    base = model.get_base_model()
    # PEFT would merge a shared weight twice, or for both layers, and so publish another model than the trained model.
    for name in tied_layers(base) or ():
        if hasattr(base.get_submodule(name), "lora_A"):
            raise ConfigInvalid(
                f"{name} shares its weight with another layer and cannot be merged alone, because {reason}: "
                "remove it from train.lora.targetModules"
            )
