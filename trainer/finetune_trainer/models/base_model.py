"""The base model of a pipeline: its folder, and the digest to which checkpoints and adapters are bound.

The digest is computed once and kept in the workspace. A later stage compares sizes and times of the files with the
record, and reads only the files that differ.
"""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune_trainer.contract import Environment, ModelSource
from finetune_trainer.files import write_durably
from finetune_trainer.models.requirements import (
    ModelFiles,
    check_headers,
    check_model,
)
from finetune_trainer.models.stored_weights import weight_files
from finetune_trainer.runtime.artifacts import digest_file, digest_of_value
from finetune_trainer.runtime.errors import ConfigInvalid
from finetune_trainer.stores.model_files import fetch_model

# Not the weights alone: with another tokenizer or chat template the same weights get other tokens.
DIGESTED_FILES = (
    *(
        "config.json",
        "generation_config.json",
        "tokenizer*.json",
        "tekken.json",
        "chat_template.*",
        "*.jinja",
        "additional_chat_templates/*.jinja",
    ),
    *(
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.*",
        "merges.txt",
        "*.model",
        "*.tiktoken",
    ),
)
"""Patterns of a model's configuration and tokenizer. Other files, such as a license, may change."""
THREADS = 4
"""Files that are read at the same time to compute their digests."""


@dataclass(frozen=True)
class BaseModel:
    """A base model on this machine."""

    uri: str
    """URI in the manifest, for errors."""
    folder: Path
    digest: str
    """sha256:… over the weights, the configuration and the tokenizer."""
    pin: str | None = None
    """Identifies the content at the store; None for a folder on this machine."""

    def require(self, expected: object, product: str) -> None:
        """Raise ConfigInvalid if `product` was made with another base model; None as the digest means unknown."""
        if expected not in {None, self.digest}:
            raise ConfigInvalid(
                f"model {self.uri} has the digest {self.digest}, but {product} was made with {expected}: "
                "restore that model, or set model.revision to a new text to start from the beginning with this model"
            )


def open_base_model(
    source: ModelSource, environment: Environment, pin: str | None = None
) -> BaseModel:
    """Return the base model; download it to the workspace first if that was not done yet.

    `pin` comes from an earlier stage; None resolves the revision. Raise like `fetch_model`, and ConfigInvalid if the
    model cannot be trained.
    """
    fetched = fetch_model(source.uri, environment, revision=source.revision, pin=pin)
    # Before the digest, which reads all weights.
    files = ModelFiles.in_folder(source.uri, fetched.folder)
    check_model(files)
    check_headers(files)
    # A workspace may hold several models, and several revisions of each.
    key = hashlib.sha256(f"{source.uri}@{source.revision}".encode()).hexdigest()[:16]
    digest = model_digest(
        fetched.folder, environment.workspace / "models" / f"{key}.json"
    )
    return BaseModel(source.uri, fetched.folder, digest, fetched.pin)


def model_digest(folder: Path, record: Path) -> str:
    """Return sha256:… over names and contents of a model's files; read only files that changed since the record."""
    known = _read_record(record)
    files = _files_of(folder)
    with ThreadPoolExecutor(THREADS) as threads:
        digests = dict(
            zip(
                files,
                threads.map(
                    lambda path: _digest(
                        path, known.get(path.relative_to(folder).as_posix())
                    ),
                    files,
                ),
                strict=True,
            )
        )
    names = {path: path.relative_to(folder).as_posix() for path in files}
    entries = {
        names[path]: {"stat": _stat(path), "sha256": digest}
        for path, digest in digests.items()
    }
    if entries != known:
        write_durably(record, json.dumps(entries, indent=1, sort_keys=True).encode())
    contents = {names[path]: digest for path, digest in digests.items()}
    return digest_of_value(contents)


def _files_of(folder: Path) -> list[Path]:
    """Return the files of a model that determine what it computes, sorted; raise ConfigInvalid if a file is missing."""
    small = (
        path
        for pattern in DIGESTED_FILES
        for path in folder.glob(pattern)
        if path.is_file()
    )
    weights = weight_files(folder)
    missing = [path for path in weights if not path.is_file()]
    if missing:
        raise ConfigInvalid(
            f"{folder}: the index names {missing[0].name}, which does not exist: copy the whole model"
        )
    return sorted({*small, *weights})


def _digest(path: Path, known: dict[str, Any] | None) -> str:
    # To read every file at each start would cost 140 GB of reading for a model of 70 B parameters.
    if known and known["stat"] == _stat(path):
        return str(known["sha256"])
    return digest_file(path)


def _stat(path: Path) -> list[int]:
    """Return size and times of a file; a write changes the last of them, whatever other times are set to."""
    status = os.stat(path)  # noqa: PTH116  follows the links of the hub's cache
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _read_record(record: Path) -> dict[str, Any]:
    try:
        known = json.loads(record.read_bytes())
        return {
            name: entry
            for name, entry in known.items()
            if {"stat", "sha256"} <= entry.keys()
        }
    except (OSError, ValueError, AttributeError):
        # The record only saves time: without it all files are read again.
        return {}
