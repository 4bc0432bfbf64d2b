"""The port to a bucket of an object store: the client of each kind of bucket implements it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from finetune_trainer.contract.uris import without_secrets
from finetune_trainer.runtime.errors import ConfigInvalid

OBJECT_STORES = frozenset({"s3", "gs", "az"})
"""Schemes of stores that can be read and written."""
# A web server takes no uploads and has no listings, so its URIs name one file to read.
WEB = frozenset({"http", "https"})
"""Schemes of web servers."""

# A server that stays away for longer ends the attempt with the exit code of an unavailable service, and the operator
# retries that.
RETRY_SECONDS = 60.0
"""Time after which a server counts as unavailable."""

# S3 takes at most 10,000 parts an upload: with this size, files of up to 312 GiB.
PART_BYTES = 32 * 1024**2
PARALLEL_PARTS = 4

SHA256 = "sha256"
"""Metadata of an object: the SHA-256 of its content in hexadecimal."""


@dataclass(frozen=True)
class RemoteObject:
    """One object, as the store describes it."""

    key: str
    size: int
    """Size in bytes."""
    version: str
    """Changes with the content: the ETag, the generation, or the time of the last change."""
    sha256: str | None = None
    """Metadata `sha256`; None if there is none, and in listings."""


class Bucket(Protocol):
    """The objects of one bucket or container.

    All methods may be called from several threads. They raise CredentialsRejected, SourceNotFound if there is no such
    bucket, ServiceUnavailable if the server does not respond within RETRY_SECONDS, and ConfigInvalid if it refuses
    the request.
    """

    def find(self, key: str) -> RemoteObject | None:
        """Return an object with its metadata, or None if there is none with this key."""

    def list_below(self, folder: str) -> list[RemoteObject]:
        """Return all objects whose key starts with `folder` and a slash; all objects if it is empty."""

    def read(self, remote: RemoteObject, offset: int = 0) -> Iterator[bytes]:
        """Yield the content of an object from an offset on. Raise DataInvalid if it is no longer this version."""

    def upload(self, path: Path, key: str, sha256: str) -> None:
        """Write an object from a file, with its metadata. It appears when it is whole, and replaces an older object."""

    def replace(self, key: str, data: bytes, version: str | None) -> bool:
        """Write a small object if it still has this version; with None, if there is none. Return whether it did.

        A store that knows no conditions writes always.
        """


@dataclass(frozen=True)
class Location:
    """The parts of a URI."""

    uri: str
    scheme: str
    bucket: str
    """Bucket or container; the host of https://."""
    key: str
    """Key or prefix, without slashes at its ends."""

    @property
    def shown(self) -> str:
        """The URI as messages have it."""
        return without_secrets(self.uri)

    @property
    def folder(self) -> str:
        """The key up to its last slash."""
        return self.key.rpartition("/")[0]

    @property
    def name(self) -> str:
        """The key behind its last slash."""
        return self.key.rpartition("/")[2]


def locate_objects(uri: str) -> Location:
    """Return the parts of an s3://, gs://, az:// or https:// URI; raise ConfigInvalid if it lacks a part."""
    scheme, separator, rest = uri.partition("://")
    if scheme in WEB:
        parts = urlsplit(uri)
        bucket = parts.netloc
        key = unquote(parts.path)
    else:
        bucket, _, key = rest.partition("/")
    if not separator or not bucket or not key.strip("/"):
        raise ConfigInvalid(
            f"{without_secrets(uri)} names no objects; use {scheme}://{bucket or 'BUCKET'}/PREFIX"
        )
    return Location(uri, scheme, bucket, key.strip("/"))
