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
    try:
        return read_unreplaced(folder, lambda: read_intact(folder))
    except CorruptArtifact:
        return None


def read_intact(folder: Path) -> PublishedModel:
    """Read every byte of a published model; raise CorruptArtifact if it is not intact, or was replaced meanwhile."""
    digest = digest_of(folder)
    verify(folder)
    found = describe(folder)
    if digest_of(folder) != digest:
        raise CorruptArtifact(f"{folder.name} was replaced while it was read")
    return found


def describe(folder: Path) -> PublishedModel:
    """Return what the manifest says about a published model, without reading its files."""
    manifest = json.loads((folder / MANIFEST).read_bytes())
    digest = digest_of_value(without_card(manifest["files"]))
    return PublishedModel(
        manifest["about"], digest, sum(entry["size"] for entry in manifest["files"].values())
    )
