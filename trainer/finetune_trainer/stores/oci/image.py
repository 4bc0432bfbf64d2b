"""Images that hold a model: their names, layers, config and manifest. Knows no network.

An image has one uncompressed tar layer for each file, below models/. Its bytes follow from the files alone, so that
every push of the same files has the same digest. Container runtimes mount it as an image volume.
"""

import hashlib
import json
import re
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune_trainer.runtime.artifacts import CorruptArtifact, canonical_json
from finetune_trainer.runtime.errors import ConfigInvalid, DataInvalid, Interrupted
from finetune_trainer.stop_signal import stop
from finetune_trainer.stores.port import RemoteFile

MODEL_FOLDER = "models"
"""Folder of the files in the image; the subPath of an image volume."""

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"

MODEL_DIGEST = "dev.finetune.digest"
"""Annotation of the manifest: the digest under which a push published the model."""
# Not the usual title, with which `oras pull` would write the archive under the name of the file in it.
FILE_NAME = "dev.finetune.name"
FILE_SIZE = "dev.finetune.size"
FILE_SHA256 = "dev.finetune.sha256"
"""Annotations of a layer: name, size in bytes and SHA-256 of the file in it."""

MODELPACK_LAYER = re.compile(r"application/vnd\.cncf\.model\.[\w.+-]+\.raw")
MODELPACK_NAMES = ("org.cncf.model.filepath", "org.opencontainers.image.title")

# The image format requires a platform. Files of a model fit any platform.
PLATFORM = {"architecture": "amd64", "os": "linux"}

# The limit of overlayfs: containerd mounts an image with 500 layers, and not with 501.
MOST_LAYERS = 500

BLOCK = tarfile.BLOCKSIZE
# The tar format ends an archive with two empty blocks.
END_BLOCKS = 2
CHUNK_BYTES = 1 << 20

_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_NAME = re.compile(
    r"oci://(?P<host>(?:\[[0-9a-fA-F:]+\]|[A-Za-z0-9.-]+)(?::[0-9]+)?)"
    rf"/(?P<repository>{_COMPONENT}(?:/{_COMPONENT})*)"
    r"(?::(?P<tag>\w[\w.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?",
    re.ASCII,
)


@dataclass(frozen=True)
class ImageName:
    """An image in a registry: oci://HOST/REPOSITORY[:TAG][@sha256:…]."""

    host: str
    """Host name or address, with a port if there is one."""
    repository: str
    tag: str | None
    digest: str | None


def parse_name(uri: str) -> ImageName:
    """Return the parts of an oci:// URI; raise ConfigInvalid if it names no image."""
    match = _NAME.fullmatch(uri)
    if match is None:
        raise ConfigInvalid(
            f"{uri} names no image; use oci://HOST/REPOSITORY, in lower case, with :TAG or @sha256:…"
        )
    return ImageName(**match.groupdict())


@dataclass(frozen=True)
class Layer:
    """A file as a tar archive, which is made while it is read. It can be read any number of times."""

    path: Path
    name: str
    """Name of the file in the published folder."""
    size: int
    """Size of the file in bytes."""
    sha256: str
    """SHA-256 of the file in hexadecimal."""

    def __len__(self) -> int:
        return archive_size(self.name, self.size)

    def __iter__(self) -> Iterator[bytes]:
        yield archive_header(self.name, self.size)
        yield from self.content()
        yield bytes(padding(self.size))

    def content(self) -> Iterator[bytes]:
        """Yield the bytes of the file; raise CorruptArtifact if it has another size, Interrupted if asked to stop."""
        left = self.size
        with self.path.open("rb") as file:
            # A byte more than is left shows that the file has grown.
            while chunk := file.read(min(CHUNK_BYTES, left + 1)):
                # Inside of `stop.deferred()`, and in a thread, no signal ends the read of a large file.
                if stop.requested:
                    raise Interrupted
                left -= len(chunk)
                if left < 0:
                    break
                yield chunk
        if left:
            raise CorruptArtifact(
                f"{self.path} does not have {self.size} bytes, as in its manifest"
            )

    def digest(self) -> str:
        """Return sha256:… of the archive; raise CorruptArtifact if the file has another size."""
        archive = hashlib.sha256()
        for chunk in self:
            archive.update(chunk)
        return f"sha256:{archive.hexdigest()}"


def archive_header(name: str, size: int) -> bytes:
    """Return the tar header of a file: owned by root, readable by all, of 1970. Long names and sizes get a PAX header.

    Folders have no entries of their own: container runtimes create them with mode 0755.
    """
    # Neither the owner nor the time of the file: the same model must have the same digest on every machine.
    entry = tarfile.TarInfo(f"{MODEL_FOLDER}/{name}")
    entry.size = size
    entry.mode = 0o644
    return entry.tobuf(tarfile.PAX_FORMAT)


def padding(size: int) -> int:
    """Return the number of zero bytes behind a file of this size in its archive."""
    return -size % BLOCK + END_BLOCKS * BLOCK


def archive_size(name: str, size: int) -> int:
    """Return the size in bytes of the archive of one file."""
    header = archive_header(name, size)
    return len(header) + size + padding(size)


@dataclass(frozen=True)
class Image:
    """The two small documents of an image."""

    config: bytes
    manifest: bytes

    @property
    def digest(self) -> str:
        """The digest by which the image is pulled."""
        return digest_of_bytes(self.manifest)


def build_image(digest: str, layers: Sequence[tuple[Layer, str]]) -> Image:
    """Return the image of layers and their digests. `digest` is the model's, sha256:…."""
    # Layers are not compressed, so the digest of a layer is also the digest of its content.
    digests = [layer_digest for _, layer_digest in layers]
    config = canonical_json(
        {
            **PLATFORM,
            "config": {},
            "rootfs": {"type": "layers", "diff_ids": digests},
        }
    )
    # Canonical JSON: the digest of the image is the SHA-256 of these bytes.
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": {
            "mediaType": CONFIG_TYPE,
            "digest": digest_of_bytes(config),
            "size": len(config),
        },
        "layers": [_describe(layer, layer_digest) for layer, layer_digest in layers],
        "annotations": {MODEL_DIGEST: digest},
    }
    return Image(config, canonical_json(manifest))


def _describe(layer: Layer, digest: str) -> dict[str, object]:
    """Return the descriptor of a layer."""
    annotations = {
        FILE_NAME: layer.name,
        FILE_SIZE: str(layer.size),
        FILE_SHA256: layer.sha256,
    }
    return {
        "mediaType": LAYER_TYPE,
        "digest": digest,
        "size": len(layer),
        "annotations": annotations,
    }


def digest_of_bytes(content: bytes) -> str:
    """Return sha256:… of bytes."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def is_pushed(manifest: bytes) -> bool:
    """Return whether a push wrote this manifest."""
    try:
        return MODEL_DIGEST in json.loads(manifest)["annotations"]
    except (ValueError, KeyError, TypeError):
        return False


def blobs_of(manifest: bytes) -> list[dict[str, Any]]:
    """Return the descriptors of the config and the layers of a valid manifest."""
    content = json.loads(manifest)
    return [content["config"], *content["layers"]]


def read_files(uri: str, manifest: bytes) -> tuple[RemoteFile, ...]:
    """Return the files of an image that a push wrote, or of a ModelPack artifact with raw layers, sorted by name.

    Raise DataInvalid if it is neither.
    """
    try:
        layers = json.loads(manifest)["layers"]
        files = [_read_file(layer) for layer in layers]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataInvalid(
            f"{uri} holds no model that can be read: {error}; it must be an image that push wrote, "
            "or a ModelPack artifact with raw layers"
        ) from None
    names = Counter(file.name for file in files)
    repeated = [name for name, count in names.items() if count > 1]
    if repeated:
        raise DataInvalid(
            f"{uri}: two layers hold a file {min(repeated)}; publish the model again"
        )
    return tuple(sorted(files, key=lambda file: file.name))


def _read_file(layer: dict[str, Any]) -> RemoteFile:
    """Return the file in a layer; raise KeyError or ValueError if there is none."""
    kind = layer["mediaType"]
    digest = layer["digest"]
    annotations = layer.get("annotations") or {}
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
        raise ValueError(f"{digest} is not a SHA-256 digest")
    if kind == LAYER_TYPE and FILE_NAME in annotations:
        name = _checked(annotations[FILE_NAME])
        size = int(annotations[FILE_SIZE])
        layer_size = layer["size"]
        # The offset of the file in its layer follows from name and size.
        if layer_size != archive_size(name, size):
            raise ValueError(f"the layer of {name} has {layer_size} bytes")
        sha256 = annotations[FILE_SHA256]
        return RemoteFile(name, size, digest, sha256)
    titles = [annotations[key] for key in MODELPACK_NAMES if annotations.get(key)]
    if MODELPACK_LAYER.fullmatch(kind) and titles:
        name = _checked(titles[0])
        # A raw layer is the file itself.
        size = int(layer["size"])
        sha256 = digest.removeprefix("sha256:")
        return RemoteFile(name, size, digest, sha256)
    raise ValueError(f"the layer {digest} is of the type {kind} and names no file")


def _checked(name: str) -> str:
    """Return the name of a file; raise ValueError if it would lie outside of its folder."""
    is_path = not {"", ".", ".."} & set(name.split("/"))
    if not is_path or "\0" in name:
        raise ValueError(f"{name!r} is not a path below the model's folder")
    return name


def offset_in_layer(file: RemoteFile) -> int:
    """Return the offset in bytes at which a file begins in its layer: 0 in a raw layer, which is the file."""
    is_raw = file.version == f"sha256:{file.sha256}"
    if is_raw:
        return 0
    return len(archive_header(file.name, file.size or 0))
