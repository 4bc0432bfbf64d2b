"""Digests of what lies behind a manifest's URIs, so that data which changed in place is other data."""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import yaml

from finetune_operator.local.job_folder import read_json
from finetune_trainer.contract import Environment
from finetune_trainer.contract.environment import InvalidLocation
from finetune_trainer.files import write_durably


class SourceDigests:
    """Remembers the digest of a file as long as its size and time of change stay the same."""

    def __init__(self, cache: Path, *, keep: bool = True) -> None:
        self.cache, self.keep = cache, keep
        self.known: dict[str, str] = {k: v for k, v in (read_json(cache) or {}).items() if isinstance(v, str)}

    def digests(self, uris: Iterable[str], environment: Environment) -> dict[str, str]:
        """Give URI -> sha256:… for every URI that names something on this machine."""
        before = dict(self.known)
        found = {uri: digest for uri in uris if (digest := self._digest(uri, environment))}
        if self.keep and self.known != before:
            with contextlib.suppress(OSError):  # on a full disk it is reckoned again
                write_durably(self.cache, json.dumps(self.known, indent=1).encode())
        return found

    def _digest(self, uri: str, environment: Environment) -> str | None:
        try:
            path = environment.locate(uri)
            parts = [(os.path.relpath(file, path), self._file_digest(file)) for file in _files(path)]
        except (InvalidLocation, OSError):
            return None  # the stage that needs it will say what is wrong
        return "sha256:" + hashlib.sha256(json.dumps(parts).encode()).hexdigest() if parts else None

    def _file_digest(self, path: Path) -> str:
        about = path.stat()
        key = f"{path} {about.st_size} {about.st_mtime_ns} {about.st_ino}"
        if key not in self.known:
            with path.open("rb") as file:
                self.known[key] = hashlib.file_digest(file, "sha256").hexdigest()
        return self.known[key]


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        yield from _named_in(path)
    elif path.is_dir():
        yield from sorted(file for file in path.rglob("*") if file.is_file())


def _named_in(path: Path) -> Iterator[Path]:
    """Give the files that a task file speaks of: data beside it, and modules of its !function tags."""
    if path.suffix not in {".yaml", ".yml"}:
        return
    try:
        tokens = [token for token in yaml.scan(path.read_text()) if isinstance(token, yaml.ScalarToken)]
    except (yaml.YAMLError, UnicodeDecodeError):
        return
    names = {name for token in tokens for name in (token.value, token.value.partition(".")[0] + ".py")}
    yield from sorted(path.parent / name for name in names if _is_file(path.parent / name))


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a prompt is no file name
        return False
