"""Data sets on this machine: files that are read in their place, or downloaded to the workspace."""

from dataclasses import dataclass
from pathlib import Path

from finetune_trainer.contract import DatasetSource, Environment
from finetune_trainer.contract.environment import is_pattern
from finetune_trainer.contract.uris import without_secrets
from finetune_trainer.runtime.errors import ConfigInvalid, SourceNotFound
from finetune_trainer.runtime.sources import locate, locate_existing
from finetune_trainer.stores.download import fetch
from finetune_trainer.stores.model_files import download_folder
from finetune_trainer.stores.schemes import open_source

# Enough to show how the files are named; a folder may have thousands.
MOST_NAMES = 10
"""Files of a folder that a message names."""


@dataclass(frozen=True)
class DataFile:
    """One file of a data set, on this machine."""

    path: Path
    name: str
    """Origin of the file: path segments separated by /, for messages."""


@dataclass(frozen=True)
class FetchedDataset:
    """A data set on this machine."""

    files: tuple[DataFile, ...]
    """Its files in the order in which they are read, at least one."""
    pin: str | None
    """Identifies the content at the store; None for files of this machine."""


def fetch_dataset(source: DatasetSource, environment: Environment) -> FetchedDataset:
    """Return a data set; download it if it is in a store.

    The last segment of a path may be a pattern. Raise SourceNotFound, ConfigInvalid, DataInvalid, CredentialsRejected
    or ServiceUnavailable.
    """
    store = open_source(
        source.uri,
        "dataset",
        revision=source.revision,
        config=source.config,
        split=source.split,
    )
    if store is None:
        uris = _local_files(source.uri, environment)
        local = [DataFile(_data_file(uri, environment), uri) for uri in uris]
        return FetchedDataset(tuple(local), None)
    cache = download_folder(environment)
    folder, listing = fetch(store, None, cache)
    # Names of files appear in the log and in errors of records.
    shown = without_secrets(source.uri)
    files = []
    for file in listing.files:
        name = _name_of(shown, file.name)
        files.append(DataFile(folder / file.name, name))
    return FetchedDataset(tuple(files), listing.pin)


def _name_of(uri: str, file: str) -> str:
    """Return the URI of one file of a data set. The URI of the set may be the file itself, a folder or a pattern."""
    parent, _, last = uri.rpartition("/")
    if last == file:
        return uri
    if is_pattern(last):
        return f"{parent}/{file}"
    return f"{uri}/{file}"


def _local_files(uri: str, environment: Environment) -> list[str]:
    """Return the URIs of the files that a URI or a pattern names; raise SourceNotFound if there are none."""
    path = locate(uri, environment)
    try:
        matches = environment.matches(uri)
    except OSError as error:
        raise SourceNotFound(
            f"{uri}: {path.parent} cannot be listed: {error.strerror}; correct the URI"
        ) from None
    if not matches:
        raise SourceNotFound(
            f"{uri}: no file matches {path.name}; {path.parent} {_content(path.parent)}: correct the URI"
        )
    return matches


def _content(folder: Path) -> str:
    """Return in words which files a folder has."""
    names = sorted(entry.name for entry in folder.iterdir())
    if not names:
        return "is empty"
    text = f"holds {', '.join(names[:MOST_NAMES])}"
    more = len(names) - MOST_NAMES
    if more > 0:
        text += f" and {more} more"
    return text


def _data_file(uri: str, environment: Environment) -> Path:
    path = locate_existing(uri, environment)
    if path.is_dir():
        raise ConfigInvalid(
            f"{uri} is a folder: name a file in it, or several by a pattern such as {uri}/*.jsonl"
        )
    return path
