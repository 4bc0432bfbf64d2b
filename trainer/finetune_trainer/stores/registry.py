"""OCI registries as a store: a model is an image with one layer for each file.

A push sends blobs first, then the manifest by its digest, then the tags. What was not pushed to its end is therefore
not visible, and what is pushed again sends only the blobs that are missing.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from finetune_trainer.files import log_once, write_durably
from finetune_trainer.runtime.artifacts import MANIFEST, CorruptArtifact, digest_file
from finetune_trainer.runtime.errors import (
    ConfigInvalid,
    DataInvalid,
    ServiceUnavailable,
    SourceNotFound,
)
from finetune_trainer.stores.concurrent import for_each
from finetune_trainer.stores.oci_image import (
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
from finetune_trainer.stores.registry_client import Outage, RegistryClient, Unavailable

LATEST = "latest"
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
        self._tag = self._name.tag or LATEST
        self._client = RegistryClient(uri, self._name)

    def check(self) -> None:
        """Raise ConfigInvalid if the tag is on an image that no push wrote. See `StoreTarget.check`."""
        self._check_tag()

    def publish(self, folder: Path, digest: str, names: Sequence[str]) -> Publication:
        """Publish the files of a sealed folder as an image, then tag it; see `port.StoreTarget`.

        Raise CorruptArtifact if a file does not have the size of the folder's manifest.
        """
        self._check_tag()
        self._check_count(len(names) + 1)
        layers = _with_digests(folder, _layers(folder, names))
        if published := self._published(digest, layers):
            return self._tagged(published, digest, 0)
        sent = sum(for_each(lambda item: self._send_layer(*item), layers, PARALLEL_LAYERS))
        image = build_image(digest, layers)
        self._send_blob(digest_of_bytes(image.config), image.config, "the config")
        return self._tagged(image.manifest, digest, sent)

    def _published(self, digest: str, layers: Sequence[tuple[Layer, str]]) -> bytes | None:
        """Return the manifest of the image that an earlier push made of the same model, maybe with another card.

        Return None if there is none, or if the registry has lost a part of it.
        """
        manifest = self._client.manifest(tag_name(digest))
        if manifest is None or not is_pushed(manifest):
            return None
        try:
            found = {file.name: file.version for file in read_files(self.uri, manifest)}
        except DataInvalid:
            return None
        about_the_run = {CARD, MANIFEST}
        wanted = {
            layer.name: version for layer, version in layers if layer.name not in about_the_run
        }
        if wanted != {
            name: version for name, version in found.items() if name not in about_the_run
        }:
            return None
        blobs = [(blob["digest"], blob["size"]) for blob in blobs_of(manifest)]
        sizes = for_each(lambda blob: self._client.blob_size(*blob), blobs, PARALLEL_LAYERS)
        return manifest if sizes == [size for _, size in blobs] else None

    def _tagged(self, manifest: bytes, digest: str, sent: int) -> Publication:
        """Store the manifest under its digest and under the tags where it is not there yet."""
        reference = digest_of_bytes(manifest)
        for name in dict.fromkeys([reference, tag_name(digest), self._tag]):
            if self._client.manifest(name) != manifest:
                self._client.put_manifest(name, manifest)
        return Publication(f"oci://{self._name.host}/{self._name.repository}@{reference}", sent)

    def _check_tag(self) -> None:
        """Raise ConfigInvalid if the tag is on an image that no push wrote."""
        found = self._client.manifest(self._tag)
        if found is not None and not is_pushed(found):
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
        return layer.size if self._send_blob(digest, layer, layer.name) else 0

    def _send_blob(self, digest: str, content: Layer | bytes, name: str) -> bool:
        """Send a blob if the registry does not have it; return whether it was sent."""
        if self._client.blob_size(digest, len(content)) == len(content):
            return False
        self._client.upload(digest, content)
        size = self._client.blob_size(digest, len(content))
        if size != len(content):
            raise ServiceUnavailable(
                f"{self.uri}: the registry holds {size} bytes of {name} after {len(content)} were sent; "
                f"it does not replace the damaged blob {digest}: delete that in the registry's storage"
            )
        return True


def _layers(folder: Path, names: Sequence[str]) -> list[Layer]:
    """Return the layers of the named files, sorted, and the manifest's, which is last."""
    manifest = folder / MANIFEST
    entries = json.loads(manifest.read_bytes())["files"]
    if missing := sorted(set(names) - set(entries)):
        raise CorruptArtifact(f"{folder.name}/{missing[0]} is not in its manifest")
    layers = [
        Layer(folder / name, name, entries[name]["size"], entries[name]["sha256"])
        for name in sorted(names)
    ]
    return [*layers, Layer(manifest, MANIFEST, manifest.stat().st_size, digest_file(manifest))]


def _with_digests(folder: Path, layers: Sequence[Layer]) -> list[tuple[Layer, str]]:
    """Return each layer with its digest. Digests are kept beside the folder, so that a rerun does not read the files.

    A registry refuses a file that was changed since: its layer then has another digest.
    """
    path = folder.with_name(f".{folder.name}.layers.json")
    known = _read_digests(path)
    keys = [f"{layer.name} {layer.size} {layer.sha256}" for layer in layers]
    found = for_each(
        lambda item: known.get(item[0]) or item[1].digest(),
        zip(keys, layers, strict=True),
        PARALLEL_LAYERS,
    )
    digests = dict(zip(keys, found, strict=True))
    if digests != known:
        try:
            write_durably(path, json.dumps(digests, indent=1, sort_keys=True).encode())
        except OSError as error:
            log_once(
                f"{path}: cannot be written ({error.strerror}): the next push reads all files again"
            )
    return list(zip(layers, found, strict=True))


def _read_digests(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


class RegistrySource:
    """A model in a registry: oci://HOST/REPOSITORY[:TAG|@sha256:…]. Its pin is the digest of the image."""

    def __init__(self, uri: str) -> None:
        """Raise ConfigInvalid if the URI names no image."""
        self.uri = uri
        self._name = parse_name(uri)
        self._client = RegistryClient(uri, self._name)

    def list_files(self, pin: str | None) -> Listing:
        """Return the files of the image that the URI names now, or of an earlier pin; see `port.StoreSource`."""
        reference = pin or self._name.digest or self._name.tag or LATEST
        manifest = self._client.manifest(reference)
        if manifest is None and pin:
            raise DataInvalid(
                f"{self.uri}: the registry no longer has the image {pin}; push it again, or start anew"
            )
        if manifest is None:
            raise SourceNotFound(
                f"{self.uri}: the registry has no image {reference}; correct the URI, or push it"
            )
        found = digest_of_bytes(manifest)
        if reference.startswith("sha256:") and found != reference:
            raise DataInvalid(
                f"{self.uri}: the registry returns {found} as {reference}; its storage may be damaged"
            )
        files = read_files(self.uri, manifest)
        self._check_blobs(manifest, files)
        return Listing(found, files)

    def _check_blobs(self, manifest: bytes, files: Sequence[RemoteFile]) -> None:
        """Raise DataInvalid if the registry has lost the blob of a file, or a part of it."""
        sizes = {blob["digest"]: blob["size"] for blob in blobs_of(manifest)}
        found = for_each(
            lambda file: self._client.blob_size(file.version, sizes[file.version]),
            files,
            PARALLEL_LAYERS,
        )
        for file, size in zip(files, found, strict=True):
            if size != sizes[file.version]:
                raise DataInvalid(
                    f"{self.uri}: the registry has {size or 0:,} bytes of {file.version} with {file.name}, expected "
                    f"{sizes[file.version]:,}; push the model again"
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
        while (written := output.tell()) < size:
            try:
                self._append(file, output, size)
            except Unavailable as problem:
                outage = outage if output.tell() == written else Outage(self.uri)
                outage.wait(problem)

    def _append(self, file: RemoteFile, output: IO[bytes], size: int) -> None:
        """Append what one request returns. Raise DataInvalid if the registry does not have the rest of the file."""
        offset, written = offset_in_layer(file), output.tell()
        for chunk in self._client.read_blob(file.version, offset + written, offset + size):
            output.write(chunk)
        if output.tell() < size:
            raise DataInvalid(
                f"{self.uri}: {file.name} has {size:,} bytes and the registry has {output.tell():,} of them in "
                f"{file.version}; push the model again"
            )
