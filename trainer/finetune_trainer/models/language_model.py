"""The part of a multimodal model that reads text: its language model, without towers and projectors."""

from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedModel

OTHER_MODALITIES = ("vision_config", "audio_config", "vq_config")
"""Parts of a configuration that describe towers, also if the language model's settings are not in a part."""


def language_names(model: Any) -> frozenset[str]:
    """Return the names of the layers that learn from text: of a multimodal model, language model and output head.

    No gradient of a text reaches towers and projectors.
    """
    layers = {name: layer for name, layer in model.named_modules() if name}
    if not is_multimodal(model):
        return frozenset(layers)
    inside = {id(layer) for layer in _language_layers(model)}
    return frozenset(name for name, layer in layers.items() if id(layer) in inside)


def is_multimodal(model: Any) -> bool:
    """Return whether the model has other parts beside its language model, such as a vision tower."""
    config = model.config
    if config.get_text_config() is not config:
        return True
    return any(getattr(config, name, None) is not None for name in OTHER_MODALITIES)


def _language_layers(model: Any) -> Iterator[Any]:
    head = model.get_output_embeddings()
    if head is not None:
        yield head
    settings = type(model.config.get_text_config())
    for part in model.get_decoder().children():
        # Some decoders hold the towers beside their layers.
        towers = [
            layer
            for layer in part.modules()
            if isinstance(layer, PreTrainedModel)
            and not isinstance(layer.config, settings)
        ]
        if not towers:
            yield from part.modules()
