"""The trackers of a run, each in a thread of its own: reporting never waits for a tracker and never fails."""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Self

from finetune_trainer.contract.metric_rows import Row
from finetune_trainer.runtime.errors import Interrupted
from finetune_trainer.runtime.progress.progress import log_line
from finetune_trainer.tracking.port import ReportEnd, Tracker

# An evicted pod has 30 s by default for everything, also for its last checkpoint.
CLOSE_SECONDS = {
    ReportEnd.FINISHED: 15.0,
    ReportEnd.INTERRUPTED: 5.0,
    ReportEnd.FAILED: 5.0,
}
"""Time for all trackers together to receive the remaining calls."""
# Errors of clients may contain a whole response.
MESSAGE_LENGTH = 300


class Trackers:
    """All trackers of a run. No call waits or raises; leaving the block waits at most CLOSE_SECONDS.

    Rows that a tracker did not receive are sent by the next process that reports to the same run.
    """

    def __init__(self, stage: str, trackers: Iterable[Tracker] = ()) -> None:
        self._threads = [TrackerThread(stage, tracker) for tracker in trackers]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(_end_of(kind))

    def log_rows(self, rows: Sequence[Row]) -> None:
        """Log rows with every tracker; see `Tracker.log_rows`. A tracker that is still busy gets them next time."""
        for thread in self._threads:
            # The next call has all rows, so a queue of calls would only hold them several times.
            if not thread.is_busy():
                thread.call(lambda tracker: tracker.log_rows(rows))

    def log_all_rows(self, rows: Sequence[Row]) -> None:
        """Log rows after which no others follow; a busy tracker gets them, too."""
        for thread in self._threads:
            thread.call(lambda tracker: tracker.log_rows(rows))

    def log_scores(self, scores: Mapping[str, float]) -> None:
        """Log numbers that belong to no step with every tracker."""
        for thread in self._threads:
            thread.call(lambda tracker: tracker.log_scores(scores))

    def register_model(self, uri: str, digest: str) -> None:
        """Record the published model with every tracker."""
        for thread in self._threads:
            thread.call(lambda tracker: tracker.register_model(uri, digest))

    def log_card(self, card: str) -> None:
        """Record the model card with every tracker."""
        for thread in self._threads:
            thread.call(lambda tracker: tracker.log_card(card))

    def close(self, end: ReportEnd) -> None:
        """Close every tracker; abandon a tracker that is not done in time."""
        # All of them first: they close at the same time.
        for thread in self._threads:
            thread.end(end)
        deadline = time.monotonic() + CLOSE_SECONDS[end]
        for thread in self._threads:
            thread.wait(deadline)


def _end_of(kind: type[BaseException] | None) -> ReportEnd:
    if kind is None:
        return ReportEnd.FINISHED
    if issubclass(kind, Interrupted):
        return ReportEnd.INTERRUPTED
    return ReportEnd.FAILED


class TrackerThread:
    """Makes the calls of one tracker, one after the other, in a daemon thread that starts with the first call."""

    def __init__(self, stage: str, tracker: Tracker) -> None:
        self._stage = stage
        self._tracker = tracker
        self._calls: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue()
        # Daemon: a thread that waits for a server must not keep the process alive.
        self._thread = threading.Thread(
            target=self._work, daemon=True, name=f"tracker {tracker.name}"
        )
        self._has_warned = False

    def is_busy(self) -> bool:
        """Return whether a call is waiting or running."""
        return self._calls.unfinished_tasks > 0

    def call(self, call: Callable[[Tracker], None]) -> None:
        """Make a call after those before it; return at once."""
        if self._thread.ident is None:
            self._thread.start()
        self._calls.put(call)

    def end(self, end: ReportEnd) -> None:
        """Close the tracker after the calls before; a tracker that was never called needs no closing."""
        if self._thread.ident is not None:
            self._calls.put(lambda tracker: tracker.close(end))
            self._calls.put(None)

    def wait(self, deadline: float) -> None:
        """Wait until the tracker is closed, or until the deadline of the monotonic clock."""
        if self._thread.ident is None:
            return
        left = deadline - time.monotonic()
        self._thread.join(max(0.0, left))
        if self._thread.is_alive():
            self._warn("is too slow and was not waited for any longer")

    def _work(self) -> None:
        while True:
            call = self._calls.get()
            if call is None:
                return
            try:
                call(self._tracker)
            except Exception as error:  # noqa: BLE001  a tracker's library raises anything
                # None of it ends a stage.
                kind = type(error).__name__
                self._warn(f"failed: {kind}: {_first_line(error)}")
            finally:
                self._calls.task_done()

    def _warn(self, text: str) -> None:
        """Log the first problem only: a server that is down would cost a line for every checkpoint."""
        if not self._has_warned:
            self._has_warned = True
            log_line(
                f"{self._stage}: tracking.{self._tracker.name} {text}; the stage goes on, metrics.jsonl in the folder "
                "of train has every row, and the next stage or attempt sends what is missing"
            )


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    if not lines:
        return ""
    return lines[0][:MESSAGE_LENGTH]
