"""Sources: resolve a manifest's URI to a path on this machine, downloading from the Hugging Face hub if needed."""

from pathlib import Path

from finetune_trainer.contract import Environment
from finetune_trainer.contract.environment import InvalidLocation, NotMounted
from finetune_trainer.runtime.errors import ConfigInvalid, CredentialsRejected, ServiceUnavailable, SourceNotFound

TOKENIZER_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]
"""Patterns of a tokenizer's files, including its chat template and the model's configuration."""


def locate(uri: str, environment: Environment) -> Path:
    """Return the path of a pvc://, file:// or relative URI; the path need not exist.

    Raise SourceNotFound if the claim is not mounted, and ConfigInvalid if the URI names no path here.
    """
    try:
        return environment.locate(uri)
    except NotMounted as error:
        raise SourceNotFound(str(error)) from None
    except InvalidLocation as error:
        raise ConfigInvalid(str(error)) from None


def locate_existing(uri: str, environment: Environment) -> Path:
    """Return the path like `locate`, but raise SourceNotFound if it does not exist."""
    path = locate(uri, environment)
    if not path.exists():
        raise SourceNotFound(f"{uri}: {path} does not exist; correct the URI or create the file")
    return path


def fetch_model(uri: str, revision: str | None, environment: Environment) -> Path:
    """Return the folder of a model; download the model first if the URI is hf://ORG/NAME.

    Raise SourceNotFound, ConfigInvalid, CredentialsRejected or ServiceUnavailable.
    """
    if not uri.startswith("hf://"):
        folder = locate_existing(uri, environment)
        if not (folder / "config.json").is_file():
            raise SourceNotFound(f"{uri}: {folder} is not a model in Hugging Face format: it has no config.json")
        return folder
    return _from_hub(uri.removeprefix("hf://"), None, revision)


def fetch_tokenizer(uri: str, revision: str | None, environment: Environment) -> Path:
    """Return the folder of a model like `fetch_model`, but download only the tokenizer's files, not the weights."""
    if not uri.startswith("hf://"):
        return fetch_model(uri, revision, environment)
    return _from_hub(uri.removeprefix("hf://"), None, revision, only=TOKENIZER_FILES)


def fetch_dataset(uri: str, revision: str | None, environment: Environment) -> Path:
    """Return the file of a data set; download it if the URI is hf://ORG/NAME/PATH. Raise like `fetch_model`."""
    if not uri.startswith("hf://"):
        return locate_existing(uri, environment)
    match uri.removeprefix("hf://").split("/", 2):
        case [organisation, name, path]:
            return _from_hub(f"{organisation}/{name}", path, revision)
        case _:
            raise ConfigInvalid(f"{uri} names no file of the data set; use hf://ORG/NAME/PATH")


def _from_hub(repository: str, file: str | None, revision: str | None, only: list[str] | None = None) -> Path:
    from huggingface_hub import hf_hub_download, snapshot_download  # noqa: PLC0415  needed only for hf:// URIs
    from huggingface_hub.errors import (  # noqa: PLC0415
        EntryNotFoundError,
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        if file is None:
            return Path(snapshot_download(repository, revision=revision, allow_patterns=only))
        return Path(hf_hub_download(repository, file, repo_type="dataset", revision=revision))
    except GatedRepoError as error:
        raise CredentialsRejected(
            f"hf://{repository}: access denied; use a token of an account with access: {error}"
        ) from error
    except LocalEntryNotFoundError as error:
        raise ServiceUnavailable(
            f"hf://{repository}: the hub does not respond and the cache has no copy: {error}"
        ) from error
    except (RepositoryNotFoundError, RevisionNotFoundError, EntryNotFoundError) as error:
        raise SourceNotFound(f"hf://{repository}: {error}") from error
    except OSError as error:
        raise ServiceUnavailable(f"hf://{repository}: {error}") from error
