"""The fence of a stage's folder: a process that was replaced publishes nothing any more.

A node that is silent may come back, and with it a process whose attempt has long been replaced. A lock does not keep it
out: it may have the lock, or the file system may lose locks or have none. So every process takes a fencing token first:
a folder `.attempts/N` that only one process can create. N only increases, and the largest is that of the folder's
owner. A token appears together with its owner's name, as a rename of a folder that has the name in it: another process
that saw a token without a name could not tell that a later attempt has it.

    take token   create `.attempts/N+1`, then rename away the unfinished folders of smaller tokens
    publish      write a temporary folder, check that no token is larger, rename the folder

A process that sleeps between the check and the rename finds no temporary folder any more when it wakes up, so that its
rename fails. One that creates a temporary folder later finds the larger token. This needs neither locks nor clocks. It
needs a file system that shows a new name to every machine that opens its folder, as NFS does.
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

from finetune_trainer.files import SUFFIX_PATTERN, sync_folder, temporary_name, write_durably
from finetune_trainer.runtime.errors import Replaced

TOKENS = ".attempts"
HEARTBEAT_SECONDS = 5.0
"""Between two heartbeats, which also look for a larger token."""
SILENT_SECONDS = 30.0
"""Time without a heartbeat after which the holder of a lock is taken for frozen or cut off."""
NUMBER_DIGITS = 8
OWNER = "owner.json"
TAKEN = {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.ENOENT}
"""What file systems answer if another process has the token: it exists, or its owner removed what was to become it."""
LABEL = re.compile(r"[.]a[0-9]+t([0-9]+)[.][0-9a-f]+$")
"""In the name of an attempt's temporary folder; the group is its token."""


@dataclass(frozen=True)
class Attempt:
    """Who takes a token."""

    pipeline: str = ""
    """uid of the pipeline; empty: a process that no operator started."""
    number: int = 0

    @override
    def __str__(self) -> str:
        """Return the attempt as the subject of a sentence."""
        return f"attempt {self.number}" if self.number else "a process without an attempt's number"


class Fence:
    """The token of this process for a folder; without a folder, as in a test of one stage, it never fails."""

    def __init__(
        self, folder: Path | None = None, attempt: Attempt | None = None, token: int = 0
    ) -> None:
        self._folder, self._token = folder, token
        self.attempt = attempt or Attempt()

    @property
    def label(self) -> str:
        """What names of this attempt's temporary folders contain."""
        return f"a{self.attempt.number}t{self._token}"

    def check(self) -> None:
        """Raise Replaced if another process has taken the folder over. Call this right before each rename."""
        if self._folder is not None and (newest := _newest(self._folder)) > self._token:
            raise _replaced(self.attempt, _read(self._folder, newest))

    @contextmanager
    def telling_why(self) -> Iterator[None]:
        """Raise Replaced instead of any other error if a newer attempt may have caused that, by what it removed."""
        try:
            yield
        except Exception:
            self.check()
            raise

    @contextmanager
    def heartbeats(self, lock: Path, on_replaced: Callable[[Replaced], None]) -> Iterator[None]:
        """Touch the lock file while the context is open; a thread calls `on_replaced` if there is a larger token."""
        over = threading.Event()
        threading.Thread(
            target=self._beat, args=(lock, on_replaced, over), daemon=True, name="heartbeat"
        ).start()
        try:
            yield
        finally:
            over.set()

    def _beat(
        self, lock: Path, on_replaced: Callable[[Replaced], None], over: threading.Event
    ) -> None:
        while not over.wait(HEARTBEAT_SECONDS):
            with suppress(OSError):  # the volume may be away for a while
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
        number = (
            check_order(folder, attempt) + 1
        )  # another process was faster, and may be a later attempt
    for older in _tokens(folder):
        if older < number:
            shutil.rmtree(_path(folder, older), ignore_errors=True)
    for unfinished in (folder / TOKENS).glob(f".*.{SUFFIX_PATTERN}"):
        if (
            int(unfinished.name.split(".")[1]) <= number
        ):  # of a killed process, or of one that has lost
            shutil.rmtree(unfinished, ignore_errors=True)
    _remove_unfinished(folder, number)
    return Fence(folder, attempt, number)


def check_order(folder: Path, attempt: Attempt) -> int:
    """Return the largest token, 0 without one. Raise Replaced if a later attempt of the same pipeline has it."""
    newest = _newest(
        folder
    )  # read once: the next token may be taken only after the owner whose name was looked at
    owner = _read(folder, newest)
    if owner.pipeline == attempt.pipeline and owner.number > attempt.number:
        raise _replaced(attempt, owner)
    return newest


class SilentHolder:
    """A rule for taking a lock over: its holder has sent no heartbeat for SILENT_SECONDS.

    Only changes of the lock file's time count, so that the machines' clocks may differ.
    """

    def __init__(self, folder: Path, lock: Path, attempt: Attempt) -> None:
        self._folder, self._lock, self._attempt = folder, lock, attempt
        self._seen, self._since = -1, time.monotonic()

    def __call__(self) -> bool:
        """Return whether the holder is silent. Raise Replaced if it is a later attempt of the same pipeline."""
        check_order(self._folder, self._attempt)
        seen = _changed_at(self._lock)
        if seen != self._seen:
            self._seen, self._since = seen, time.monotonic()
        return time.monotonic() - self._since >= SILENT_SECONDS


def _changed_at(path: Path) -> int:
    try:
        with path.open("rb") as file:  # opened, because NFS then asks the server
            return os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return 0


def _create(path: Path, attempt: Attempt) -> bool:
    """Return whether the token is this process's own and the largest: another process may have been faster."""
    temporary = temporary_name(path)
    temporary.mkdir()
    try:
        write_durably(
            temporary / OWNER,
            json.dumps({"pipeline": attempt.pipeline, "attempt": attempt.number}).encode(),
        )
        temporary.rename(
            path
        )  # fails where the token exists, since a token is never an empty folder
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if error.errno not in TAKEN:
            raise
        return False
    sync_folder(path.parent)
    if _newest(path.parent.parent) == int(path.name):
        return True
    shutil.rmtree(
        path, ignore_errors=True
    )  # this process slept while others passed this token and removed it
    return False


def _read(folder: Path, number: int) -> Attempt:
    """Return who took a token; unknown if there is none, or if a later one has been taken and this one removed."""
    try:
        found: Any = json.loads((_path(folder, number) / OWNER).read_bytes())
        return Attempt(str(found["pipeline"]), int(found["attempt"]))
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return Attempt()


def _path(folder: Path, number: int) -> Path:
    return folder / TOKENS / f"{number:0{NUMBER_DIGITS}}"


def _newest(folder: Path) -> int:
    return max(_tokens(folder), default=0)


def _tokens(folder: Path) -> list[int]:
    try:
        return [int(path.name) for path in (folder / TOKENS).iterdir() if path.name.isdecimal()]
    except FileNotFoundError:
        return []


def _remove_unfinished(folder: Path, token: int) -> None:
    """Remove the temporary folders of smaller tokens. A rename is atomic: their author cannot publish a part of one."""
    unfinished = f".*.a*t*.{SUFFIX_PATTERN}"
    for temporary in [*folder.glob(unfinished), *folder.glob(f"*/{unfinished}")]:
        label = LABEL.search(temporary.name)
        if label is None or int(label[1]) >= token:
            continue
        doomed = temporary_name(folder / "unfinished")
        with suppress(FileNotFoundError):  # its author has just removed it
            temporary.rename(doomed)
            print(f"removed the unfinished {temporary.relative_to(folder)}", flush=True)
        temporary.with_name(f"{temporary.name}.lock").unlink(missing_ok=True)
    for doomed in folder.glob(f".unfinished.{SUFFIX_PATTERN}"):
        shutil.rmtree(doomed, ignore_errors=True)


def _replaced(attempt: Attempt, by: Attempt) -> Replaced:
    other = "" if attempt.pipeline == by.pipeline else " of another pipeline"
    return Replaced(f"{attempt} was replaced by {by}{other}: it ends and publishes nothing")
