"""The fence of a stage's folder: a process that was replaced publishes nothing any more.

A node that is silent may come back, and with it a process whose attempt has long been replaced. A lock does not keep it
out: the process may have the lock, or the file system may lose locks or have none. So every process takes a fencing
token first: a folder `.attempts/N` that only one process can create. N only increases, and the largest token belongs to
the folder's owner. A token appears together with its owner's name, as a rename of a folder that has the name in it:
another process that saw a token without a name could not tell that a later attempt has it.

    take token   create `.attempts/N+1`, then rename away the unfinished folders of smaller tokens
    publish      write a temporary folder, check that no token is larger, rename the folder

A process that sleeps between the check and the rename finds no temporary folder any more when it wakes up, so its
rename fails. A process that creates a temporary folder later finds the larger token. This needs neither locks nor
clocks. It needs a file system that shows a new name to every machine that opens its folder, as NFS does.
"""

import errno
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from finetune_trainer.files import (
    SUFFIX_PATTERN,
    sync_folder,
    temporary_name,
    write_durably,
)
from finetune_trainer.result_folders import SILENT_SECONDS, TOKENS
from finetune_trainer.runtime.errors import Replaced

HEARTBEAT_SECONDS = 5.0
"""Time between two heartbeats, which also look for a larger token."""
NUMBER_DIGITS = 8
OWNER = "owner.json"
TAKEN = {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.ENOENT}
"""Errors of file systems if another process has the token: it exists, or its owner has removed our temporary folder."""
LABEL = re.compile(r"[.]a[0-9]+t([0-9]+)[.][0-9a-f]+$")
"""In the name of an attempt's temporary folder; the group is its token."""


@dataclass(frozen=True)
class Attempt:
    """The attempt that takes a token."""

    pipeline: str = ""
    """uid of the pipeline; empty if no operator started the process."""
    number: int = 0

    @override
    def __str__(self) -> str:
        """Return the attempt as the subject of a sentence."""
        if self.number:
            return f"attempt {self.number}"
        return "a process without an attempt's number"


class Fence:
    """The token of this process for a folder. Without a folder, as in tests of a stage, its check never fails."""

    def __init__(
        self, folder: Path | None = None, attempt: Attempt | None = None, token: int = 0
    ) -> None:
        self._folder = folder
        self._token = token
        self.attempt = attempt or Attempt()

    @property
    def label(self) -> str:
        """The part of the names of temporary folders that stands for this attempt and its token."""
        return f"a{self.attempt.number}t{self._token}"

    def check(self) -> None:
        """Raise Replaced if another process has taken the folder over. Call this right before each rename."""
        if self._folder is None:
            return
        newest = _newest(self._folder)
        if newest > self._token:
            raise _replaced(self.attempt, _read(self._folder, newest))

    @contextmanager
    def raising_replaced(self) -> Iterator[None]:
        """Raise Replaced in place of any other error if there is a newer attempt: it may have removed our files."""
        try:
            yield
        except Exception:
            self.check()
            raise

    @contextmanager
    def heartbeats(
        self, lock: Path, on_replaced: Callable[[Replaced], None]
    ) -> Iterator[None]:
        """Touch the lock file while the context is open; a thread calls `on_replaced` if there is a larger token."""
        over = threading.Event()
        threading.Thread(
            target=self._beat,
            args=(lock, on_replaced, over),
            daemon=True,
            name="heartbeat",
        ).start()
        try:
            yield
        finally:
            over.set()

    def _beat(
        self, lock: Path, on_replaced: Callable[[Replaced], None], over: threading.Event
    ) -> None:
        while not over.wait(HEARTBEAT_SECONDS):
            # The volume may be away for a while.
            with suppress(OSError):
                try:
                    self.check()
                except Replaced as error:
                    on_replaced(error)
                    return
                os.utime(lock)


UNFENCED = Fence()


def take_token(folder: Path, attempt: Attempt) -> Fence:
    """Take the folder over, durably, and remove what others left unfinished.

    Raise Replaced if a later attempt of the same pipeline has it.
    """
    (folder / TOKENS).mkdir(parents=True, exist_ok=True)
    sync_folder(folder)
    number = check_order(folder, attempt) + 1
    while not _create(_path(folder, number), attempt):
        # Another process was faster, and may be a later attempt.
        number = check_order(folder, attempt) + 1
    # Only now: the folder must have a largest token at any time.
    _remove_smaller_tokens(folder, number)
    _remove_unfinished(folder, number)
    return Fence(folder, attempt, number)


def _remove_smaller_tokens(folder: Path, number: int) -> None:
    for older in _tokens(folder):
        if older < number:
            shutil.rmtree(_path(folder, older), ignore_errors=True)
    # Folders that were to become a token, of processes that were killed or too slow.
    for unfinished in (folder / TOKENS).glob(f".*.{SUFFIX_PATTERN}"):
        _, unfinished_number, _ = unfinished.name.split(".")
        if int(unfinished_number) <= number:
            shutil.rmtree(unfinished, ignore_errors=True)


def check_order(folder: Path, attempt: Attempt) -> int:
    """Return the largest token, or 0. Raise Replaced if it belongs to a later attempt of the same pipeline."""
    # Read once: the caller may take only the token after the token whose owner was checked here.
    newest = _newest(folder)
    owner = _read(folder, newest)
    if owner.pipeline == attempt.pipeline and owner.number > attempt.number:
        raise _replaced(attempt, owner)
    return newest


class SilentHolder:
    """A rule for taking a lock over: its holder has sent no heartbeat for SILENT_SECONDS.

    Only changes of the lock file's time count, so that the machines' clocks may differ.
    """

    def __init__(self, folder: Path, lock: Path, attempt: Attempt) -> None:
        self._folder = folder
        self._lock = lock
        self._attempt = attempt
        # No time of a file: the first look counts as a change.
        self._changed_at = -1
        self._since = time.monotonic()

    def __call__(self) -> bool:
        """Return whether the holder is silent. Raise Replaced if it is a later attempt of the same pipeline."""
        check_order(self._folder, self._attempt)
        changed_at = _changed_at(self._lock)
        if changed_at != self._changed_at:
            self._changed_at = changed_at
            self._since = time.monotonic()
        return time.monotonic() - self._since >= SILENT_SECONDS


def _changed_at(path: Path) -> int:
    try:
        # Opened, because NFS then asks the server instead of its cache.
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return 0


def _create(path: Path, attempt: Attempt) -> bool:
    """Return whether the token is this process's own and the largest: another process may have been faster."""
    temporary = temporary_name(path)
    temporary.mkdir()
    owner = {"pipeline": attempt.pipeline, "attempt": attempt.number}
    try:
        write_durably(temporary / OWNER, json.dumps(owner).encode())
        # Fails if the token exists, since a token is never an empty folder.
        temporary.rename(path)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if error.errno not in TAKEN:
            raise
        return False
    sync_folder(path.parent)
    if _newest(path.parent.parent) == int(path.name):
        return True
    # This process slept while others took larger tokens and removed this token.
    shutil.rmtree(path, ignore_errors=True)
    return False


def _read(folder: Path, number: int) -> Attempt:
    """Return the attempt that took a token; an unknown attempt if a later attempt has removed this token."""
    try:
        owner: Any = json.loads((_path(folder, number) / OWNER).read_bytes())
        return Attempt(str(owner["pipeline"]), int(owner["attempt"]))
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return Attempt()


def _path(folder: Path, number: int) -> Path:
    return folder / TOKENS / f"{number:0{NUMBER_DIGITS}}"


def _newest(folder: Path) -> int:
    return max(_tokens(folder), default=0)


def _tokens(folder: Path) -> list[int]:
    try:
        return [
            int(path.name)
            for path in (folder / TOKENS).iterdir()
            if path.name.isdecimal()
        ]
    except FileNotFoundError:
        return []


def _remove_unfinished(folder: Path, token: int) -> None:
    """Remove the temporary folders of smaller tokens."""
    unfinished = f".*.a*t*.{SUFFIX_PATTERN}"
    in_folder = folder.glob(unfinished)
    in_subfolders = folder.glob(f"*/{unfinished}")
    # A list, because the loop renames folders.
    for temporary in [*in_folder, *in_subfolders]:
        label = LABEL.search(temporary.name)
        if label is None or int(label[1]) >= token:
            continue
        doomed = temporary_name(folder / "unfinished")
        # Renamed first, because a rename is atomic: its author cannot publish a folder that is half removed.
        # The author may have removed it in this moment.
        with suppress(FileNotFoundError):
            temporary.rename(doomed)
            print(f"removed the unfinished {temporary.relative_to(folder)}", flush=True)
        temporary.with_name(f"{temporary.name}.lock").unlink(missing_ok=True)
    for doomed in folder.glob(f".unfinished.{SUFFIX_PATTERN}"):
        shutil.rmtree(doomed, ignore_errors=True)


def _replaced(attempt: Attempt, by: Attempt) -> Replaced:
    other = str(by)
    if attempt.pipeline != by.pipeline:
        other += " of another pipeline"
    return Replaced(f"{attempt} was replaced by {other}: it ends and publishes nothing")
