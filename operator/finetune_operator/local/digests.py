"""Digests of the local files that a manifest refers to. They are part of the identity (ADR 4).

Data that is edited in place is therefore different data, and the stages that read it run again.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from finetune_operator.local.job_folder import read_json
from finetune_operator.local.task_sources import files_of_task
from finetune_trainer.contract import Environment
from finetune_trainer.contract.environment import InvalidLocation
from finetune_trainer.files import write_durably


class SourceDigests:
    """Computes digests; caches the digest of a file while its size, modification time and inode are unchanged."""

    def __init__(self, cache: Path, *, save: bool = True) -> None:
        self.cache = cache
        self.save = save
        stored = read_json(cache) or {}
        self.file_digests: dict[str, str] = {
            file: digest for file, digest in stored.items() if isinstance(digest, str)
        }

    def digests(self, uris: Iterable[str], environment: Environment) -> dict[str, str]:
        """Return URI -> sha256:… for every URI that refers to files on this machine."""
        previous = dict(self.file_digests)
        digests: dict[str, str] = {}
        for uri in uris:
            digest = self._digest(uri, environment)
            if digest:
                digests[uri] = digest
        if self.save and self.file_digests != previous:
            # On a full disk, the next run computes them again.
            with contextlib.suppress(OSError):
                write_durably(
                    self.cache, json.dumps(self.file_digests, indent=1).encode()
                )
        return digests

    def _digest(self, uri: str, environment: Environment) -> str | None:
        try:
            path = environment.locate(uri)
            files: list[Path] = []
            for match in environment.matches(uri):
                files += _files(environment.locate(match))
            # The relative path: a copy of the folder elsewhere is the same data.
            parts = [
                (os.path.relpath(file, path), self._file_digest(file)) for file in files
            ]
        except (InvalidLocation, OSError):
            # The stage that needs the source reports its problem.
            return None
        if not parts:
            return None
        return "sha256:" + hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def _file_digest(self, path: Path) -> str:
        info = path.stat()
        key = f"{path} {info.st_size} {info.st_mtime_ns} {info.st_ino}"
        if key not in self.file_digests:
            with path.open("rb") as file:
                self.file_digests[key] = hashlib.file_digest(file, "sha256").hexdigest()
        return self.file_digests[key]


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        # Of the files that a manifest names, only task files are YAML.
        if path.suffix in {".yaml", ".yml"}:
            yield from files_of_task(path)
    elif path.is_dir():
        yield from sorted(file for file in path.rglob("*") if file.is_file())
