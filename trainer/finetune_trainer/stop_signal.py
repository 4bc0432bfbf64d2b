"""SIGTERM, from the first line of the process on.

Two ways to obey it. By default the process ends at once with exit code 75: all that is on the disk was
put there atomically, so nothing is lost but work. Inside `deferred()` the signal is only noted, and the
code that knows where a boundary is looks at `requested` between two units of work.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from finetune_trainer.exit_codes import ExitCode


class StopSignal:
    """Whether this process was asked to stop."""

    def __init__(self) -> None:
        self.requested = False
        self._deferred = 0
        self._on_immediate_exit: Callable[[], None] = lambda: None

    def install(self) -> None:
        """Listen to SIGTERM and SIGINT; without a handler, PID 1 in a container would ignore them."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)

    def on_immediate_exit(self, last_words: Callable[[], None]) -> None:
        """Have this called before the process ends at once."""
        self._on_immediate_exit = last_words

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Only note the signal while this lasts; whoever is inside looks at `requested`."""
        self._deferred += 1
        try:
            yield
        finally:
            self._deferred -= 1

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.requested = True
        if not self._deferred:
            self._on_immediate_exit()
            os._exit(ExitCode.INTERRUPTED)


stop = StopSignal()
"""Of this process; there is only one."""
