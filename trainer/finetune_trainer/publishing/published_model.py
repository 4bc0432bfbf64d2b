"""What push leaves at its target: a sealed folder, of which all but the card is the model."""

import hashlib
import json
from pathlib import Path

from finetune_trainer.runtime.artifacts import MANIFEST, CorruptArtifact, canonical_json, verify

CARD = "README.md"


def model_digest(folder: Path) -> str:
    """Give sha256:… over the published files but the model card: how the run went does not change the model."""
    files = json.loads((folder / MANIFEST).read_bytes())["files"]
    model = {name: entry for name, entry in files.items() if name != CARD}
    return "sha256:" + hashlib.sha256(canonical_json(model)).hexdigest()


def metadata(folder: Path) -> dict[str, object] | None:
    """Give what the model in a folder is about, or None where none is there, or not all of it."""
    try:
        return verify(folder)
    except CorruptArtifact:
        return None
