"""Blocking calls of clients in threads, so that the process can still be asked to stop.

Python runs handlers of signals in the main thread, between two of its own instructions. A call into Rust or C that
waits for a server would hold up SIGTERM for as long as it waits.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

from finetune_trainer.runtime.errors import Interrupted
from finetune_trainer.stop_signal import stop

POLL_SECONDS = 0.1
# Much less than the 30 seconds that an evicted pod has by default: the process must still report its end.
WAIT_SECONDS = 5.0
"""Time for calls that are running when another call fails, or when the process is asked to stop."""

T = TypeVar("T")
R = TypeVar("R")


def in_thread(call: Callable[[], R]) -> R:
    """Return `call()`, which runs in another thread. Raise its error, or Interrupted like `for_each`."""
    return for_each(lambda run: run(), [call])[0]


def for_each(work: Callable[[T], R], items: Iterable[T], limit: int = 1) -> list[R]:
    """Return `work(item)` of every item in their order; up to `limit` run at a time, in threads.

    Raise the first error. Raise Interrupted if the process is asked to stop inside `stop.deferred()`. Calls that are
    running then are abandoned after WAIT_SECONDS: their threads end with the process.
    """
    waiting = deque(enumerate(items))
    count = len(waiting)
    results = dict[int, R]()
    errors = list[BaseException]()

    def drain() -> None:
        while not errors and not stop.requested:
            try:
                index, item = waiting.popleft()
            except IndexError:
                return
            try:
                results[index] = work(item)
            except BaseException as error:  # noqa: BLE001  it is raised in the caller's thread
                errors.append(error)

    # Daemon threads: a call that waits for a server must not keep the process alive.
    workers = min(limit, count)
    threads = [threading.Thread(target=drain, daemon=True) for _ in range(workers)]
    for thread in threads:
        thread.start()
    _join(threads, lambda: bool(errors) or stop.requested)
    if errors:
        raise errors[0]
    if len(results) < count:
        raise Interrupted
    return [results[index] for index in range(count)]


def _join(threads: list[threading.Thread], is_ending: Callable[[], bool]) -> None:
    """Wait for all threads, or for WAIT_SECONDS from the moment when `is_ending` is true."""
    deadline = None
    for thread in threads:
        while thread.is_alive():
            # In short waits, to notice an error or a request to stop while the thread waits for a server.
            thread.join(POLL_SECONDS)
            if deadline is None and is_ending():
                deadline = time.monotonic() + WAIT_SECONDS
            if deadline is not None and time.monotonic() > deadline:
                return
