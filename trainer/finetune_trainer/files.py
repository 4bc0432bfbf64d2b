"""Durable, atomic writes of files that another process may read meanwhile.

The operator and the trainer share this module. It is outside of `contract` because it must import fast.
"""

import contextlib
import errno
import functools
import glob
import os
import sys
from collections.abc import Callable
from pathlib import Path

HEX_DIGITS = 8
"""Length of a random suffix. Two processes that draw the same one collide in 1 of 4·10⁹ cases, and one then fails."""
SUFFIX_PATTERN = "[0-9a-f]" * HEX_DIGITS

UNKNOWN_TO_FILE_SYSTEM = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})
"""Errors of a file system that does not know an operation, such as SMB and some of FUSE."""


def write_durably(
    path: Path, data: bytes, before_rename: Callable[[], None] = lambda: None
) -> None:
    """Replace a file atomically: a reader, also after a crash, finds either the old bytes or the new ones.

    Where `before_rename` raises an exception, the file stays as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(path)
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        before_rename()
    except BaseException:
        temporary.unlink(missing_ok=True)  # free the space: the disk may be full
        raise
    temporary.replace(path)
    sync_folder(path.parent)


def temporary_name(path: Path) -> Path:
    """Return a random hidden name beside a path. A pid would not do: it is 1 in every pod that shares the volume."""
    return path.with_name(f".{path.name}.{os.urandom(HEX_DIGITS // 2).hex()}")


def remove_temporary_files(path: Path) -> None:
    """Remove what killed processes left of `write_durably`. No other process may be writing this file."""
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.{SUFFIX_PATTERN}"):
        leftover.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Flush a folder's directory entries to disk, so that a rename in it survives a crash.

    A file system that cannot do this is tolerated and logged once: the rename is then as durable as it makes it.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        if error.errno not in {errno.EACCES, errno.EISDIR}:
            raise
        _log_unsynced(error)
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in UNKNOWN_TO_FILE_SYSTEM:
            raise
        _log_unsynced(error)
    finally:
        os.close(descriptor)


def _log_unsynced(error: OSError) -> None:
    log_once(
        f"this file system cannot flush a folder ({error.strerror}): a power failure may undo the last renames"
    )


@functools.cache
def log_once(text: str) -> None:
    """Print a line to stderr, once per process and text. An OSError, as on a full disk, is ignored."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
