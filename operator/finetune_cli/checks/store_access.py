"""Environment variables for a check of stores: this shell's, and variables that a manifest may add.

A manifest may be another user's. It must not run code here, read this user's files, or get this user's credentials.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from finetune_trainer.contract.environment import INSECURE_REGISTRIES

PLAIN = re.compile(r"[\w-]*")
"""Values of settings: the libraries make host names of some settings, such as the region."""


@dataclass(frozen=True)
class Access:
    """The environment variables of a store that a manifest may set. None of them names a file or a program."""

    endpoints: tuple[str, ...]
    """Variables that decide who gets the credentials, and whether by TLS."""
    credentials: tuple[str, ...]
    """Variables with credentials. The first is needed."""
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
        settings=(
            "AWS_REGION",
            "AWS_DEFAULT_REGION",
            "AWS_VIRTUAL_HOSTED_STYLE_REQUEST",
        ),
        # The region is no credential, and a request to another server is signed for a region, too.
        own="AWS_(?!REGION$|DEFAULT_REGION$).*",
        anonymous={"AWS_SKIP_SIGNATURE": "true"},
    ),
    "az": Access(
        endpoints=(
            "AZURE_STORAGE_ENDPOINT",
            "AZURE_ENDPOINT",
            "AZURE_STORAGE_USE_EMULATOR",
        ),
        credentials=("AZURE_STORAGE_ACCOUNT_KEY",),
        settings=("AZURE_STORAGE_ACCOUNT_NAME",),
        own="AZURE_.*",
        anonymous={"AZURE_SKIP_SIGNATURE": "true"},
    ),
    "gs": Access(
        # The library sends no credentials to an emulator.
        endpoints=("STORAGE_EMULATOR_HOST",),
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


def environment_of(
    variables: Mapping[str, str],
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the variables for a check of stores: this shell's, and variables that a stage may add.

    Return also the schemes of the stores that get no credentials, each with the variable of the stage that is the
    reason: it names another server than this shell's, and the stage has no credentials for it.
    """
    environment = dict(os.environ)
    withheld: dict[str, str] = {}
    for scheme, access in STORES.items():
        new_endpoints = [
            name
            for name in access.endpoints
            if name in variables and os.environ.get(name) != variables[name]
        ]
        if new_endpoints:
            # A manifest of another user may name a server of that user, which must not get this user's credentials.
            own = re.compile(access.own)
            environment = {
                name: value
                for name, value in environment.items()
                if not own.fullmatch(name)
            }
            if not variables.get(access.credentials[0]):
                environment |= access.anonymous
                withheld[scheme] = new_endpoints[0]
        allowed = {
            name for name in access.settings if PLAIN.fullmatch(variables.get(name, ""))
        }
        allowed |= {*access.endpoints, *access.credentials}
        environment |= {
            name: value for name, value in variables.items() if name in allowed
        }
    return environment, withheld
