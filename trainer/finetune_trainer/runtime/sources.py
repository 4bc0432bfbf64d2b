"""Sources: resolve a manifest's URI to a path on this machine, downloading from the Hugging Face hub if needed."""

from pathlib import Path

from finetune_trainer.contract import Environment
from finetune_trainer.contract.environment import InvalidLocation, NotMounted
from finetune_trainer.runtime.artifacts import is_present
from finetune_trainer.runtime.errors import ConfigInvalid, SourceNotFound


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
    if not is_present(path):
        raise SourceNotFound(f"{uri}: {path} does not exist; correct the URI or create the file")
    return path


def fetch_model(uri: str, revision: str | None, environment: Environment) -> Path:
    """Return the folder of a model; if the URI is hf://ORG/NAME, download it to the workspace.

    All stages and attempts share the download. The first one resolves the revision; the others get the same commit.
    Raise SourceNotFound, ConfigInvalid, CredentialsRejected or ServiceUnavailable.
    """
    if not uri.startswith("hf://"):
        folder = locate_existing(uri, environment)
        if not (folder / "config.json").is_file():
            raise SourceNotFound(f"{uri}: {folder} is not a model in Hugging Face format: it has no config.json")
        return folder
    from finetune_trainer.runtime.hub import download_model  # noqa: PLC0415  needed only for hf:// URIs

    return download_model(uri.removeprefix("hf://"), revision, environment.workspace / "models")


def fetch_dataset(uri: str, revision: str | None, environment: Environment) -> Path:
    """Return the file of a data set; download it if the URI is hf://ORG/NAME/PATH. Raise like `fetch_model`."""
    if not uri.startswith("hf://"):
        return locate_existing(uri, environment)
    match uri.removeprefix("hf://").split("/", 2):
        case [organisation, name, path]:
            from finetune_trainer.runtime.hub import download_file  # noqa: PLC0415  needed only for hf:// URIs

            return download_file(f"{organisation}/{name}", path, revision, environment.workspace / "datasets")
        case _:
            raise ConfigInvalid(f"{uri} names no file of the data set; use hf://ORG/NAME/PATH")
