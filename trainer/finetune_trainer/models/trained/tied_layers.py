"""The embedding and the output head of a model, which may share a weight."""

from typing import Any


def tied_layers(model: Any) -> tuple[str, str] | None:
    """Return the names of embedding and output head if they share a weight."""
    head = model.get_output_embeddings()
    if head is None or not model.config.get_text_config().tie_word_embeddings:
        return None
    names = {module: name for name, module in model.named_modules()}
    return names[model.get_input_embeddings()], names[head]
