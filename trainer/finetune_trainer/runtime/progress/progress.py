"""Progress of a stage: lines in the log, a file for the local runner, three HTTP endpoints for the cluster."""

import contextlib
import math
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from typing_extensions import override

from finetune_trainer.contract import Environment, Progress
from finetune_trainer.runtime.progress.activity import activity
from finetune_trainer.runtime.progress.early_save import EarlySave
from finetune_trainer.runtime.progress.server import serve_progress

FILE_SECONDS = 0.1
"""Minimum interval between two writes of the progress file."""
LOG_SECONDS = 5.0
"""Minimum interval between two progress lines in a log."""
TERMINAL_SECONDS = 0.2
"""Minimum interval between two updates of the progress line on a terminal."""
SAVE_REQUESTED = "the operator announces the end of this node"
"""The notice of a request to /save."""


def log_line(text: str) -> None:
    """Print a line to the log. An OSError, as on a full disk, is ignored: a lost line must not end the stage."""
    with contextlib.suppress(OSError):
        print(text, flush=True)


class ProgressReporter:
    """Keeps the latest Progress and publishes it to the file, the log and HTTP, each at its own interval."""

    def __init__(self, stage: str, environment: Environment) -> None:
        self.now = Progress(stage=stage, updated_at=datetime.now(UTC), step=0)  # noqa: TID251  an edge
        self._file = environment.progress_file
        # Long ago, so that the first update is published at once.
        self._written = -math.inf
        self._printed = -math.inf
        self._last_line = ""
        self._lock = threading.Lock()
        """Held while the progress changes: a notice comes from another thread."""
        self.early_save = EarlySave()
        if environment.metrics_port:
            serve_progress(
                environment.metrics_port,
                lambda: self.now,
                lambda: self.announce(SAVE_REQUESTED),
            )

    def update(self, **fields: Any) -> None:
        """Update fields of contract.Progress, and publish them if the interval has passed. It is a sign of life.

        A new note is always published at once, and a new saved step is written to the file at once.
        """
        activity.report()
        with self._lock:
            self._update(fields)

    def report_work(self) -> None:
        """Report a sign of work that changes no field, such as a micro-batch."""
        activity.report()

    def announce(self, notice: str) -> None:
        """Report that this machine will end, and request an early save. Any thread may call this."""
        is_new = self.early_save.request()
        if is_new or notice != self.now.notice:
            log_line(f"{self.now.stage}: {notice}: the next step boundary is saved")
            self.update(notice=notice)

    def _update(self, fields: dict[str, Any]) -> None:
        now = datetime.now(UTC)  # noqa: TID251  an edge
        self.now = self.now.model_copy(update={"updated_at": now, **fields})
        clock = time.monotonic()
        is_urgent = not fields.keys().isdisjoint({"note", "saved_step", "notice"})
        is_file_due = clock - self._written >= FILE_SECONDS
        if is_urgent or is_file_due:
            self._written = clock
            self._write_file()
        interval = TERMINAL_SECONDS if sys.stdout.isatty() else LOG_SECONDS
        is_line_due = clock - self._printed >= interval
        if "note" in fields or is_line_due:
            self._printed = clock
            self.log()

    def report_reuse(self, fields: Mapping[str, Any]) -> None:
        """Report that the result was there already, with what is known of its making. The log says it by itself."""
        self.now = self.now.model_copy(update={"reused": True, **fields})
        self._write_file()

    def _write_file(self) -> None:
        if self._file is None:
            return
        text = self.now.model_dump_json(by_alias=True, exclude_none=True)
        _replace(self._file, text)

    def flush(self) -> None:
        """Publish the latest state to the file and the log now, regardless of the intervals."""
        self._write_file()
        self.log()

    def log(self) -> None:
        """Print the progress line if it has changed; on a terminal, overwrite the previous line."""
        text = line(self.now)
        if text == self._last_line:
            return
        self._last_line = text
        # On a terminal: to the start of the line, and erase it.
        printed = f"\r\x1b[K{text}" if sys.stdout.isatty() else f"{text}\n"
        # The log's disk may be full.
        with contextlib.suppress(OSError):
            sys.stdout.write(printed)
            sys.stdout.flush()


class OtherRankProgress(ProgressReporter):
    """The progress of a process beside the first process, which publishes the progress of all.

    It only logs, and only in the first process of each pod.
    """

    def __init__(self, stage: str, environment: Environment) -> None:
        super().__init__(
            stage, replace(environment, progress_file=None, metrics_port=0)
        )
        self._is_silent = bool(environment.local_rank)

    @override
    def log(self) -> None:
        """Print the progress line, unless another process of this pod prints it."""
        if not self._is_silent:
            super().log()


def line(progress: Progress) -> str:
    """Return a human-readable line of the fields that are known."""
    total = f"/{progress.total}" if progress.total else ""
    parts = [f"{progress.stage} {progress.step}{total}"]
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.4f}")
    if progress.validation_loss is not None:
        parts.append(f"validation loss {progress.validation_loss:.4f}")
    if progress.tokens_per_second:
        parts.append(f"{progress.tokens_per_second:,.0f} tok/s")
    if progress.eta_seconds is not None:
        parts.append(f"ETA {progress.eta_seconds:.0f} s")
    if progress.note:
        parts.append(progress.note)
    return "  ".join(parts)


def _replace(path: Path, text: str) -> None:
    # Atomic for readers, but not durable: after a power failure the progress of a dead process is useless.
    temporary = path.with_name(path.name + ".new")
    # Progress must not end the stage: on a full disk its output may still fit.
    with contextlib.suppress(OSError):
        temporary.write_text(text)
        temporary.replace(path)
