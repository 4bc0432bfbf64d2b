"""The port to a store: the adapter of each kind of store implements these protocols.

A source is resolved once to a listing. The listing's pin identifies the content of all its files. Later stages get the
pin, so that nothing moves between prepare and push. Every read is a read of the pinned version.

A target publishes a sealed folder under its digest. Nothing is visible before it is whole. Publishing again sends only
the missing files, and two processes that publish the same folder at once write the same bytes.

All methods raise SourceNotFound, CredentialsRejected, ServiceUnavailable and ConfigInvalid of `runtime.errors`, with
the URI in the message.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class RemoteFile:
    """One file of a source."""

    name: str
    """Path below the source, with / between folders."""
    size: int | None
    """Size in bytes; None if the store does not say."""
    version: str
    """The store's name of the content: a git object id, an ETag, the digest of a layer."""
    sha256: str | None = None
    """SHA-256 of the content in hexadecimal; None if the store does not say."""


@dataclass(frozen=True)
class Listing:
    """The files of a source at one moment."""

    pin: str
    """Identifies the content of the files: a commit, sha256:… of a manifest, or sha256:… over names and versions."""
    files: tuple[RemoteFile, ...]
    """The files, sorted by name."""
    partial: bool = False
    """Whether the source may have further files, which this machine cannot see now."""


class StoreSource(Protocol):
    """A place to read from, in one store."""

    uri: str
    """The URI of the manifest, for messages."""

    def list_files(self, pin: str | None) -> Listing:
        """Return the files that the URI names now, or the files of an earlier pin.

        Raise DataInvalid if the store no longer has the content of the pin.
        """

    def download(self, file: RemoteFile, path: Path) -> None:
        """Write a file of the last listing to `path`, continuing behind the bytes that are there already.

        Raise DataInvalid if the store no longer has this version. The caller verifies size and digest, and renames. It
        may download several files at a time, in threads.
        """


@dataclass(frozen=True)
class Publication:
    """A model that a target has published."""

    uri: str
    """Location of exactly this model: it names the digest, or the commit."""
    sent_bytes: int
    """Bytes of files that this call has sent; 0 if the target had all of them."""


class StoreTarget(Protocol):
    """A place to publish to, in one store."""

    uri: str
    """The URI of the manifest, for messages."""

    def check(self) -> None:
        """Raise the errors that `publish` would raise before it sends anything. Nothing is written."""

    def publish(self, folder: Path, digest: str, names: Sequence[str]) -> Publication:
        """Publish the files of a sealed folder (`runtime.artifacts`) under its digest, then make it the latest.

        The caller has verified the folder. A target reads no file only to verify it; every reader verifies again.

        `names` are the files of the folder without manifest.json, which comes last. `digest` is sha256:… over the
        files that make the model. Under one digest, the other files stay as they were published first. Raise
        ConfigInvalid if the target holds files that no push wrote.
        """
