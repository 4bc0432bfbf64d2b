"""Folders of the workspace that the process may not write: another attempt would fail in the same way."""

import errno
import os
from pathlib import Path

from finetune_trainer.runtime.errors import ConfigInvalid

REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
"""Errors of a folder that this user may not write."""


def create_folder(folder: Path) -> None:
    """Create a stage's folder; raise ConfigInvalid, with the owner and the fix, if the process may not write to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno not in REFUSED:
            raise
        problem = describe_refusal(folder) or f"cannot be created: {error}"
        raise ConfigInvalid(problem) from error
    problem = describe_refusal(folder)
    if problem:
        raise ConfigInvalid(problem)


def describe_error(error: OSError, workspace: Path) -> str:
    """Return which folder of the workspace refused a write, with the fix; empty for an error that may pass.

    A file system that becomes read-only while a stage runs is such an error: the next attempt mounts it again.
    """
    if error.errno not in {errno.EACCES, errno.EPERM} or not error.filename:
        return ""
    path = Path(os.fsdecode(error.filename))
    if not path.is_relative_to(workspace):
        return ""
    return describe_refusal(path) or describe_refusal(path.parent)


def describe_refusal(path: Path) -> str:
    """Return that a path, or the first existing folder above it, is not writable, with the fix; empty if it is."""
    existing = path
    # Path.exists() raises PermissionError below a folder that this user may not enter.
    while not os.access(existing, os.F_OK) and existing != existing.parent:
        existing = existing.parent
    needed = os.W_OK | os.X_OK if existing.is_dir() else os.W_OK
    if os.access(existing, needed):
        return ""
    if os.statvfs(existing).f_flag & os.ST_RDONLY:
        fix = "mount it for writing, or use another claim"
        return f"{existing} is not writable, because its volume is read-only: {fix}"
    about = existing.stat()
    owner = f"{about.st_uid}:{about.st_gid}, mode {about.st_mode & 0o7777:04o}"
    user = f"user {os.geteuid()} (group {os.getegid()})"
    fix = "chown it once, as the driver of its volume does not apply fsGroup"
    return f"{existing} is not writable for {user}: it belongs to {owner}; {fix}"
