"""Check a folder before it is published: it loads, and it is the base model in everything that training left alone."""

import json
from pathlib import Path
from typing import Any

from peft import PeftConfig
from transformers import AutoTokenizer
from transformers.utils import CONFIG_NAME

from finetune_trainer.models.loading import UNREADABLE, empty_model
from finetune_trainer.models.stored_weights import StoredWeights
from finetune_trainer.models.trained.published_weights import DTYPE_KEYS
from finetune_trainer.runtime.errors import ConfigInvalid

CHANGED_KEYS = frozenset({*DTYPE_KEYS, "tie_word_embeddings", "auto_map"})
"""Keys of config.json whose values a merge changes."""
SAMPLE = "Is 1 + 1 = 2?\n\nYes, it is.  \u00c4\u4e2d\U0001f600"
"""Text that the published tokenizer must read as the base model's does: words, spaces, lines, other scripts."""


def check_published(folder: Path, base: Path) -> None:
    """Raise ConfigInvalid if a built model or adapter does not load, or differs from the base model by mistake."""
    try:
        if (folder / CONFIG_NAME).exists():
            _check_weights(folder, base)
            _check_config(folder, base)
            empty_model(folder)
        else:
            PeftConfig.from_pretrained(str(folder))
        _check_tokenizer(folder, base)
    except UNREADABLE as error:
        raise _refusal(f"it cannot be loaded: {error}") from error


def _check_weights(folder: Path, base: Path) -> None:
    """Compare names and shapes of all tensors. If a shared weight was adapted, the output head is new."""
    published = StoredWeights(folder).meta
    stored = StoredWeights(base).meta
    missing = stored.keys() - published.keys()
    if missing:
        raise _refusal(f"the tensor {min(missing)} is missing")
    new = published.keys() - stored.keys()
    is_untied = _config(folder).get("tie_word_embeddings") is False
    if len(new) > int(is_untied):
        raise _refusal(f"the tensor {min(new)} is new")
    for name, tensor in stored.items():
        if published[name].shape != tensor.shape:
            shapes = f"{list(published[name].shape)}, not {list(tensor.shape)}"
            raise _refusal(f"the tensor {name} has the shape {shapes}")


def _check_config(folder: Path, base: Path) -> None:
    """Compare all keys of config.json but the keys that a merge sets."""
    published = _settled(_config(folder))
    stored = _settled(_config(base))
    differing = [
        key
        for key in published.keys() | stored.keys()
        if published.get(key) != stored.get(key)
    ]
    if differing:
        raise _refusal(f"the key {min(differing)} of config.json has changed")


def _check_tokenizer(folder: Path, base: Path) -> None:
    """Compare the tokens of a text."""
    published = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    stored = AutoTokenizer.from_pretrained(base, local_files_only=True)
    if published(SAMPLE).input_ids != stored(SAMPLE).input_ids:
        raise _refusal("its tokenizer makes other tokens of the same text")


def _config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / CONFIG_NAME).read_bytes())
    return config


def _settled(value: Any) -> Any:
    """Return a configuration without the keys that a merge sets, in its parts, too."""
    if not isinstance(value, dict):
        return value
    return {
        key: _settled(part) for key, part in value.items() if key not in CHANGED_KEYS
    }


def _refusal(reason: str) -> ConfigInvalid:
    return ConfigInvalid(
        f"push: the built model differs from its base model: {reason}; nothing was published: report this as a defect"
    )
