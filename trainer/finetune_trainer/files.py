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

# Two processes draw the same suffix in 1 of 4·10⁹ cases; the second process then fails.
HEX_DIGITS = 8
"""Length of a random suffix."""
SUFFIX_PATTERN = "[0-9a-f]" * HEX_DIGITS

UNKNOWN_TO_FILE_SYSTEM = frozenset(
    {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
)
"""Errors of a file system that does not know an operation, such as SMB and some of FUSE."""


def write_durably(
    path: Path, data: bytes, before_rename: Callable[[], None] = lambda: None
) -> None:
    """Replace a file atomically: a reader, also after a crash, finds either the old bytes or the new bytes.

    If `before_rename` raises an exception, the file stays as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(path)
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            # Before the rename: else a crash may leave the new name with an empty file.
            os.fsync(file.fileno())
        before_rename()
    except BaseException:
        # Free the space: the disk may be full.
        temporary.unlink(missing_ok=True)
        raise
    temporary.replace(path)
    sync_folder(path.parent)


def temporary_name(path: Path) -> Path:
    """Return a random hidden name beside a path."""
    # A pid would not do: it is 1 in every pod that shares the volume.
    suffix = os.urandom(HEX_DIGITS // 2).hex()
    return path.with_name(f".{path.name}.{suffix}")


def remove_temporary_files(path: Path) -> None:
    """Remove files that killed processes left in `write_durably`. No other process may be writing this file."""
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.{SUFFIX_PATTERN}"):
        leftover.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Flush a folder's directory entries to disk, so that a rename in it survives a crash.

    A file system that cannot do this is tolerated and logged once: a power failure may then undo the rename.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        # The errors of a file system that does not open folders.
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
