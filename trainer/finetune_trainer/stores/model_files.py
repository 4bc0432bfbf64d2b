"""Models on this machine: read in their place, or downloaded to a folder that all stages and attempts share."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from finetune_trainer.contract import Environment
from finetune_trainer.contract.environment import shared_downloads
from finetune_trainer.runtime.errors import SourceNotFound
from finetune_trainer.runtime.sources import locate_existing
from finetune_trainer.stores.download import ALL_FILES, fetch
from finetune_trainer.stores.schemes import open_source

# Repositories often hold the same weights in other formats, too, which nothing here reads.
TEMPLATE_FILES = ("*.jinja", "*chat_templates/*.jinja")
"""Patterns of the files with chat templates."""
MODEL_FILES = (
    *(
        "*.json",
        "*.model",
        "tokenizer.model.*",
        "*.tiktoken",
        "*.txt",
        "vocab.bpe",
    ),
    *(*TEMPLATE_FILES, "model*.safetensors*"),
)
"""Patterns of the files that stages read."""
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
"""Names of an adapter's files in PEFT's format."""
CACHE = "sources"
"""Folder of the workspace for all downloads."""


@dataclass(frozen=True)
class FetchedModel:
    """A model on this machine."""

    folder: Path
    pin: str | None
    """Identifies the content at the store; None for a folder on this machine."""


def fetch_model(
    uri: str,
    environment: Environment,
    *,
    revision: str | None = None,
    pin: str | None = None,
    wanted: Sequence[str] = MODEL_FILES,
) -> FetchedModel:
    """Return a model; download it if it is in a store. With a pin, only that content is used.

    Raise SourceNotFound, ConfigInvalid, DataInvalid, CredentialsRejected or ServiceUnavailable.
    """
    fetched = _fetch(uri, environment, revision, pin, wanted)
    if not (fetched.folder / "config.json").is_file():
        raise SourceNotFound(
            f"{uri}: {fetched.folder} is not a model in Hugging Face format: it has no config.json"
        )
    return fetched


def fetch_adapter(
    uri: str,
    environment: Environment,
    *,
    revision: str | None = None,
    pin: str | None = None,
) -> FetchedModel:
    """Return an adapter's folder, in the same way. Raise like `fetch_model`."""
    fetched = _fetch(uri, environment, revision, pin, ADAPTER_FILES)
    for name in ADAPTER_FILES:
        if not (fetched.folder / name).is_file():
            raise SourceNotFound(
                f"{uri}: {fetched.folder} is no adapter in PEFT's format: it has no {name}"
            )
    return fetched


def _fetch(
    uri: str,
    environment: Environment,
    revision: str | None,
    pin: str | None,
    wanted: Sequence[str],
) -> FetchedModel:
    source = open_source(uri, "model", revision=revision)
    if source is None:
        return FetchedModel(locate_existing(uri, environment), None)
    cache = download_folder(environment)
    folder, listing = fetch(source, pin, cache, wanted)
    return FetchedModel(folder, listing.pin)


def download_folder(environment: Environment) -> Path:
    """Return the folder for downloads: in the workspace; for local runs, a folder that all runs of the user share."""
    shared = shared_downloads(os.environ)
    # Only a local run has a folder with its manifest.
    if environment.manifest_dir is None or shared is None:
        return environment.workspace / CACHE
    return shared


def fetch_published(uri: str, environment: Environment) -> Path:
    """Return the folder of a model that push has published, with all its files. Raise like `fetch_model`."""
    return fetch_model(uri, environment, wanted=ALL_FILES).folder
