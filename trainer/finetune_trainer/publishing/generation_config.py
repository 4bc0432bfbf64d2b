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
    path = base / GENERATION_CONFIG_NAME
    config: dict[str, Any] = json.loads(
        (path if path.is_file() else base / "config.json").read_bytes()
    )
    if not path.is_file():
        config = {
            **config.get("text_config", {}),
            **config,
        }  # a multimodal model has its token ids in there
        config = {name: config[name] for name in TOKEN_IDS if config.get(name) is not None}
    ends = all_end_tokens(config.get("eos_token_id"), end_tokens)
    return config | ({"eos_token_id": ends if len(ends) > 1 else ends[0]} if ends else {})


def all_end_tokens(known: int | list[int] | None, end_tokens: Iterable[int]) -> list[int]:
    """Return `end_tokens` and the tokens that a generation config names already, each once."""
    before = known if isinstance(known, list) else [known]
    return list(dict.fromkeys(token for token in (*end_tokens, *before) if token is not None))
