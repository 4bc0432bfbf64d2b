"""Resolve a manifest's URI to a path on this machine."""

from pathlib import Path

from finetune_trainer.contract import Environment
from finetune_trainer.contract.environment import InvalidLocation, NotMounted
from finetune_trainer.runtime.artifacts import is_present
from finetune_trainer.runtime.errors import ConfigInvalid, SourceNotFound


def locate(uri: str, environment: Environment) -> Path:
    """Return the path of a pvc://, file:// or relative URI; the path need not exist.

    Raise SourceNotFound if the claim is not mounted, and ConfigInvalid if the URI names no path here.
    """
    # The contract knows no errors of stages, because the operator uses it, too.
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
        raise SourceNotFound(
            f"{uri}: {path} does not exist; correct the URI or create the file"
        )
    return path
