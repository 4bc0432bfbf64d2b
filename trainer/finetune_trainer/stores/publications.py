"""The layout of a target in folders and object stores: a folder for each digest, and `latest`."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from finetune_trainer.contract.engines import DIGEST_FOLDER
from finetune_trainer.runtime.artifacts import MANIFEST, digest_of_value
from finetune_trainer.runtime.errors import ConfigInvalid

LATEST = "latest"
"""Names the newest folder: a link in a file system; an object with the folder's name in an object store."""

# The card describes the run, so it is no part of the model and of its digest: two runs that train the same model
# publish it under one digest.
CARD = "README.md"
"""The model card."""

TAG_DIGITS = 12
"""Digits of a digest in its tag."""

Entries = dict[str, tuple[int, str]]
"""Size in bytes and SHA-256 of each file, by name."""
T = TypeVar("T")


def folder_name(digest: str) -> str:
    """Return the name of the folder of a digest, sha256:…; raise ValueError if it is none."""
    name = digest.replace(":", "-", 1)
    if not DIGEST_FOLDER.fullmatch(name):
        raise ValueError(f"{digest!r} is no SHA-256 digest")
    return name


def tag_name(digest: str) -> str:
    """Return the tag of a digest in a hub or a registry."""
    return f"sha256-{digest.removeprefix('sha256:')[:TAG_DIGITS]}"


def sealed_entries(folder: Path, names: Sequence[str]) -> Entries:
    """Return the entries of a sealed folder; raise ValueError if it was sealed with other files than `names`."""
    manifest = (folder / MANIFEST).read_bytes()
    entries = entries_of(manifest)
    if entries is None or set(entries) != set(names):
        raise ValueError(
            f"{folder} is not sealed with exactly the files {sorted(names)}"
        )
    return entries


def entries_of(manifest: bytes) -> Entries | None:
    """Return the entries of a manifest that `runtime.artifacts.seal` wrote; None for any other content."""
    try:
        content = json.loads(manifest)
        files = content["files"]
        digest = content["digest"]
        entries = {
            str(name): (int(entry["size"]), str(entry["sha256"]))
            for name, entry in files.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    # A user's own manifest.json may have the same keys. Its digest then differs.
    if digest != digest_of_value(files):
        return None
    return entries


def without_card(entries: Mapping[str, T]) -> dict[str, T]:
    """Return the entries of the files that make the model."""
    return {name: entry for name, entry in entries.items() if name != CARD}


def manifest_with(manifest: bytes, entries: Entries) -> bytes:
    """Return a manifest with other entries."""
    files = {}
    for name, (size, sha256) in entries.items():
        files[name] = {"size": size, "sha256": sha256}
    content = json.loads(manifest)
    content["files"] = files
    content["digest"] = digest_of_value(files)
    # The format in which `seal` writes a manifest.
    return json.dumps(content, indent=1, sort_keys=True).encode()


def check_was_pushed(uri: str, names: Iterable[str]) -> None:
    """Raise ConfigInvalid if a target holds more than `latest` and folders of digests, by its names at the top."""
    others = [name for name in names if name != LATEST]
    foreign = [name for name in others if not DIGEST_FOLDER.fullmatch(name)]
    if foreign:
        raise ConfigInvalid(
            f"push.targets {uri}: {min(foreign)} was not written by a push; move it or choose another target"
        )
