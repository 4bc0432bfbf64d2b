"""The generations of runs as a table: what each edit changed, and what was measured."""

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from finetune_cli.comparison.compare import Run, differing_fields, measurements
from finetune_cli.manifest.fields import score_of
from finetune_cli.output.comparison_lines import cut, loss_text, value_text
from finetune_cli.output.table import fitted
from finetune_operator.core.durations import format_duration

COLUMNS = ("NAME", "PHASE", "LOSS", "VALIDATION", "SCORE", "TIME", "AGE")
# Wide enough for most URIs. A chat template may be a page long.
CHANGED_CELLS = 60
"""A longer value of a changed field is cut."""


def history_lines(histories: Sequence[Sequence[Run]], now: datetime) -> Iterator[str]:
    """Yield a line for each generation, the oldest of a run first, with the changed fields below it."""
    generations = [run for history in histories for run in history]

    def rows(gain: bool) -> list[tuple[str, ...]]:  # noqa: FBT001  as `fitted` calls it
        cells = [_row(run, now, gain=gain) for run in generations]
        return [COLUMNS, *cells]

    lines = fitted(rows)
    yield next(lines)
    for history in histories:
        before = None
        for run in history:
            yield next(lines)
            if before is not None:
                yield from _changes(before, run)
            before = run


def _row(run: Run, now: datetime, *, gain: bool) -> tuple[str, ...]:
    status = run.status
    measured = measurements(run)
    content: dict[str, Any] = status.model_dump(mode="json", by_alias=True)
    # A generation that was edited before its end stays as it was then.
    phase = status.phase if status.finished_at else "Unfinished"
    age = ""
    if status.finished_at:
        age = format_duration((now - status.finished_at).total_seconds())
    return (
        run.name,
        phase,
        loss_text(measured.training_loss),
        loss_text(measured.validation_loss),
        score_of(content, gain=gain),
        format_duration(measured.seconds),
        age,
    )


def _changes(before: Run, run: Run) -> Iterator[str]:
    for field in differing_fields([before, run]):
        old, new = (cut(value_text(value), CHANGED_CELLS) for value in field.values)
        yield f"  {field.path}: {old} → {new}"
