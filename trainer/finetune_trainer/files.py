"""Files that others read while they are written: the channel between a stage and whoever started it.

Part of what operator and trainer share, and apart from `contract` only because it must import in no time.
"""

import os
from pathlib import Path


def write_durably(path: Path, data: bytes) -> None:
    """Replace a file so that a reader, or a crash, sees the old bytes or the new ones and nothing between."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        temporary.unlink(missing_ok=True)  # on a full disk every byte counts
        raise
    temporary.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
