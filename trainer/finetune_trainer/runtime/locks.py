"""Locks between processes, also of other pods and machines: flock on a file. Needs the standard library only."""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from finetune_trainer.files import log_once
from finetune_trainer.runtime.errors import ServiceUnavailable

# An NFS server releases the locks of a client that is gone after its lease, usually 90 s.
LOCK_TIMEOUT_SECONDS = 120
"""Time to wait for a lock."""
FIRST_PAUSE_SECONDS = 0.01
LONGEST_PAUSE_SECONDS = 1.0


class LockingUnsupported(Exception):
    """The file system has no locks; the message is its error."""


@contextlib.contextmanager
def locked(
    path: Path, holder: str, take_over: Callable[[], bool] = lambda: False
) -> Iterator[bool]:
    """Hold the lock of a file, which is created if needed and stays. Yield False if the file system has no locks.

    `holder` is the process to wait for, in words. Raise ServiceUnavailable if it keeps the lock longer than
    LOCK_TIMEOUT_SECONDS: it may be a pod on an unreachable node, or a local run with another work folder. While it has
    the lock, `take_over` is called repeatedly; if it returns True, this process takes the lock nevertheless.
    """
    try:
        descriptor = _wait_for_lock(path, holder, take_over)
    except LockingUnsupported as error:
        log_once(
            f"this file system has no locks ({error}): a second writer cannot be kept out"
        )
        yield False
        return
    try:
        yield True
    finally:
        release(descriptor)


def _wait_for_lock(path: Path, holder: str, take_over: Callable[[], bool]) -> int:
    deadline = time.monotonic() + LOCK_TIMEOUT_SECONDS
    pause = FIRST_PAUSE_SECONDS
    while True:
        descriptor = try_lock(path)
        if descriptor is not None:
            return descriptor
        if take_over():
            print(f"{path}: taken over from {holder}, which is silent", flush=True)
            # The holder keeps the lock of a file that has no name any more; the next file is free.
            path.unlink(missing_ok=True)
            continue
        if pause == FIRST_PAUSE_SECONDS:
            with contextlib.suppress(OSError):
                print(
                    f"{path}: waiting up to {LOCK_TIMEOUT_SECONDS} s for {holder}",
                    flush=True,
                )
        if time.monotonic() > deadline:
            raise ServiceUnavailable(
                f"{path} is locked by another process for more than {LOCK_TIMEOUT_SECONDS} s: "
                f"wait for {holder}, or stop it"
            )
        # Not a blocking flock: the handler of SIGTERM runs between two of these calls.
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


def try_lock(path: Path, *, create: bool = True) -> int | None:
    """Return a descriptor that holds the lock of a file, or None if another process holds it.

    Raise LockingUnsupported if the file system has no locks. Without `create`, raise FileNotFoundError if the file
    does not exist.
    """
    flags = os.O_RDWR
    if create:
        flags |= os.O_CREAT
    while True:
        if create:
            # Another process may have removed the folder, in which no process worked.
            path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, flags, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError as error:
            os.close(descriptor)
            raise LockingUnsupported(str(error)) from error
        if _is_name_of(path, descriptor):
            return descriptor
        # The process that held the lock has deleted its file, and another process may have a new file of this name.
        os.close(descriptor)


def _is_name_of(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def release(descriptor: int) -> None:
    """Release a lock, also if a forked process has inherited the descriptor."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
