"""Durable, atomic writes of files that another process may read meanwhile.

The operator and the trainer share this module. It is outside of `contract` because it must import fast.
"""

import os
from pathlib import Path


def write_durably(path: Path, data: bytes) -> None:
    """Replace a file atomically: a reader, also after a crash, finds either the old bytes or the new ones."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        temporary.unlink(missing_ok=True)  # free the space: the disk may be full
        raise
    temporary.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush a folder's directory entries to disk, so that a rename in it survives a crash."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
