"""Data sets on this machine: files found where they are, or downloaded to the workspace."""

from dataclasses import dataclass
from pathlib import Path

from finetune_trainer.contract import DatasetSource, Environment
from finetune_trainer.contract.environment import is_pattern
from finetune_trainer.contract.uris import without_secrets
from finetune_trainer.runtime.errors import ConfigInvalid, SourceNotFound
from finetune_trainer.runtime.sources import locate, locate_existing
from finetune_trainer.stores.download import fetch
from finetune_trainer.stores.fetching import CACHE
from finetune_trainer.stores.schemes import open_source

MOST_NAMES = 10
"""Files of a folder that a message names."""


@dataclass(frozen=True)
class DataFile:
    """One file of a data set, on this machine."""

    path: Path
    name: str
    """Where it is from: path segments separated by /, for messages."""


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
        source.uri, "dataset", revision=source.revision, config=source.config, split=source.split
    )
    if store is None:
        local = _local_files(source.uri, environment)
        return FetchedDataset(
            tuple(DataFile(_data_file(found, environment), found) for found in local), None
        )
    folder, listing = fetch(store, None, environment.workspace / CACHE)
    shown = without_secrets(source.uri)
    files = tuple(
        DataFile(folder / file.name, _name_of(shown, file.name)) for file in listing.files
    )
    return FetchedDataset(files, listing.pin)


def _name_of(uri: str, file: str) -> str:
    parent, _, last = uri.rpartition("/")
    if last == file:
        return uri
    return f"{parent if is_pattern(last) else uri}/{file}"


def _local_files(uri: str, environment: Environment) -> list[str]:
    """Return the URIs of the files that a URI or a pattern names; raise SourceNotFound if there are none."""
    path = locate(uri, environment)
    try:
        found = environment.matches(uri)
    except OSError as error:
        raise SourceNotFound(
            f"{uri}: {path.parent} cannot be listed: {error.strerror}; correct the URI"
        ) from None
    if not found:
        names = sorted(entry.name for entry in path.parent.iterdir())
        more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        held = f"holds {', '.join(names[:MOST_NAMES])}{more}" if names else "is empty"
        raise SourceNotFound(
            f"{uri}: no file matches {path.name}; {path.parent} {held}: correct the URI"
        )
    return found


def _data_file(uri: str, environment: Environment) -> Path:
    path = locate_existing(uri, environment)
    if path.is_dir():
        raise ConfigInvalid(
            f"{uri} is a folder: name a file in it, or several by a pattern such as {uri}/*.jsonl"
        )
    return path
