"""SIGINT at a moment when its handler may raise."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Handle SIGINT at the end of the block, not within it.

    ThreadPoolExecutor loses a thread when KeyboardInterrupt is raised while it starts the thread: nothing waits for
    that thread any more, and it goes on beside the cleanup. Outside the main thread no signal is received anyway.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received = threading.Event()
    previous = signal.signal(signal.SIGINT, lambda _number, _frame: received.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if received.is_set():
            signal.raise_signal(signal.SIGINT)
