"""Downloads from the Hugging Face hub to the workspace, which all stages and attempts share."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from finetune_trainer.files import write_durably
from finetune_trainer.runtime.errors import CredentialsRejected, ServiceUnavailable, SourceNotFound

SMALL_MODEL_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
"""Patterns of a model's configuration, tokenizer and chat template."""
MODEL_FILES = [*SMALL_MODEL_FILES, "model*.safetensors*"]
"""Patterns of the files that stages read. Repositories often hold the same weights in other formats, too."""
SUBFOLDERS = "*/*"


def download_model(repository: str, revision: str | None, cache: Path) -> Path:
    """Return the folder of a model in the cache; download what is missing.

    The first call resolves the revision. Later calls get the same commit without a request to the hub.
    Raise SourceNotFound, CredentialsRejected or ServiceUnavailable.
    """
    pin = cache / f"{repository}@{revision or 'main'}.commit".replace("/", "--")
    commit = pin.read_text() if pin.is_file() else None
    folder = _snapshot(repository, commit or revision, cache, local=commit is not None)
    if commit is None:
        _check_complete(repository, folder)
        write_durably(pin, folder.name.encode())  # last: it states that the download is complete
    return folder


def _check_complete(repository: str, folder: Path) -> None:
    """Raise SourceNotFound if a file of the model's index was not downloaded."""
    index = folder / "model.safetensors.index.json"
    names = set(json.loads(index.read_bytes())["weight_map"].values()) if index.is_file() else set()
    if missing := sorted(name for name in names if not (folder / name).is_file()):
        raise SourceNotFound(f"hf://{repository}: its index names {missing[0]}, which is not in the repository")


def _snapshot(repository: str, revision: str | None, cache: Path, *, local: bool) -> Path:
    with _hub_errors(repository):
        return Path(
            snapshot_download(
                repository,
                revision=revision,
                cache_dir=cache,
                allow_patterns=MODEL_FILES,
                ignore_patterns=SUBFOLDERS,
                local_files_only=local,
            )
        )


def download_file(repository: str, file: str, revision: str | None, cache: Path) -> Path:
    """Return a file of a data set in the cache; download it if it is missing. Raise like `download_model`."""
    with _hub_errors(repository):
        return Path(hf_hub_download(repository, file, repo_type="dataset", revision=revision, cache_dir=cache))


@contextmanager
def _hub_errors(repository: str) -> Iterator[None]:
    """Turn errors of the hub's library into stage errors."""
    try:
        yield
    except GatedRepoError as error:
        raise CredentialsRejected(
            f"hf://{repository}: access denied; use a token of an account with access: {error}"
        ) from error
    except LocalEntryNotFoundError as error:
        raise ServiceUnavailable(
            f"hf://{repository}: the hub does not respond and the workspace has no copy: {error}"
        ) from error
    except (RepositoryNotFoundError, RevisionNotFoundError, EntryNotFoundError) as error:
        raise SourceNotFound(f"hf://{repository}: {error}") from error
    except OSError as error:
        raise ServiceUnavailable(f"hf://{repository}: {error}") from error
