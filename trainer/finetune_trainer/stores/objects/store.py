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
from finetune_trainer.stores.concurrent import in_thread
from finetune_trainer.stores.objects.bucket import (
    WEB,
    Bucket,
    RemoteObject,
    locate_objects,
)
from finetune_trainer.stores.objects.open_bucket import open_bucket
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

# A manifest is read into memory. A push writes about a hundred bytes for each file, so no push wrote a larger manifest.
MANIFEST_BYTES = 64 * 1024**2
# A swap fails only if another process has succeeded with its own. All of them write the same few values.
SWAPS = 10
"""Attempts to write a small object while other processes write it."""


class ObjectSource:
    """Objects to read: one object, all below a prefix, or all that match a pattern in the URI's last segment."""

    def __init__(self, uri: str, bucket: Bucket | None = None) -> None:
        """Raise ConfigInvalid if the URI names no objects, CredentialsRejected if there are no credentials."""
        self._location = locate_objects(uri)
        self.uri = self._location.shown
        # In a web address, * and ? are parts of the name or begin the query.
        can_match = self._location.scheme not in WEB
        self._is_pattern = can_match and is_pattern(self._location.name)
        if can_match and has_wildcard(self._location.folder):
            raise ConfigInvalid(
                f"{self.uri}: only the last segment may have a pattern; list the folders one by one"
            )
        self._bucket = bucket or open_bucket(self._location)
        self._objects: dict[str, RemoteObject] = {}
        """The objects of the last listing, by name."""

    def list_files(self, pin: str | None) -> Listing:
        """Return the objects that there are now. Raise DataInvalid if they are not the objects of the pin."""
        self._objects = self._find()
        if not self._objects:
            raise SourceNotFound(
                f"{self.uri}: there is no such object; correct the URI, or upload it"
            )
        # Object stores have no commit that could be the pin.
        current = digest_of_value(self._identity())
        if pin not in {None, current}:
            raise DataInvalid(
                f"{self.uri}: its objects have changed: they were {pin} and are {current}; "
                "run the pipeline again with the new data, or restore the old objects"
            )
        digests = self._digests()
        files = []
        for name, remote in sorted(self._objects.items()):
            sha256 = digests.get(name, remote.sha256)
            files.append(RemoteFile(name, remote.size, remote.version, sha256))
        return Listing(current, tuple(files))

    def _identity(self) -> list[object]:
        """Return the value that the pin is the digest of."""
        identity: list[object] = [
            [name, remote.size, remote.version]
            for name, remote in sorted(self._objects.items())
        ]
        # The secret part of a URI, which is not shown, may choose the file.
        if self.uri != self._location.uri:
            identity.append(self._location.uri)
        return identity

    def download(self, file: RemoteFile, path: Path) -> None:
        """Write an object of the listing to a path, continuing behind the bytes that are there.

        Raise DataInvalid if the object has changed since, or is longer than listed.
        """
        key = self._objects[file.name].key
        remote = RemoteObject(key, file.size or 0, file.version)
        path.touch()
        start = path.stat().st_size
        while start < remote.size:
            try:
                self._append(remote, path, start)
            except ServiceUnavailable:
                # If a connection broke after some bytes, the next connection goes on behind them.
                is_fruitless = path.stat().st_size == start
                if is_fruitless:
                    raise
            else:
                return
            start = path.stat().st_size

    def _append(self, remote: RemoteObject, path: Path, start: int) -> None:
        # Not in append mode: two processes at once write the same bytes to the same places.
        with path.open("r+b") as part:
            part.seek(start)
            try:
                for chunk in self._read(remote, start):
                    part.write(chunk)
            except DataInvalid:
                # With the listed size, the part would count as complete.
                part.truncate(start)
                raise

    def _read(self, remote: RemoteObject, start: int = 0) -> Iterator[bytes]:
        """Yield the content of an object from an offset on. Raise DataInvalid if there is more than was listed."""
        left = remote.size - start
        for chunk in self._bucket.read(remote, start):
            left -= len(chunk)
            if left < 0:
                raise DataInvalid(
                    f"{self.uri}: the server sends more than the {remote.size:,} bytes of {remote.key} that it lists; "
                    "repair the server, or use another server"
                )
            yield chunk

    def _find(self) -> dict[str, RemoteObject]:
        """Return the objects that the URI names now, by their names below it."""
        location = self._location
        if self._is_pattern:
            below = self._list(location.folder)
            return {
                name: remote
                for name, remote in below.items()
                if _matches(name, location.name)
            }
        # First the object: a key may be allowed to read it and not to list the bucket.
        if not location.uri.endswith("/"):
            remote = self._bucket.find(location.key)
            if remote is not None:
                return {location.name: remote}
        if location.scheme in WEB:
            return {}
        return self._list(location.key)

    def _list(self, folder: str) -> dict[str, RemoteObject]:
        return _by_name(self._bucket.list_below(folder), folder)

    def _digests(self) -> dict[str, str]:
        """Return the SHA-256 of each file from the manifest of a push; nothing if there is no manifest.

        Raise DataInvalid if an object of the manifest is missing or has another size.
        """
        manifest = self._objects.get(MANIFEST)
        if manifest is None or manifest.size > MANIFEST_BYTES:
            return {}
        content = b"".join(self._read(manifest))
        digests = {}
        for name, (size, sha256) in (entries_of(content) or {}).items():
            self._check_object(name, size)
            digests[name] = sha256
        return digests

    def _check_object(self, name: str, size: int) -> None:
        """Raise DataInvalid unless the listing has an object with this name and size."""
        remote = self._objects.get(name)
        if remote is not None and remote.size == size:
            return
        actual = "is missing"
        if remote is not None:
            actual = f"has {remote.size} bytes"
        raise DataInvalid(
            f"{self.uri}: {name} {actual}, its {MANIFEST} says {size} bytes; push the model again"
        )


class ObjectTarget:
    """A prefix to publish models to.

    A model appears when it is whole: files first, then its manifest, then `latest`. The objects under a digest are
    always the same, so two processes may publish at once, and a store without conditions is safe, too.
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
        """Raise the errors that a push finds in the listing of its prefix. See `StoreTarget.check`."""
        self._list()

    def publish(self, folder: Path, digest: str, names: Sequence[str]) -> Publication:
        """Publish the files of a sealed folder as `T/sha256-HEX/`, then make it the latest.

        Raise ConfigInvalid if the target holds objects that no push wrote, Interrupted as `concurrent.for_each` does.
        """
        local = sealed_entries(folder, names)
        return in_thread(lambda: self._publish(folder, folder_name(digest), local))

    def _publish(self, folder: Path, name: str, local: Entries) -> Publication:
        present = self._list()
        below = {path for path in present if path.startswith(f"{name}/")}
        expected = {f"{name}/{file}" for file in (*local, MANIFEST)}
        foreign = below - expected
        if foreign:
            raise ConfigInvalid(
                f"push.targets {self.uri}: {min(foreign)} was not written by a push; move it"
            )
        key = f"{self._location.key}/{name}"
        model = without_card(local)
        # The order protects readers. `latest` names a whole model only, and a manifest names only files that are
        # there. A push that is killed in between leaves nothing that a reader could take for a model.
        sent = self._send_files(folder, key, model)
        card = self._send_card(folder, key, local)
        self._write_manifest(folder, key, model | card)
        self._write_latest(name)
        return Publication(f"{self.uri.rstrip('/')}/{name}", sent)

    def _write_manifest(self, folder: Path, key: str, entries: Entries) -> None:
        def is_current(data: bytes) -> bool:
            return entries_of(data) == entries

        own = (folder / MANIFEST).read_bytes()
        manifest = manifest_with(own, entries)
        self._write(f"{key}/{MANIFEST}", manifest, is_current)

    def _write_latest(self, name: str) -> None:
        def is_current(data: bytes) -> bool:
            return self._check_latest(data) == name

        key = f"{self._location.key}/{LATEST}"
        self._write(key, f"{name}\n".encode(), is_current)

    def _list(self) -> set[str]:
        """Return the names of all objects below the target; raise ConfigInvalid if no push wrote some of them."""
        folder = self._location.key
        objects = _by_name(self._bucket.list_below(folder), folder)
        top_names = set()
        for path in objects:
            name, _, _ = path.partition("/")
            top_names.add(name)
        check_was_pushed(self.uri, top_names)
        return set(objects)

    def _send_files(self, folder: Path, key: str, local: Entries) -> int:
        """Upload the files that are missing or spoilt; return their bytes."""
        # Listings lack the SHA-256, so each object is asked for on its own.
        present = {name: self._bucket.find(f"{key}/{name}") for name in sorted(local)}
        sent = 0
        for name, remote in present.items():
            size, sha256 = local[name]
            is_intact = remote is not None and (remote.size, remote.sha256) == (
                size,
                sha256,
            )
            if not is_intact:
                self._bucket.upload(folder / name, f"{key}/{name}", sha256)
                sent += size
        return sent

    def _send_card(self, folder: Path, key: str, local: Entries) -> Entries:
        """Write the model card unless there is a card; return the entry of the card that is there then.

        Another run may publish the same model with its own card at the same time. The manifest must have the card that
        is kept.
        """
        if CARD not in local:
            return {}
        for _ in range(SWAPS):
            card = self._bucket.find(f"{key}/{CARD}")
            if card is not None:
                data = self._read(card)
                sha256 = hashlib.sha256(data).hexdigest()
                return {CARD: (card.size, sha256)}
            # Whether this write or another process's was first, the next round reads the card that won.
            content = (folder / CARD).read_bytes()
            self._bucket.replace(f"{key}/{CARD}", content, None)
        raise ServiceUnavailable(
            f"push.targets {self.uri}: {key}/{CARD} was written and is not there; retry"
        )

    def _write(
        self, key: str, data: bytes, is_current: Callable[[bytes], bool]
    ) -> None:
        """Write a small object, unless it is current. Of two processes, the second sees the write of the first."""
        for _ in range(SWAPS):
            remote = self._bucket.find(key)
            try:
                if remote is not None and is_current(self._read(remote)):
                    return
            except DataInvalid:
                # Another process has written the object since it was found.
                continue
            version = None if remote is None else remote.version
            if self._bucket.replace(key, data, version):
                return
        raise ServiceUnavailable(
            f"push.targets {self.uri}: other processes keep writing {key}; wait for them"
        )

    def _read(self, remote: RemoteObject) -> bytes:
        if remote.size > MANIFEST_BYTES:
            return b""
        return b"".join(self._bucket.read(remote))

    def _check_latest(self, data: bytes) -> str:
        """Return the name that `latest` has; raise ConfigInvalid if no push wrote it."""
        name = data.decode(errors="replace").strip()
        if not DIGEST_FOLDER.fullmatch(name):
            raise ConfigInvalid(
                f"push.targets {self.uri}: its object {LATEST} was not written by a push; move it"
            )
        return name


def _by_name(objects: Sequence[RemoteObject], folder: str) -> dict[str, RemoteObject]:
    """Return objects by their names below a folder, without the empty objects with which programs mark a folder."""
    folders = {folder}
    for remote in objects:
        folders |= _parents(remote.key)
    by_name = {}
    for remote in objects:
        is_folder = remote.key.rstrip("/") in folders
        if remote.size or not is_folder:
            name = remote.key.removeprefix(f"{folder}/") if folder else remote.key
            by_name[name] = remote
    return by_name


def _parents(key: str) -> set[str]:
    """Return the folders in which a key lies."""
    parents = set()
    parent, _, _ = key.rstrip("/").rpartition("/")
    while parent:
        parents.add(parent)
        parent, _, _ = parent.rpartition("/")
    return parents


def _matches(name: str, pattern: str) -> bool:
    return "/" not in name and fnmatchcase(name, pattern)
