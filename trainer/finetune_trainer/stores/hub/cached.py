"""The Hugging Face cache of this machine: what any program of the user has downloaded from the hub.

A file that is there is not downloaded again. With HF_HUB_OFFLINE, the cache stands for the hub.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import constants
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.hf_api import RepoFile

COMMIT = re.compile("[0-9a-f]{40}")
SHA256 = re.compile("[0-9a-f]{64}")


def is_offline() -> bool:
    """Return whether HF_HUB_OFFLINE forbids requests to the hub."""
    # Read at each call, because tests set it.
    return bool(constants.HF_HUB_OFFLINE)


class CachedRepository:
    """The files of one repository in the cache."""

    def __init__(self, name: str, kind: str) -> None:
        folder = repo_folder_name(repo_id=name, repo_type=kind)
        self._folder = Path(constants.HF_HUB_CACHE, folder)

    def commit_of(self, revision: str | None) -> str | None:
        """Return the commit that a branch, a tag or a commit named last; None if the cache does not know it."""
        name = revision or "main"
        commit = name
        reference = self._folder / "refs" / name
        if reference.is_file():
            commit = reference.read_text("utf-8").strip()
        is_known = COMMIT.fullmatch(commit) and self._snapshot(commit).is_dir()
        return commit if is_known else None

    def files(self, commit: str) -> Iterator[RepoFile]:
        """Yield the files of a commit that are in the cache. These may be fewer than the repository has."""
        snapshot = self._snapshot(commit)
        for path in sorted(snapshot.rglob("*")):
            if not path.is_file():
                continue
            # A link to a blob, whose name is the SHA-256 of a large file, else the git object id.
            blob = path.resolve()
            size = blob.stat().st_size
            lfs = None
            if SHA256.fullmatch(blob.name):
                lfs = {"oid": blob.name, "size": size, "pointerSize": 0}
            name = path.relative_to(snapshot).as_posix()
            about: dict[str, Any] = {"path": name, "size": size, "oid": blob.name}
            new: Any = RepoFile
            yield new(**about, lfs=lfs)

    def read(self, path: str, commit: str) -> bytes:
        """Return the content of a file; raises FileNotFoundError if the cache lacks it."""
        return (self._snapshot(commit) / path).read_bytes()

    def blob(self, digest: str, size: int | None) -> Path | None:
        """Return the file with a SHA-256 or a git object id; None if the cache lacks it or has a part of it."""
        path = self._folder / "blobs" / digest
        try:
            is_whole = size in {None, path.stat().st_size}
        except OSError:
            return None
        return path if is_whole else None

    def _snapshot(self, commit: str) -> Path:
        return self._folder / "snapshots" / commit
