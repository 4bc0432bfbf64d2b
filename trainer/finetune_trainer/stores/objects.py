"""Sources and targets in object stores: s3://, az://, gs://, and files of https://.

A target T has a folder `T/sha256-HEX/` for each model, and the name of the newest in the object `T/latest`.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from finetune_trainer.contract.engines import DIGEST_FOLDER
from finetune_trainer.contract.environment import has_wildcard, is_pattern
from finetune_trainer.runtime.artifacts import MANIFEST, digest_of_value
from finetune_trainer.runtime.errors import (
    ConfigInvalid,
    DataInvalid,
    ServiceUnavailable,
    SourceNotFound,
)
from finetune_trainer.stores.buckets import WEB, Bucket, RemoteObject, locate_objects
from finetune_trainer.stores.concurrent import in_thread
from finetune_trainer.stores.open_bucket import open_bucket
from finetune_trainer.stores.port import Listing, Publication, RemoteFile
from finetune_trainer.stores.publications import (
    CARD,
    LATEST,
    Entries,
    check_was_pushed,
    entries_of,
    folder_name,
    manifest_with,
    sealed_entries,
    without_card,
)

MANIFEST_BYTES = 64 * 1024**2
"""A larger manifest.json is no manifest of ours."""
SWAPS = 10
"""Attempts to write a small object while other processes write it."""


class ObjectSource:
    """Objects to read: one, all below a prefix, or those that match a pattern in the last segment of the URI."""

    def __init__(self, uri: str, bucket: Bucket | None = None) -> None:
        """Raise ConfigInvalid if the URI names no objects, CredentialsRejected if there are no credentials."""
        self._location = locate_objects(uri)
        self.uri = self._location.shown
        self._is_pattern = self._location.scheme not in WEB and is_pattern(self._location.name)
        if self._location.scheme not in WEB and has_wildcard(self._location.folder):
            raise ConfigInvalid(
                f"{self.uri}: only the last segment may have a pattern; list the folders one by one"
            )
        self._bucket = bucket or open_bucket(self._location)
        self._found: dict[str, RemoteObject] = {}

    def list_files(self, pin: str | None) -> Listing:
        """Return the objects that there are now. Raise DataInvalid if they are not those of the pin."""
        self._found = self._find()
        if not self._found:
            raise SourceNotFound(
                f"{self.uri}: there is no such object; correct the URI, or upload it"
            )
        identity: list[object] = [
            [name, found.size, found.version] for name, found in sorted(self._found.items())
        ]
        if self.uri != self._location.uri:  # what is not shown may choose the file
            identity.append(self._location.uri)
        current = digest_of_value(identity)
        if pin not in {None, current}:
            raise DataInvalid(
                f"{self.uri}: its objects have changed: they were {pin} and are {current}; "
                "run the pipeline again with the new data, or restore the old objects"
            )
        digests = self._digests()
        files = (
            RemoteFile(name, found.size, found.version, digests.get(name, found.sha256))
            for name, found in sorted(self._found.items())
        )
        return Listing(current, tuple(files))

    def download(self, file: RemoteFile, path: Path) -> None:
        """Write an object of the listing to a path, continuing behind the bytes that are there.

        Raise DataInvalid if it is no longer the version of the listing, or longer than that.
        """
        found = RemoteObject(self._found[file.name].key, file.size or 0, file.version)
        path.touch()
        while (start := path.stat().st_size) < found.size:
            try:
                self._append(found, path, start)
            except ServiceUnavailable:
                if path.stat().st_size == start:
                    raise  # else the connection broke, and the next one goes on from here
            else:
                return

    def _append(self, found: RemoteObject, path: Path, start: int) -> None:
        # Not in append mode: two processes at once write the same bytes to the same places.
        with path.open("r+b") as part:
            part.seek(start)
            try:
                for chunk in self._read(found, start):
                    part.write(chunk)
            except DataInvalid:
                part.truncate(start)  # with the listed size, it would count as complete
                raise

    def _read(self, found: RemoteObject, start: int = 0) -> Iterator[bytes]:
        """Yield the content of an object from an offset on. Raise DataInvalid if there is more than was listed."""
        left = found.size - start
        for chunk in self._bucket.read(found, start):
            left -= len(chunk)
            if left < 0:
                raise DataInvalid(
                    f"{self.uri}: the server sends more than the {found.size:,} bytes of {found.key} that it lists; "
                    "repair the server, or use another one"
                )
            yield chunk

    def _find(self) -> dict[str, RemoteObject]:
        """Return the objects that the URI names now, by their names below it."""
        location, bucket = self._location, self._bucket
        if self._is_pattern:
            below = _by_name(bucket.list_below(location.folder), location.folder)
            return {name: found for name, found in below.items() if _matches(name, location.name)}
        # First the object: a key may be allowed to read it and not to list the bucket.
        found = None if location.uri.endswith("/") else bucket.find(location.key)
        if found is not None:
            return {location.name: found}
        return (
            {}
            if location.scheme in WEB
            else _by_name(bucket.list_below(location.key), location.key)
        )

    def _digests(self) -> dict[str, str]:
        """Return the SHA-256 of each file from the manifest of a push, if there is one.

        Raise DataInvalid if an object of it is missing or has another size.
        """
        manifest = self._found.get(MANIFEST)
        if manifest is None or manifest.size > MANIFEST_BYTES:
            return {}
        entries = entries_of(b"".join(self._read(manifest))) or {}
        for name, (size, _) in entries.items():
            found = self._found.get(name)
            if found is None or found.size != size:
                actual = f"has {found.size} bytes" if found else "is missing"
                raise DataInvalid(
                    f"{self.uri}: {name} {actual}, its {MANIFEST} says {size} bytes; push the model again"
                )
        return {name: sha256 for name, (_, sha256) in entries.items()}


class ObjectTarget:
    """A prefix to publish models to.

    A model appears when it is whole: files first, then its manifest, then `latest`. What lies under a digest is always
    the same, so two processes may publish at once, and a store without conditions is safe, too.
    """

    def __init__(self, uri: str, bucket: Bucket | None = None) -> None:
        """Raise ConfigInvalid if the URI names no prefix, CredentialsRejected if there are no credentials."""
        self.uri = uri
        self._location = locate_objects(uri)
        if self._location.scheme in WEB or has_wildcard(self._location.key):
            raise ConfigInvalid(
                f"push.targets {uri}: use s3://, gs:// or az://, and a prefix without a pattern"
            )
        self._bucket = bucket or open_bucket(self._location)

    def check(self) -> None:
        """Raise what a push finds in the listing of its prefix. See `StoreTarget.check`."""
        self._list()

    def publish(self, folder: Path, digest: str, names: Sequence[str]) -> Publication:
        """Publish the files of a sealed folder as `T/sha256-HEX/`, then make it the latest.

        Raise ConfigInvalid if the target holds what no push wrote, Interrupted as `concurrent.for_each` does.
        """
        local = sealed_entries(folder, names)
        return in_thread(lambda: self._publish(folder, folder_name(digest), local))

    def _publish(self, folder: Path, name: str, local: Entries) -> Publication:
        key, present = self._location.key, self._list()
        if foreign := {path for path in present if path.startswith(f"{name}/")} - {
            f"{name}/{file}" for file in (*local, MANIFEST)
        }:
            raise ConfigInvalid(
                f"push.targets {self.uri}: {min(foreign)} was not written by a push; move it"
            )
        sent = self._send_files(folder, f"{key}/{name}", without_card(local))
        entries = without_card(local) | self._send_card(folder, f"{key}/{name}", local)
        manifest = manifest_with((folder / MANIFEST).read_bytes(), entries)
        self._write(f"{key}/{name}/{MANIFEST}", manifest, lambda data: entries_of(data) == entries)
        self._write(
            f"{key}/{LATEST}", f"{name}\n".encode(), lambda data: self._check_latest(data) == name
        )
        return Publication(f"{self.uri.rstrip('/')}/{name}", sent)

    def _list(self) -> set[str]:
        """Return the names of all objects below the target; raise ConfigInvalid if it holds what no push wrote."""
        present = set(_by_name(self._bucket.list_below(self._location.key), self._location.key))
        check_was_pushed(self.uri, {path.partition("/")[0] for path in present})
        return present

    def _send_files(self, folder: Path, key: str, local: Entries) -> int:
        """Upload the files that are missing or spoilt; return their bytes."""
        found = {name: self._bucket.find(f"{key}/{name}") for name in sorted(local)}
        present = {
            name: (each.size, each.sha256 or "") for name, each in found.items() if each is not None
        }
        missing = [name for name in sorted(local) if present.get(name) != local[name]]
        for name in missing:
            self._bucket.upload(folder / name, f"{key}/{name}", local[name][1])
        return sum(local[name][0] for name in missing)

    def _send_card(self, folder: Path, key: str, local: Entries) -> Entries:
        """Write the model card unless there is one; return the entry of the one that is there then.

        Another run may publish the same model with its own card at the same time. The manifest must have the one that
        is kept.
        """
        if CARD not in local:
            return {}
        for _ in range(SWAPS):
            if found := self._bucket.find(f"{key}/{CARD}"):
                data = self._read(found)
                return {CARD: (found.size, hashlib.sha256(data).hexdigest())}
            self._bucket.replace(f"{key}/{CARD}", (folder / CARD).read_bytes(), None)
        raise ServiceUnavailable(
            f"push.targets {self.uri}: {key}/{CARD} was written and is not there; retry"
        )

    def _write(self, key: str, data: bytes, is_current: Callable[[bytes], bool]) -> None:
        """Write a small object, unless what is there is current. Of two processes the second one sees the first."""
        for _ in range(SWAPS):
            found = self._bucket.find(key)
            try:
                if found is not None and is_current(self._read(found)):
                    return
            except DataInvalid:  # another process has just written it
                continue
            if self._bucket.replace(key, data, found.version if found else None):
                return
        raise ServiceUnavailable(
            f"push.targets {self.uri}: other processes keep writing {key}; wait for them"
        )

    def _read(self, found: RemoteObject) -> bytes:
        return b"".join(self._bucket.read(found)) if found.size <= MANIFEST_BYTES else b""

    def _check_latest(self, data: bytes) -> str:
        """Return the name that `latest` has; raise ConfigInvalid if no push wrote it."""
        name = data.decode(errors="replace").strip()
        if not DIGEST_FOLDER.fullmatch(name):
            raise ConfigInvalid(
                f"push.targets {self.uri}: its object {LATEST} was not written by a push; move it"
            )
        return name


def _by_name(objects: Sequence[RemoteObject], folder: str) -> dict[str, RemoteObject]:
    """Return objects by their names below a folder, without the empty ones with which programs mark a folder."""
    folders = {folder} | {parent for found in objects for parent in _parents(found.key)}
    kept = [found for found in objects if found.size or found.key.rstrip("/") not in folders]
    return {found.key.removeprefix(f"{folder}/") if folder else found.key: found for found in kept}


def _parents(key: str) -> set[str]:
    segments = key.rstrip("/").split("/")
    return {"/".join(segments[:end]) for end in range(1, len(segments))}


def _matches(name: str, pattern: str) -> bool:
    return "/" not in name and fnmatchcase(name, pattern)
