"""OCI registries as a store: a model is an image with one layer for each file.

A push sends blobs first, then the manifest by its digest, then the tags. A push that did not end is therefore not
visible, and the next push sends only the missing blobs.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from finetune_trainer.files import log_once, write_durably
from finetune_trainer.runtime.artifacts import MANIFEST, CorruptArtifact, digest_file
from finetune_trainer.runtime.errors import (
    ConfigInvalid,
    DataInvalid,
    ServiceUnavailable,
    SourceNotFound,
)
from finetune_trainer.stores.concurrent import for_each
from finetune_trainer.stores.oci.client import Outage, RegistryClient, Unavailable
from finetune_trainer.stores.oci.image import (
    MOST_LAYERS,
    Layer,
    blobs_of,
    build_image,
    digest_of_bytes,
    is_pushed,
    offset_in_layer,
    parse_name,
    read_files,
)
from finetune_trainer.stores.port import Listing, Publication, RemoteFile
from finetune_trainer.stores.publications import CARD, tag_name

# The tag that clients of registries take if a name has none.
DEFAULT_TAG = "latest"
# A layer is hashed by one core and sent over one connection. ADR 19 has times with several layers at once.
PARALLEL_LAYERS = 4
"""Layers that are hashed or sent at a time."""


class RegistryTarget:
    """A repository to publish to: oci://HOST/REPOSITORY[:TAG]."""

    def __init__(self, uri: str) -> None:
        """Raise ConfigInvalid if the URI names no repository."""
        self.uri = uri
        self._name = parse_name(uri)
        if self._name.digest:
            raise ConfigInvalid(
                f"{uri}: a push cannot choose its digest; use oci://HOST/REPOSITORY[:TAG]"
            )
        self._tag = self._name.tag or DEFAULT_TAG
        self._client = RegistryClient(uri, self._name)

    def check(self) -> None:
        """Raise ConfigInvalid if the tag is on an image that no push wrote. See `StoreTarget.check`."""
        self._check_tag()

    def publish(self, folder: Path, digest: str, names: Sequence[str]) -> Publication:
        """Publish the files of a sealed folder as an image, then tag it; see `port.StoreTarget`.

        Raise CorruptArtifact if a file does not have the size of the folder's manifest.
        """
        self._check_tag()
        # The manifest of the folder is a layer, too.
        self._check_count(len(names) + 1)
        layers = _with_digests(folder, _layers(folder, names))
        published = self._published(digest, layers)
        if published:
            return self._tagged(published, digest, 0)
        # Registries refuse a manifest before its blobs.
        sent = for_each(lambda item: self._send_layer(*item), layers, PARALLEL_LAYERS)
        image = build_image(digest, layers)
        config_digest = digest_of_bytes(image.config)
        self._send_blob(config_digest, image.config, "the config")
        return self._tagged(image.manifest, digest, sum(sent))

    def _published(
        self, digest: str, layers: Sequence[tuple[Layer, str]]
    ) -> bytes | None:
        """Return the manifest of the image that an earlier push made of the same model, maybe with another card.

        Return None if there is no such image, or if the registry has lost a part of it.
        """
        manifest = self._client.manifest(tag_name(digest))
        if manifest is None or not is_pushed(manifest):
            return None
        try:
            files = read_files(self.uri, manifest)
        except DataInvalid:
            return None
        wanted = {layer.name: layer_digest for layer, layer_digest in layers}
        present = {file.name: file.version for file in files}
        if _of_model(wanted) != _of_model(present):
            return None
        # A registry may have lost blobs of a manifest that it still has.
        blobs = blobs_of(manifest)
        sizes = for_each(self._size_of, blobs, PARALLEL_LAYERS)
        if sizes != [blob["size"] for blob in blobs]:
            return None
        return manifest

    def _size_of(self, blob: dict[str, Any]) -> int | None:
        return self._client.blob_size(blob["digest"], blob["size"])

    def _tagged(self, manifest: bytes, digest: str, sent: int) -> Publication:
        """Store the manifest under its digest and the tags, except under names that have it already."""
        reference = digest_of_bytes(manifest)
        # The digest first. The tag that users read comes last: it changes when all other names work.
        names = [reference, tag_name(digest), self._tag]
        for name in dict.fromkeys(names):
            if self._client.manifest(name) != manifest:
                self._client.put_manifest(name, manifest)
        repository = f"{self._name.host}/{self._name.repository}"
        return Publication(f"oci://{repository}@{reference}", sent)

    def _check_tag(self) -> None:
        """Raise ConfigInvalid if the tag is on an image that no push wrote."""
        manifest = self._client.manifest(self._tag)
        if manifest is not None and not is_pushed(manifest):
            raise ConfigInvalid(
                f"{self.uri}: {self._tag} is an image that was not written by a push; "
                "choose another tag or another repository"
            )

    def _check_count(self, count: int) -> None:
        if count > MOST_LAYERS:
            raise ConfigInvalid(
                f"{self.uri}: the model has {count} files and a container runtime mounts at most {MOST_LAYERS} layers; "
                "publish it to an object store"
            )

    def _send_layer(self, layer: Layer, digest: str) -> int:
        """Send a layer if the registry does not have it; return the bytes of its file that were sent."""
        if self._send_blob(digest, layer, layer.name):
            return layer.size
        return 0

    def _send_blob(self, digest: str, content: Layer | bytes, name: str) -> bool:
        """Send a blob if the registry does not have it; return whether it was sent."""
        if self._client.blob_size(digest, len(content)) == len(content):
            return False
        self._client.upload(digest, content)
        # Some registries take an upload of a blob that they have for done, also if their file of it is damaged.
        size = self._client.blob_size(digest, len(content))
        if size != len(content):
            raise ServiceUnavailable(
                f"{self.uri}: the registry holds {size} bytes of {name} after {len(content)} were sent; "
                f"it does not replace the damaged blob {digest}: delete that in the registry's storage"
            )
        return True


def _of_model(digests: dict[str, str]) -> dict[str, str]:
    """Return the digests without the layers that describe the run and not the model."""
    about_the_run = {CARD, MANIFEST}
    return {
        name: digest for name, digest in digests.items() if name not in about_the_run
    }


def _layers(folder: Path, names: Sequence[str]) -> list[Layer]:
    """Return the layers of the named files, sorted, and last the layer of the manifest."""
    manifest = folder / MANIFEST
    entries = json.loads(manifest.read_bytes())["files"]
    missing = set(names) - set(entries)
    if missing:
        raise CorruptArtifact(f"{folder.name}/{min(missing)} is not in its manifest")
    layers = []
    for name in sorted(names):
        entry = entries[name]
        layer = Layer(folder / name, name, entry["size"], entry["sha256"])
        layers.append(layer)
    size = manifest.stat().st_size
    layers.append(Layer(manifest, MANIFEST, size, digest_file(manifest)))
    return layers


def _with_digests(folder: Path, layers: Sequence[Layer]) -> list[tuple[Layer, str]]:
    """Return each layer with its digest. Digests are kept beside the folder, so that a rerun does not read the files.

    A registry refuses a file that was changed since: its layer then has another digest.
    """
    path = folder.with_name(f".{folder.name}.layers.json")
    known = _read_digests(path)

    def digest_of(layer: Layer) -> str:
        return known.get(_digest_key(layer)) or layer.digest()

    digests = for_each(digest_of, layers, PARALLEL_LAYERS)
    with_digests = list(zip(layers, digests, strict=True))
    current = {_digest_key(layer): digest for layer, digest in with_digests}
    if current != known:
        # The file saves time only, so a disk without room for it ends no push.
        try:
            write_durably(path, json.dumps(current, indent=1, sort_keys=True).encode())
        except OSError as error:
            log_once(
                f"{path}: cannot be written ({error.strerror}): the next push reads all files again"
            )
    return with_digests


def _digest_key(layer: Layer) -> str:
    """Return all that the digest of a layer follows from."""
    return f"{layer.name} {layer.size} {layer.sha256}"


def _read_digests(path: Path) -> dict[str, str]:
    try:
        digests = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(digests, dict):
        return {}
    return digests


class RegistrySource:
    """A model in a registry: oci://HOST/REPOSITORY[:TAG|@sha256:…]. Its pin is the digest of the image."""

    def __init__(self, uri: str) -> None:
        """Raise ConfigInvalid if the URI names no image."""
        self.uri = uri
        self._name = parse_name(uri)
        self._client = RegistryClient(uri, self._name)

    def list_files(self, pin: str | None) -> Listing:
        """Return the files of the image that the URI names now, or of an earlier pin; see `port.StoreSource`."""
        reference = pin or self._name.digest or self._name.tag or DEFAULT_TAG
        manifest = self._client.manifest(reference)
        if manifest is None and pin:
            raise DataInvalid(
                f"{self.uri}: the registry no longer has the image {pin}; push it again, or start anew"
            )
        if manifest is None:
            raise SourceNotFound(
                f"{self.uri}: the registry has no image {reference}; correct the URI, or push it"
            )
        digest = digest_of_bytes(manifest)
        if reference.startswith("sha256:") and digest != reference:
            raise DataInvalid(
                f"{self.uri}: the registry returns {digest} as {reference}; its storage may be damaged"
            )
        files = read_files(self.uri, manifest)
        self._check_blobs(manifest, files)
        return Listing(digest, files)

    def _check_blobs(self, manifest: bytes, files: Sequence[RemoteFile]) -> None:
        """Raise DataInvalid if the registry has lost the blob of a file, or a part of it."""
        blobs = blobs_of(manifest)
        expected = {blob["digest"]: blob["size"] for blob in blobs}
        sizes = for_each(
            lambda file: self._client.blob_size(file.version, expected[file.version]),
            files,
            PARALLEL_LAYERS,
        )
        for file, size in zip(files, sizes, strict=True):
            if size != expected[file.version]:
                raise DataInvalid(
                    f"{self.uri}: the registry has {size or 0:,} bytes of {file.version} with {file.name}, expected "
                    f"{expected[file.version]:,}; push the model again"
                )

    def download(self, file: RemoteFile, path: Path) -> None:
        """Write a file to `path`, continuing behind the bytes that are there; see `port.StoreSource`.

        Raise ServiceUnavailable if the disk is full. The bytes so far stay.
        """
        try:
            with path.open("ab") as output:
                self._complete(file, output)
        except OSError as error:
            raise ServiceUnavailable(
                f"{self.uri}: cannot write {path}: {error}; free some space and retry; it continues behind these bytes"
            ) from error

    def _complete(self, file: RemoteFile, output: IO[bytes]) -> None:
        """Append the missing bytes of a file; ask again, from the last byte on, while the registry is unavailable."""
        size = file.size or 0
        if output.tell() > size:
            output.seek(output.truncate(0))
        outage = Outage(self.uri)
        written = output.tell()
        while written < size:
            try:
                self._append(file, output, size)
            except Unavailable as problem:
                # A request that brought bytes ends the outage: a slow download may last longer than any outage.
                if output.tell() != written:
                    outage = Outage(self.uri)
                outage.wait(problem)
            written = output.tell()

    def _append(self, file: RemoteFile, output: IO[bytes], size: int) -> None:
        """Append the bytes of one response. Raise DataInvalid if the registry does not have the rest of the file."""
        offset = offset_in_layer(file)
        start = offset + output.tell()
        for chunk in self._client.read_blob(file.version, start, offset + size):
            output.write(chunk)
        if output.tell() < size:
            raise DataInvalid(
                f"{self.uri}: {file.name} has {size:,} bytes and the registry has {output.tell():,} of them in "
                f"{file.version}; push the model again"
            )
