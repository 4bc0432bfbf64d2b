"""Handling of SIGTERM and SIGINT, from the first line of the process on.

By default the process exits at once with code 75. All files on disk were written atomically, so only unsaved
work is lost. Inside `deferred()` the handler only sets `requested`. The code inside checks `requested` between
two units of work and stops at a boundary.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from finetune_trainer.exit_codes import ExitCode


class StopSignal:
    """Records whether this process received a signal to stop."""

    def __init__(self) -> None:
        self.requested = False
        self._deferred = 0
        self._on_immediate_exit: Callable[[], None] = lambda: None
        # Reentrant: a signal handler runs in the main thread, which may hold the lock.
        self._exit = threading.RLock()

    def install(self) -> None:
        """Install handlers for SIGTERM and SIGINT; without a handler, PID 1 in a container ignores them."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)

    def on_immediate_exit(self, callback: Callable[[], None]) -> None:
        """Register a callback that runs before an immediate exit; it replaces the previous one."""
        self._on_immediate_exit = callback

    def claim_exit(self) -> None:
        """Prevent other threads from ending the process while this thread finishes its last writes.

        If another thread is already ending the process, wait for its end. A signal still ends the process.
        """
        # Never released.
        self._exit.acquire()

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Defer the exit: inside this block a signal only sets `requested`. Blocks may be nested."""
        self._deferred += 1
        try:
            yield
        finally:
            self._deferred -= 1

    def request(self) -> None:
        """Stop as after a signal. Any thread may call this."""
        self._on_signal(0, None)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.requested = True
        if not self._deferred:
            with self._exit:
                self._on_immediate_exit()
                os._exit(ExitCode.INTERRUPTED)


stop = StopSignal()
"""The only instance, because signal handlers belong to the whole process."""
