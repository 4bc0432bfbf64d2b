"""Environment variables with which stores are looked at: this shell's, and what a manifest may add to them.

A manifest may be another user's. It must not run code here, read files of this user, or get their credentials.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from finetune_trainer.contract.environment import INSECURE_REGISTRIES

PLAIN = re.compile(r"[\w-]*")
"""Values of settings: the libraries make host names of some."""


@dataclass(frozen=True)
class Access:
    """The environment variables of one store that a manifest may set. None of them names a file or a program."""

    endpoints: tuple[str, ...]
    """Those that decide who gets the credentials, and whether by TLS."""
    credentials: tuple[str, ...]
    """The first one is needed."""
    settings: tuple[str, ...]
    own: str
    """Pattern of the names with which a shell has credentials, or leads to some."""
    anonymous: Mapping[str, str]
    """With these the store's library does not look for credentials of this user or this machine."""


STORES = {
    "hf": Access(
        endpoints=("HF_ENDPOINT",),
        credentials=("HF_TOKEN",),
        settings=(
            "HF_HUB_OFFLINE",
            "HF_HUB_DISABLE_XET",
            "HF_HUB_DOWNLOAD_TIMEOUT",
            "HF_HUB_ETAG_TIMEOUT",
        ),
        own="HF_TOKEN|HUGGING_FACE_HUB_TOKEN|HF_OIDC_RESOURCE",
        anonymous={"HF_TOKEN_PATH": os.devnull},
    ),
    "s3": Access(
        endpoints=("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
        credentials=("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN"),
        settings=("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_VIRTUAL_HOSTED_STYLE_REQUEST"),
        own="AWS_(?!REGION$|DEFAULT_REGION$).*",
        anonymous={"AWS_SKIP_SIGNATURE": "true"},
    ),
    "az": Access(
        endpoints=("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT", "AZURE_STORAGE_USE_EMULATOR"),
        credentials=("AZURE_STORAGE_ACCOUNT_KEY",),
        settings=("AZURE_STORAGE_ACCOUNT_NAME",),
        own="AZURE_.*",
        anonymous={"AZURE_SKIP_SIGNATURE": "true"},
    ),
    "gs": Access(
        endpoints=("STORAGE_EMULATOR_HOST",),  # which is asked without credentials
        credentials=("GOOGLE_SERVICE_ACCOUNT_KEY",),
        settings=(),
        own="GOOGLE_.*",
        anonymous={},
    ),
    "oci": Access(
        endpoints=(INSECURE_REGISTRIES,),
        credentials=("DOCKER_AUTH_CONFIG",),
        settings=(),
        own="DOCKER_.*",
        anonymous={"DOCKER_CONFIG": os.devnull},
    ),
}
"""Scheme -> the variables of its store."""


def environment_of(variables: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the variables for a look at stores: this shell's, and what the variables of a stage may add to them.

    Return also the schemes of the stores that get no credentials, each with the variable of the stage that is why: it
    names another server than this shell's, and the stage has no credentials for it.
    """
    found, withheld = dict(os.environ), dict[str, str]()
    for scheme, access in STORES.items():
        if changed := [
            name
            for name in access.endpoints
            if name in variables and _is_new(name, variables[name])
        ]:
            found = {
                name: value for name, value in found.items() if not re.fullmatch(access.own, name)
            }
            if not variables.get(access.credentials[0]):
                found |= access.anonymous
                withheld[scheme] = changed[0]
        taken = {name for name in access.settings if PLAIN.fullmatch(variables.get(name, ""))}
        taken |= {*access.endpoints, *access.credentials}
        found |= {name: value for name, value in variables.items() if name in taken}
    return found, withheld


def _is_new(name: str, value: str) -> bool:
    return os.environ.get(name) != value
