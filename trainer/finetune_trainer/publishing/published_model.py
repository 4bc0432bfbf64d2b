"""The artifact that push writes to its target: the model's files and the model card."""

import hashlib
import json
from pathlib import Path

from finetune_trainer.runtime.artifacts import MANIFEST, CorruptArtifact, canonical_json, verify

CARD = "README.md"


def model_digest(folder: Path) -> str:
    """Return sha256:… over the published files except the model card, which describes the run and not the model."""
    files = json.loads((folder / MANIFEST).read_bytes())["files"]
    model = {name: entry for name, entry in files.items() if name != CARD}
    return "sha256:" + hashlib.sha256(canonical_json(model)).hexdigest()


def metadata(folder: Path) -> dict[str, object] | None:
    """Return the `about` of a published model, or None if the folder is not an intact artifact."""
    try:
        return verify(folder)
    except CorruptArtifact:
        return None
