"""The folders of results in a workspace: which of them nothing uses any more, and how they are removed.

The trainer removes them when a stage starts, and `finetune workspaces` on this machine: both share this module. A
folder is `STAGE/IDENTITY/`. It is renamed to a hidden name first: a process that is killed while it deletes leaves no
half of a result, and the next process deletes the rest.
"""

import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from finetune_trainer.files import SUFFIX_PATTERN, sync_folder, temporary_name

IDENTITY_PATTERN = "[0-9a-f]" * 16
LOCK = ".lock"
RESULT = "result.json"
TOKENS = ".attempts"
USERS = ".pipelines"
"""Folder in a folder of results with an empty file for each pipeline that has used it, named by the pipeline's uid."""
UNKNOWN = "unknown"
"""Name of this file if a pipeline has used the folder before the files were written."""
# Six heartbeats: some may fail while the volume is away.
SILENT_SECONDS = 30.0
"""Time without a heartbeat after which a process in a folder counts as frozen, cut off or gone."""


def names_in(texts: Iterable[str]) -> frozenset[str]:
    """Return each STAGE/IDENTITY that a URI among the texts names."""
    pattern = re.compile(rf"/([a-z]+/{IDENTITY_PATTERN})(?:/|$)")
    return frozenset(name for text in texts for name in pattern.findall(text))


@dataclass(frozen=True)
class ResultFolder:
    """The folder of a stage's result, finished or not."""

    path: Path

    @property
    def name(self) -> str:
        """The stage and the identity: STAGE/IDENTITY."""
        return f"{self.path.parent.name}/{self.path.name}"

    @property
    def finished(self) -> bool:
        """Whether it holds a result; otherwise an attempt may resume in it."""
        return (self.path / RESULT).exists()

    @property
    def used_at(self) -> float:
        """Unix time at which a process has begun or worked in it last, or a later stage has used it."""
        # A process that reuses the result creates a token, and a process that works touches the lock.
        paths = (self.path, self.path / LOCK, self.path / TOKENS)
        return max(_changed_at(path) for path in paths)

    def is_of(self, pipeline: str) -> bool:
        """Return whether this pipeline has used it, and no other."""
        try:
            return {path.name for path in (self.path / USERS).iterdir()} == {pipeline}
        except OSError:
            return False


def stages_of(names: Iterable[str]) -> tuple[str, ...]:
    """Return the stages of results that are named STAGE/IDENTITY."""
    return tuple(dict.fromkeys(name.partition("/")[0] for name in names))


def record_user(folder: Path, pipeline: str) -> None:
    """Record that a pipeline uses a folder of results. Call it with the folder's lock, before a token is taken."""
    users = folder / USERS
    # An earlier version of the trainer, which recorded none, has worked in it for an unknown pipeline.
    is_older = (folder / TOKENS).exists() and not users.exists()
    users.mkdir(parents=True, exist_ok=True)
    names = [pipeline or UNKNOWN]
    if is_older:
        names.append(UNKNOWN)
    for name in names:
        (users / name).touch()


@dataclass(frozen=True)
class Unused:
    """A rule for the folders of a workspace that nothing uses."""

    workspace: Path
    stages: tuple[str, ...]
    """The stages whose folders it concerns."""
    named: frozenset[str]
    """STAGE/IDENTITY of each folder that is used."""
    keep: int
    """Number of unused folders of each stage that stay: the newest with a result, and as many without."""
    pipeline: str = ""
    """uid of the pipeline."""
    shared: bool = False
    """Whether other pipelines may have folders in the workspace: then only the pipeline's own may go."""

    def folders(self) -> list[ResultFolder]:
        """Return the unused folders, the newest first."""
        folders = [
            folder
            for folder in result_folders(self.workspace, self.stages)
            if folder.name not in self.named and self.may_remove(folder)
        ]
        return sorted(folders, key=lambda folder: folder.used_at, reverse=True)

    def may_remove(self, folder: ResultFolder) -> bool:
        """Return whether no other pipeline may need the folder."""
        return not self.shared or folder.is_of(self.pipeline)

    def surplus(self) -> list[ResultFolder]:
        """Return the unused folders that do not stay."""
        kept: dict[tuple[str, bool], int] = {}
        surplus = []
        for folder in self.folders():
            kind = (folder.path.parent.name, folder.finished)
            kept[kind] = kept.get(kind, 0) + 1
            if kept[kind] > self.keep:
                surplus.append(folder)
        return surplus

    def prune(self, check: Callable[[], None] = lambda: None) -> Iterator[ResultFolder]:
        """Remove the unused folders that do not stay, and yield each. Before each removal, `check` may raise."""
        self._finish_removals()
        self._record_use()
        for folder in self.surplus():
            if self._remove(folder, check):
                yield folder

    def _remove(self, folder: ResultFolder, check: Callable[[], None]) -> bool:
        """Remove a folder and return True; return False if a process works in it."""
        with self._exclusive(folder) as is_free:
            # Again: another pipeline may have come since the folder was listed.
            if not is_free or not self.may_remove(folder):
                return False
            check()
            hidden = temporary_name(folder.path)
            folder.path.rename(hidden)
            sync_folder(hidden.parent)
        shutil.rmtree(hidden, ignore_errors=True)
        return True

    def _record_use(self) -> None:
        """Make the used folders the newest: a result may be used for long after the process that made it."""
        for folder in result_folders(self.workspace, self.stages):
            if folder.name in self.named:
                with suppress(OSError):
                    os.utime(folder.path)

    def _finish_removals(self) -> None:
        """Delete the rest of folders whose removal was interrupted."""
        for stage in self.stages:
            for hidden in (self.workspace / stage).glob(
                f".{IDENTITY_PATTERN}.{SUFFIX_PATTERN}"
            ):
                shutil.rmtree(hidden, ignore_errors=True)

    @contextmanager
    def _exclusive(self, folder: ResultFolder) -> Iterator[bool]:
        """Hold the lock of a folder; yield False if a process has it, or may have it."""
        try:
            descriptor = os.open(folder.path / LOCK, os.O_RDWR)
        except FileNotFoundError:
            # A program of the user has no lock.
            yield True
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        except OSError:
            # This file system has no locks.
            yield self._is_silent(folder)
        else:
            yield True
        finally:
            os.close(descriptor)

    def _is_silent(self, folder: ResultFolder) -> bool:
        """Return whether no process has touched the folder lately, by the clock of the file system."""
        folders = result_folders(self.workspace, self.stages)
        now = max((other.used_at for other in folders), default=0.0)
        return now - folder.used_at >= SILENT_SECONDS


def result_folders(workspace: Path, stages: Iterable[str]) -> list[ResultFolder]:
    """Return the folders of results of these stages."""
    return [
        ResultFolder(path)
        for stage in stages
        for path in sorted((workspace / stage).glob(IDENTITY_PATTERN))
        if path.is_dir() and not path.is_symlink()
    ]


def _changed_at(path: Path) -> float:
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0
