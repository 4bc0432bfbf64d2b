"""The published generation_config.json: how servers generate with the model."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers.utils import GENERATION_CONFIG_NAME

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def generation_config(base: Path, end_tokens: Iterable[int]) -> dict[str, Any]:
    """Return the base model's generation config, in which generation also ends at `end_tokens`.

    A base model whose EOS differs from the token that ends a turn would otherwise never stop. Without a
    generation_config.json, transformers derives one from config.json, and so does this function.
    """
    config = _config_of(base)
    known = config.get("eos_token_id")
    ends = all_end_tokens(known, end_tokens)
    before = known if isinstance(known, list) else [known]
    if set(ends) == set(before):
        return config
    # A list only if there are several tokens, as the configs of base models have it.
    if len(ends) > 1:
        config["eos_token_id"] = ends
    elif ends:
        config["eos_token_id"] = ends[0]
    return config


def _config_of(base: Path) -> dict[str, Any]:
    path = base / GENERATION_CONFIG_NAME
    config: dict[str, Any]
    if path.is_file():
        config = json.loads(path.read_bytes())
        return config
    model_config = json.loads((base / "config.json").read_bytes())
    # A multimodal model has its token ids in text_config.
    values = {**model_config.get("text_config", {}), **model_config}
    config = {}
    for name in TOKEN_IDS:
        if values.get(name) is not None:
            config[name] = values[name]
    return config


def all_end_tokens(
    known: int | list[int] | None, end_tokens: Iterable[int]
) -> list[int]:
    """Return `end_tokens` and the tokens that a generation config names already, each once."""
    before = known if isinstance(known, list) else [known]
    tokens = [token for token in (*end_tokens, *before) if token is not None]
    # A dict, unlike a set, keeps the order: the file must be the same in every push.
    return list(dict.fromkeys(tokens))
