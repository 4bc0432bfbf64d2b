"""Lists of pipelines, one line each: on a cluster and on this machine with the same columns."""

import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from finetune_cli.manifest.fields import score_of
from finetune_cli.output.notes import notes_of_object
from finetune_operator.core.durations import format_duration

COLUMNS = ("NAME", "PHASE", "STAGE", "PROGRESS", "SCORE", "DURATION", "AGE", "NOTES")


def row(
    pipeline: Mapping[str, Any],
    now: datetime,
    *,
    working: bool = True,
    gain: bool = False,
) -> tuple[str, ...]:
    """Return the cells of one pipeline, which is an object as an API server returns it.

    With `gain`, a score has its difference from the base model's. `working` is False if no process works on the
    pipeline: its duration then ends with its last attempt.
    """
    # Plain objects and not models: another version of the operator may have written them.
    meta = pipeline["metadata"]
    status = pipeline.get("status") or {}
    started = _time(status.get("startedAt"))
    finished = _time(status.get("finishedAt"))
    created = _time(meta.get("creationTimestamp")) or started
    phase = status.get("phase") or "Pending"
    end: datetime | None = finished or now
    if not working and finished is None:
        end = max(_ends(status), default=None)
    return (
        str(meta["name"]),
        str(phase),
        str(status.get("stage") or ""),
        str(status.get("progress") or ""),
        score_of(status, gain=gain),
        _between(started, end),
        _between(created, now),
        ", ".join(note.reason for note in notes_of_object(pipeline)),
    )


def _between(start: datetime | None, end: datetime | None) -> str:
    """Return the time between two moments; empty if either is not known."""
    if start is None or end is None:
        return ""
    return format_duration((end - start).total_seconds())


def fitted(rows: Callable[[bool], Sequence[Sequence[str]]]) -> Iterator[str]:
    """Yield aligned lines of the rows with gains, or without them if the terminal is too narrow."""
    wide = list(aligned(rows(True)))
    width = shutil.get_terminal_size().columns
    longest = max(map(len, wide))
    # A file or a pipe has any width.
    if sys.stdout.isatty() and longest > width:
        return aligned(rows(False))
    return iter(wide)


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the rows as lines with columns of equal width."""
    columns = zip(*rows, strict=True)
    widths = [max(map(len, column)) for column in columns]
    for row in rows:
        cells = map(str.ljust, row, widths)
        yield "  ".join(cells).rstrip()


def _ends(status: Mapping[str, Any]) -> Iterator[datetime]:
    for stage in status.get("stages") or ():
        for attempt in stage.get("attempts") or ():
            end = _time(attempt.get("finishedAt"))
            if end is not None:
                yield end


def _time(text: str | None) -> datetime | None:
    if not text:
        return None
    time = datetime.fromisoformat(text)
    if time.tzinfo is None:
        # Kubernetes' times are UTC, and times with and without a zone cannot be compared.
        return time.replace(tzinfo=UTC)
    return time
