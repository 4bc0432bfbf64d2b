"""End a stage that hangs: while a process waits for ever, its GPUs are paid and no attempt follows."""

import faulthandler
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from finetune_trainer.contract import Environment, Failure, Progress, TerminationMessage
from finetune_trainer.exit_codes import ExitCode
from finetune_trainer.runtime.progress.activity import activity
from finetune_trainer.runtime.progress.progress import ProgressReporter, line, log_line
from finetune_trainer.runtime.stage_folder import write_termination_message
from finetune_trainer.stop_signal import StopSignal

LONGEST_POLL_SECONDS = 10.0
"""Time between two looks at the counter."""
POLLS = 20
"""Looks within the limit, if it is short."""
# Heartbeats and log lines are kilobytes in an hour. A library that loads or sends a model moves gigabytes.
WORKING_BYTES = 1 << 20
"""Bytes read or written that are a sign of work."""
IO_COUNTERS = Path("/proc/self/io")
COUNTED = ("rchar", "wchar", "read_bytes")
"""Bytes of calls such as read and write, and bytes that a mapped file has fetched from its disk."""
LOG_SECONDS = 10.0
"""Limit for writing the stacks: the reader of the log may be what hangs."""


class Watchdog:
    """A thread that ends this process if it gives no sign of work for a limit."""

    def __init__(self, stage: str, environment: Environment, stop: StopSignal) -> None:
        self.reporter: ProgressReporter | None = None
        """Set as soon as the stage reports progress."""
        self._stage = stage
        self._environment = environment
        self._stop = stop
        self._limit = environment.max_silence_seconds
        self._over = threading.Event()

    def start(self) -> None:
        """Start to watch."""
        threading.Thread(target=self._watch, daemon=True, name="watchdog").start()

    def close(self) -> None:
        """Watch no more."""
        self._over.set()

    def _watch(self) -> None:
        is_silent = self._wait_for_silence()
        faulthandler.cancel_dump_traceback_later()
        if is_silent:
            self._end()

    def _wait_for_silence(self) -> bool:
        """Return True after the limit without a sign of work; False as soon as the stage is over."""
        poll = min(LONGEST_POLL_SECONDS, self._limit / POLLS)
        silence = 0.0
        count = activity.count
        moved = _moved_bytes()
        while silence < self._limit:
            # A call into C that keeps Python's lock stops this thread, too. Then a thread in C ends the process.
            faulthandler.dump_traceback_later(2 * self._limit, exit=True)
            if self._over.wait(poll):
                return False
            # Not by a clock: a process that was frozen had no time to work.
            silence += poll
            moved_now = _moved_bytes()
            if activity.count != count or moved_now - moved >= WORKING_BYTES:
                silence = 0.0
                count = activity.count
                moved = moved_now
        return True

    def _end(self) -> None:
        progress = self.reporter.now if self.reporter else None
        message = self._message(progress)
        thread = threading.Thread(target=_log_stacks, args=(message,), daemon=True)
        thread.start()
        thread.join(LOG_SECONDS)
        report = TerminationMessage(failure=Failure(message=message), progress=progress)
        end_process(self._environment, self._stop, report, ExitCode.UNAVAILABLE)

    def _message(self, progress: Progress | None) -> str:
        state = f" after: {line(progress)}" if progress else ""
        return (
            f"{self._stage}: no sign of work for {self._limit} s{state}. The log has the stacks of all threads. "
            f"The stage is tried again; if it was only slow, raise {self._stage}.maxSilenceSeconds"
        )


@contextmanager
def watched(
    stage: str, environment: Environment, stop: StopSignal
) -> Iterator[Watchdog]:
    """End this process if it gives no sign of work in the block for the environment's limit; 0 is no limit.

    Of processes that train together, only the first is watched. It waits for all others in each step.
    """
    watchdog = Watchdog(stage, environment, stop)
    if environment.max_silence_seconds:
        watchdog.start()
    try:
        yield watchdog
    finally:
        watchdog.close()


def _moved_bytes() -> int:
    """Return the bytes that this process has read and written so far; 0 if the kernel does not count them."""
    # Libraries load and send models in calls of many minutes that report nothing.
    try:
        lines = IO_COUNTERS.read_text().splitlines()
    except OSError:
        return 0
    counters = dict(entry.split(": ") for entry in lines)
    return sum(int(counters.get(name, 0)) for name in COUNTED)


def _log_stacks(message: str) -> None:
    log_line(message)
    with suppress(OSError, ValueError):
        faulthandler.dump_traceback(sys.stderr, all_threads=True)


def end_process(
    environment: Environment, stop: StopSignal, message: TerminationMessage, code: int
) -> None:
    """End this process from a thread beside the stage, with this message; wait for another end that has begun."""
    stop.claim_exit()
    try:
        write_termination_message(environment, message)
    finally:
        # Whatever happens: nothing else can end this process now. An exception would only end this thread.
        os._exit(code)
