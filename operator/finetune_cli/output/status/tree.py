"""A pipeline's status as a tree of stages and attempts, for a terminal or a file."""

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from finetune_cli.output.loss_curve import INDENT, loss_lines
from finetune_cli.output.notes import stage_notes
from finetune_cli.output.results import changed_records, records_text, score_texts
from finetune_cli.output.status.text import attempts_line, joined, stage_summary
from finetune_operator.api.spec import STAGES
from finetune_operator.api.status import (
    AttemptStatus,
    Outcome,
    PipelineStatus,
    StageState,
    StageStatus,
)
from finetune_operator.core.durations import format_duration
from finetune_trainer.contract import EvaluateResult, PrepareResult

# The signs differ as well as the colours: a file and a monochrome terminal have no colours.
MARKS: dict[StageState, tuple[str, str]] = {
    StageState.PENDING: ("○", "dim"),
    StageState.QUEUED: ("◌", "yellow"),
    StageState.RUNNING: ("●", "cyan"),
    StageState.SUCCEEDED: ("✔", "green"),
    StageState.FAILED: ("✗", "red"),
    StageState.SKIPPED: ("·", "dim"),
}
"""State -> its sign and its style."""
BAR_WIDTH = 16
"""So wide that a stage with steps of five digits fits a terminal of 80 columns."""

AttemptDetails = Callable[[AttemptStatus], Sequence[str]]
"""Returns the lines to print under an attempt, for example about its pod."""


def live_table(
    title: str,
    status: PipelineStatus,
    details: AttemptDetails = lambda _: (),
    *,
    now: datetime | None = None,
    spinner: Spinner | None = None,
    until: str | None = None,
) -> RenderableType:
    """Return the pipeline as a tree of stages and attempts, with the lines of `details` under each attempt.

    A stage with a loss curve has it in a line below, and a stage that may have ended badly has notes.

    An attempt that succeeded or runs, and did not resume earlier work, is left out unless it has details. Attempts
    that failed with the same error are one line. With `now`, what runs has its time so far. The stages after `until`
    are not asked for.
    """
    heading = joined([title, status.phase, _total(status, now)])
    lines: list[RenderableType] = [Text(heading, "bold")]
    names = [kind.name for kind in STAGES]
    asked = names
    if until in names:
        asked = names[: names.index(until) + 1]
    # In the order of STAGES: an API server returns status.stages sorted by name.
    for name in names:
        stage = status.stages.get(name)
        if stage is None:
            continue
        if name not in asked and stage.state is StageState.PENDING:
            lines.append(Text(f"· {name:<9} not asked", style="dim"))
            continue
        lines.append(_stage_line(name, stage, now, spinner))
        lines += loss_lines(stage)
        scores = _scores(stage)
        # A single score is in the stage's own line.
        if len(scores) > 1:
            lines += [Text(f"{INDENT}{text}", style="cyan") for text in scores]
        for note in stage_notes(name, stage):
            lines.append(Text(f"{INDENT}note: {note.message}", style="yellow"))
        lines += _attempt_lines(stage, details)
    return Group(*lines)


def _scores(stage: StageStatus) -> list[str]:
    if not isinstance(stage.result, EvaluateResult):
        return []
    return list(score_texts(stage.result))


def _result_text(stage: StageStatus) -> Text:
    """Return the most important numbers of the result, in yellow if records were lost; empty for other stages."""
    if stage.state is not StageState.SUCCEEDED:
        return Text()
    if isinstance(stage.result, PrepareResult):
        style = "green"
        if changed_records(stage.result):
            style = "yellow"
        return Text(f"  {records_text(stage.result)}", style)
    scores = _scores(stage)
    if len(scores) == 1:
        return Text(f"  {scores[0]}", "green")
    return Text()


def _total(status: PipelineStatus, now: datetime | None) -> str:
    """Return the time from the start of the first attempt to the end, or to now."""
    end = status.finished_at or now
    if status.started_at is None or end is None:
        return ""
    return format_duration((end - status.started_at).total_seconds())


def _attempt_lines(stage: StageStatus, details: AttemptDetails) -> Iterator[Text]:
    """Yield the lines of a stage's notable attempts, each followed by its details."""
    for attempts in _same_failures(stage.attempts, details):
        last = attempts[-1]
        details_lines = details(last)
        if details_lines or _is_notable(last):
            # The stage's own line shows the error of its last attempt already.
            line = attempts_line(attempts, shown=stage.message)
            yield Text(f"  ↳ {line}", style="dim")
        for text in details_lines:
            yield Text(f"      {text}", style="dim")


def _same_failures(
    attempts: Sequence[AttemptStatus], details: AttemptDetails
) -> Iterator[list[AttemptStatus]]:
    """Yield the attempts in groups: attempts in a row that failed with the same error are one group."""
    group: list[AttemptStatus] = []
    for attempt in attempts:
        # An attempt with details, such as its pod, has lines of its own.
        is_alone = bool(details(attempt))
        if group and (is_alone or not _same_failure(group[-1], attempt)):
            yield group
            group = []
        group.append(attempt)
    if group:
        yield group


def _same_failure(attempt: AttemptStatus, other: AttemptStatus) -> bool:
    if {attempt.outcome, other.outcome} != {Outcome.FAILED}:
        return False
    is_same_error = attempt.message == other.message
    return is_same_error and attempt.exit_code == other.exit_code


def _is_notable(attempt: AttemptStatus) -> bool:
    """Return whether the attempt failed, was interrupted or resumed earlier work."""
    ended_early = attempt.outcome not in {Outcome.SUCCEEDED, Outcome.RUNNING}
    return ended_early or bool(attempt.start_step)


def _stage_line(
    name: str, stage: StageStatus, now: datetime | None, spinner: Spinner | None
) -> RenderableType:
    sign, style = MARKS[stage.state]
    mark: RenderableType = Text(sign, style=style)
    title = Text(f"{name:<9}", style="bold")
    summary = Text(stage_summary(stage, now), style)
    summary.append_text(_result_text(stage))
    is_active = stage.state in {StageState.QUEUED, StageState.RUNNING}
    if spinner is not None and is_active:
        mark = spinner
    bar = _bar(stage)
    if bar is None and isinstance(mark, Text):
        # Not a table: a table cell would truncate a long message.
        return Text(" ").join((mark, title, summary))
    cells = [mark, title]
    if bar is not None:
        cells.append(bar)
    cells.append(summary)
    line = Table.grid(padding=(0, 1))
    line.add_row(*cells)
    return line


def _bar(stage: StageStatus) -> RenderableType | None:
    progress = stage.progress
    if stage.state is not StageState.RUNNING:
        return None
    # Without a total, there is no end to draw a bar to.
    if progress is None or not progress.total:
        return None
    return ProgressBar(total=progress.total, completed=progress.step, width=BAR_WIDTH)
