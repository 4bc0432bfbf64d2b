"""Lists of pipelines, one line each: on a cluster and on this machine with the same columns."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from finetune_cli.fields import score_of
from finetune_operator.core.durations import format_duration

COLUMNS = ("NAME", "PHASE", "STAGE", "PROGRESS", "SCORE", "DURATION", "AGE")


def row(pipeline: Mapping[str, Any], now: datetime, *, working: bool = True) -> tuple[str, ...]:
    """Return the cells of one pipeline, which is an object as an API server returns it.

    `working` is False where no process works on the pipeline: its duration then ends with its last attempt.
    """
    meta, status = pipeline["metadata"], pipeline.get("status") or {}
    phase = status.get("phase") or "Pending"
    if not working and not status.get("finishedAt"):
        phase = "Stopped"
    started = _time(status.get("startedAt"))
    created = _time(meta.get("creationTimestamp")) or started
    values = (phase, status.get("stage"), status.get("progress"), score_of(status))
    end = _time(status.get("finishedAt")) or (now if working else _last_end(status))
    return (
        str(meta["name"]),
        *(str(value or "") for value in values),
        format_duration((end - started).total_seconds()) if started and end else "",
        format_duration((now - created).total_seconds()) if created else "",
    )


def aligned(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    """Return the rows as lines with columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _last_end(status: Mapping[str, Any]) -> datetime | None:
    return max(_ends(status), default=None)


def _ends(status: Mapping[str, Any]) -> Iterator[datetime]:
    for stage in status.get("stages") or ():
        for attempt in stage.get("attempts") or ():
            if end := _time(attempt.get("finishedAt")):
                yield end


def _time(text: str | None) -> datetime | None:
    if not text:
        return None
    found = datetime.fromisoformat(text)
    return found if found.tzinfo else found.replace(tzinfo=UTC)
