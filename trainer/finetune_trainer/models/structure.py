"""A model without its weights: its layers on the meta device, and whether stored weights would fit into them."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.logging import disable_progress_bar

from finetune_trainer.models.loading import check_loading_info, load_config
from finetune_trainer.models.stored_weights import StoredWeights
from finetune_trainer.runtime.errors import ConfigInvalid, short_reason


def load_structure(folder: Path, uri: str) -> Any:
    """Return the model that config.json describes, on the meta device; raise ConfigInvalid if there is none."""
    config = load_config(folder, uri)
    disable_progress_bar()
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:
        # Its own check of config.json stops at nothing: a wrong number ends as an error of any kind.
        raise ConfigInvalid(
            f"{uri or folder}: config.json describes no model ({short_reason(error)}): "
            "use config.json and weights of the same model"
        ) from error


def layers_of(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the decoder layers of a model; none if its architecture in transformers has no such layers."""
    return [
        layer
        for layer in module.modules()
        if isinstance(layer, GradientCheckpointingLayer)
    ]


def no_layers(architecture: str) -> ConfigInvalid:
    """Return the error of an architecture without decoder layers."""
    return ConfigInvalid(
        f"train.compile: {architecture} has no layers to compile: set it to false"
    )


def no_checkpointing(architecture: str) -> ConfigInvalid:
    """Return the error of an architecture that cannot recompute its activations."""
    return ConfigInvalid(
        f"train.gradientCheckpointing: {architecture} does not support it: set it to false"
    )


def check_stored_weights(folder: Path, uri: str, structure: Any) -> None:
    """Raise ConfigInvalid if the stored weights do not fit into the model; only their headers are read."""
    stored = StoredWeights(folder).meta
    try:
        _, loading_info = type(structure).from_pretrained(
            None,
            config=structure.config,
            state_dict=dict(stored),
            dtype=torch.float32,
            device_map="meta",
            # As errors they would not name the weight.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except Exception:  # noqa: BLE001  transformers may need a value to convert weights, so nothing is known
        return
    check_loading_info(loading_info, uri or str(folder))
