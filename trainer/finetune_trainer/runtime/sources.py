"""From a manifest's URI to a path on this machine."""

from pathlib import Path

from finetune_trainer.contract import Environment
from finetune_trainer.contract.environment import InvalidLocation, NotMounted
from finetune_trainer.runtime.errors import ConfigInvalid, CredentialsRejected, ServiceUnavailable, SourceNotFound

TOKENIZER_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]
"""What a tokenizer is made of, its chat template and the model's configuration included."""


def locate(uri: str, environment: Environment) -> Path:
    """Give the path that a pvc://, file:// or relative URI names, whether or not something is there.

    Raises SourceNotFound where its claim is not mounted, ConfigInvalid where it cannot mean a path here.
    """
    try:
        return environment.locate(uri)
    except NotMounted as error:
        raise SourceNotFound(str(error)) from None
    except InvalidLocation as error:
        raise ConfigInvalid(str(error)) from None


def locate_existing(uri: str, environment: Environment) -> Path:
    """Like `locate`, but raise SourceNotFound where nothing is there."""
    path = locate(uri, environment)
    if not path.exists():
        raise SourceNotFound(f"{uri}: there is no {path}")
    return path


def fetch_model(uri: str, revision: str | None, environment: Environment) -> Path:
    """Give the folder of a model, downloading it where the URI is hf://ORG/NAME.

    Raises SourceNotFound, CredentialsRejected or ServiceUnavailable.
    """
    if not uri.startswith("hf://"):
        folder = locate_existing(uri, environment)
        if not (folder / "config.json").is_file():
            raise SourceNotFound(f"{uri}: {folder} holds no config.json, so it is no model in Hugging Face format")
        return folder
    return _from_hub(uri.removeprefix("hf://"), None, revision)


def fetch_tokenizer(uri: str, revision: str | None, environment: Environment) -> Path:
    """Like `fetch_model`, but leave the weights, which may be a thousand times larger, on the hub."""
    if not uri.startswith("hf://"):
        return fetch_model(uri, revision, environment)
    return _from_hub(uri.removeprefix("hf://"), None, revision, only=TOKENIZER_FILES)


def fetch_dataset(uri: str, revision: str | None, environment: Environment) -> Path:
    """Give a data set's file, downloading it where the URI is hf://ORG/NAME/PATH; raises like `fetch_model`."""
    if not uri.startswith("hf://"):
        return locate_existing(uri, environment)
    match uri.removeprefix("hf://").split("/", 2):
        case [organisation, name, path]:
            return _from_hub(f"{organisation}/{name}", path, revision)
        case _:
            raise ConfigInvalid(f"{uri}: name a file of the data set: hf://ORG/NAME/PATH")


def _from_hub(repository: str, file: str | None, revision: str | None, only: list[str] | None = None) -> Path:
    from huggingface_hub import hf_hub_download, snapshot_download  # noqa: PLC0415  only where a hub is asked
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
        raise CredentialsRejected(f"hf://{repository}: needs a token that was granted access: {error}") from error
    except LocalEntryNotFoundError as error:
        raise ServiceUnavailable(
            f"hf://{repository}: the hub does not answer and nothing is cached: {error}"
        ) from error
    except (RepositoryNotFoundError, RevisionNotFoundError, EntryNotFoundError) as error:
        raise SourceNotFound(f"hf://{repository}: {error}") from error
    except OSError as error:
        raise ServiceUnavailable(f"hf://{repository}: {error}") from error
