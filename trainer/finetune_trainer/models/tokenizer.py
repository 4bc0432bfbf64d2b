"""The tokenizer of a base model: loaded, or refused with what is missing; and its tokens beside the embeddings."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from finetune_trainer.models.requirements import ModelFiles, read_json
from finetune_trainer.runtime.errors import ConfigInvalid, short_reason

FAST = "tokenizer.json"
SLOW = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
    "tokenizer.tiktoken",
    "qwen.tiktoken",
)
"""Names of files that hold a tokenizer, but not for the library tokenizers."""
CREATE_FAST = "create tokenizer.json: load the tokenizer with AutoTokenizer of transformers, then call save_pretrained"
MAX_NAMED = 3


def load_tokenizer(uri: str, folder: Path) -> Any:
    """Return the model's fast tokenizer, or raise ConfigInvalid. Only a fast tokenizer returns token offsets."""
    files = ModelFiles.in_folder(uri, folder)
    check_tokenizer_files(files)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:
        # A damaged file ends as an error of any kind, such as the Exception of the library tokenizers.
        raise ConfigInvalid(f"{uri}: {_loading_problem(files, error)}") from error
    if not tokenizer.is_fast:
        raise ConfigInvalid(f"{uri}: has no fast tokenizer: {CREATE_FAST}")
    return tokenizer


def check_end(uri: str, folder: Path, tokenizer: Any) -> None:
    """Raise ConfigInvalid if the token that ends a text is in none of the tokenizer's files.

    transformers then adds it, with a number that the model has never read or written.
    """
    files = ModelFiles.in_folder(uri, folder)
    end = tokenizer.eos_token
    if end is None or FAST not in files.names:
        return
    if end in tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False):
        return
    if end in _added_tokens(files):
        return
    example = _end_of_model(files, tokenizer)
    raise ConfigInvalid(
        f"{uri}: eos_token is {end}, which is no token of {FAST}: "
        f"set eos_token in tokenizer_config.json to the token that ends the model's texts{example}"
    )


def _added_tokens(files: ModelFiles) -> set[str]:
    """Return the tokens that the files name beside the vocabulary."""
    entries = list(read_json(files, FAST).get("added_tokens") or ())
    if "tokenizer_config.json" in files.names:
        settings = read_json(files, "tokenizer_config.json")
        entries += (settings.get("added_tokens_decoder") or {}).values()
    tokens = {entry["content"] for entry in entries}
    if "added_tokens.json" in files.names:
        tokens |= read_json(files, "added_tokens.json").keys()
    return tokens


def _end_of_model(files: ModelFiles, tokenizer: Any) -> str:
    """Return the token with which config.json says that texts end, for a message; empty if there is none."""
    number = read_json(files, "config.json").get("eos_token_id")
    if isinstance(number, list) and number:
        number = number[0]
    if not isinstance(number, int):
        return ""
    token = tokenizer.backend_tokenizer.id_to_token(number)
    return f", such as {token}" if token and token != tokenizer.eos_token else ""


def check_tokenizer_files(files: ModelFiles) -> None:
    """Raise ConfigInvalid if the model has no file of a tokenizer.

    transformers would create a tokenizer without words for some types of models.
    """
    if FAST in files.names:
        if (files.folder / FAST).is_file():
            read_json(files, FAST)
        return
    if not _slow_files(files.names):
        raise ConfigInvalid(
            f"{files.uri}: has no tokenizer: copy tokenizer.json and tokenizer_config.json of the model"
        )


def _slow_files(names: Collection[str]) -> list[str]:
    return sorted(name for name in names if name in SLOW)


def _loading_problem(files: ModelFiles, error: Exception) -> str:
    """Return why the tokenizer cannot be loaded, with the fix."""
    settings = {}
    if "tokenizer_config.json" in files.names:
        settings = read_json(files, "tokenizer_config.json")
    if FAST not in files.names:
        return (
            f"has a slow tokenizer only ({_slow_files(files.names)[0]}): {CREATE_FAST}"
        )
    if settings.get("auto_map"):
        return "its tokenizer needs the code in its folder, which is never run: use a model without such code"
    return (
        f"its tokenizer cannot be loaded ({short_reason(error)}): "
        "copy tokenizer.json and tokenizer_config.json of the model again"
    )


def tokens_beyond(tokenizer: Any, embeddings: int) -> dict[str, int]:
    """Return the tokens whose ids have no embedding, with their ids and in their order.

    Models often have more embeddings than tokens. Fewer are a problem only if such a token occurs.
    """
    # Not by the number of tokens: the ids of some tokenizers have gaps.
    beyond = [
        (number, token)
        for token, number in tokenizer.get_vocab().items()
        if number >= embeddings
    ]
    return {token: number for number, token in sorted(beyond)}


def too_few_embeddings(beyond: dict[str, int], embeddings: int) -> str:
    """Return the sentence about a tokenizer with these tokens beyond the embeddings of its model."""
    tokens = list(beyond)
    named = ", ".join(tokens[:MAX_NAMED])
    if len(tokens) > MAX_NAMED:
        named += f" and {len(tokens) - MAX_NAMED} more"
    count = max(beyond.values()) + 1
    return f"the tokenizer has {count} tokens and the model {embeddings} embeddings, none for {named}"


RESIZE = (
    "resize the embeddings of the base with resize_token_embeddings of transformers and name them in "
    "lora.modulesToSave, or remove the tokens from the records"
)
"""How to use tokens that a model has no embeddings for."""
