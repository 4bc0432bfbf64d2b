"""The work folder of a run: its lock, which the process that works on the run holds, and its deletion."""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from finetune_cli.runs import MANIFEST, UNTIL
from finetune_operator.local.file_names import PIPELINE_FILE
from finetune_operator.local.pipeline_file import WRITE_LOCK
from finetune_operator.local.runner import LOCK

LOG = "run.log"
"""File with the output of a run in the background."""
SERVER = "server.json"
"""File with the port of `finetune run --keep-serving`, which holds its lock while it serves."""
DELETED = ".deleted-"
"""Prefix of a folder in the work folder with the files of a run that is being deleted."""
OWN_FILES = (
    # First: without it, the folder holds no run, whatever is left of its other files.
    PIPELINE_FILE,
    "volumes",
    "jobs",
    "claims",
    "events.jsonl",
    "contents.json",
    LOG,
    SERVER,
    UNTIL,
    MANIFEST,
    WRITE_LOCK,
    LOCK,
)
"""All files and folders of a run, in the order of their deletion."""
# A command that looks whether a run works holds the lock for microseconds.
LOCK_SECONDS = 0.2
"""How long a lock is tried for."""


class WorkFolderInUse(Exception):
    """Another process works on the run."""


@contextlib.contextmanager
def locked(workdir: Path) -> Iterator[None]:
    """Hold the lock of an existing work folder; raise WorkFolderInUse if another process does."""
    deadline = time.monotonic() + LOCK_SECONDS
    lock = _try_lock(workdir / LOCK)
    while lock is None:
        if time.monotonic() > deadline:
            raise WorkFolderInUse
        time.sleep(0.01)
        lock = _try_lock(workdir / LOCK)
    with lock:
        remove_leftovers(workdir)
        yield


def _try_lock(path: Path) -> IO[str] | None:
    """Return the locked file, or None if another process holds its lock or has just deleted it."""
    lock = path.open("w")
    try:
        # The kernel releases this lock if the process is killed.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock.fileno()), path.stat()):
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    lock.close()
    return None


def delete(workdir: Path) -> None:
    """Delete the files of a run, and its folder if nothing else is in it. The caller holds the lock.

    If this process is killed, either the run is there as before, or the folder holds no run. A result of a stage is
    never there in part: another run of the manifest would take it for complete.
    """
    trash = Path(tempfile.mkdtemp(prefix=DELETED, dir=workdir))
    for name in OWN_FILES:
        # A user may have removed some of them.
        with contextlib.suppress(FileNotFoundError):
            (workdir / name).rename(trash / name)
    shutil.rmtree(trash)
    # Files of the user stay, and so does the folder of a volume.
    with contextlib.suppress(OSError):
        workdir.rmdir()


def remove_leftovers(workdir: Path) -> None:
    """Remove what a deletion has left that was killed."""
    for trash in workdir.glob(f"{DELETED}*"):
        shutil.rmtree(trash, ignore_errors=True)
