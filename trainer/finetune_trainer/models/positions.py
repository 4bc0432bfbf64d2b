"""The longest text and the number of tokens that a model supports, by its config.json."""

from collections.abc import Mapping
from typing import Any

POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len")
"""Keys of config.json with the number of positions: of most models, of GPT-2's kind, of MPT's kind."""
SCALED_TYPES = frozenset({"linear", "dynamic", "yarn"})
"""Kinds of RoPE scaling whose factor may not be in the number of positions yet."""


def positions_of(config: Mapping[str, Any]) -> int | None:
    """Return the largest number of positions that the model supports; None if it has no limit."""
    text = text_config(config)
    for key in POSITION_KEYS:
        stated = _count(text.get(key))
        if stated:
            return max(stated, _scaled_positions(text, stated))
    return None


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of config.json about the language model, which is all of it for a model of text alone."""
    part = config.get("text_config")
    if isinstance(part, Mapping):
        return part
    return config


def embeddings_of(config: Mapping[str, Any]) -> int | None:
    """Return the number of rows of the model's embedding by its config.json; None if it names none."""
    size = text_config(config).get("vocab_size", config.get("vocab_size"))
    return _count(size)


def _scaled_positions(text: Mapping[str, Any], stated: int) -> int:
    """Return the positions after RoPE scaling, 0 if it does not add any."""
    scaling = text.get("rope_scaling") or text.get("rope_parameters")
    if not isinstance(scaling, Mapping):
        return 0
    kind = scaling.get("rope_type") or scaling.get("type")
    factor = scaling.get("factor")
    if kind not in SCALED_TYPES or not isinstance(factor, int | float):
        return 0
    original = _count(scaling.get("original_max_position_embeddings"))
    return int((original or stated) * factor)


def _count(value: object) -> int | None:
    """Return a positive whole number; None for any other value."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    return None
