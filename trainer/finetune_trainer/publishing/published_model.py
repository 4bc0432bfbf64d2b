"""The artifact that push writes to its target: the model's files and the model card."""

import json
from dataclasses import dataclass
from pathlib import Path

from finetune_trainer.runtime.artifacts import (
    MANIFEST,
    CorruptArtifact,
    digest_of,
    digest_of_value,
    read_unreplaced,
    verify,
)
from finetune_trainer.stores.publications import without_card


@dataclass(frozen=True)
class PublishedModel:
    """An intact published model, as its manifest describes it."""

    about: dict[str, object]
    digest: str
    """sha256:… over the files except the model card, which describes the run and not the model."""
    size: int
    """Bytes of all files."""


def read_published(folder: Path) -> PublishedModel | None:
    """Read every byte of a published model; return None if the folder is not an intact artifact."""
    # Another push may replace the folder during the read, which may take minutes.
    try:
        return read_unreplaced(folder, lambda: read_intact(folder))
    except CorruptArtifact:
        return None


def read_intact(folder: Path) -> PublishedModel:
    """Read every byte of a published model; raise CorruptArtifact if it is not intact, or was replaced meanwhile."""
    digest = digest_of(folder)
    verify(folder)
    model = describe(folder)
    # Files and manifest may be of two models if the folder was replaced in between.
    if digest_of(folder) != digest:
        raise CorruptArtifact(f"{folder.name} was replaced while it was read")
    return model


def describe(folder: Path) -> PublishedModel:
    """Return the manifest's description of a published model, without reading its files."""
    manifest = json.loads((folder / MANIFEST).read_bytes())
    files = manifest["files"]
    digest = digest_of_value(without_card(files))
    sizes = [entry["size"] for entry in files.values()]
    return PublishedModel(manifest["about"], digest, sum(sizes))
