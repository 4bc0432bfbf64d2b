"""The section about time: when each attempt of each stage waited and ran, and what interruptions cost."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise

from finetune_cli.card.chart import bar, chart, figure, label, legend, line
from finetune_cli.card.markup import (
    Markup,
    element,
    join,
    section,
    shortened,
    table,
)
from finetune_cli.card.record import RunRecord, current_attempts
from finetune_cli.output.costs import attempt_place
from finetune_cli.output.results import counted
from finetune_operator.api.spec import STAGES
from finetune_operator.api.status import AttemptStatus, Outcome, StageState
from finetune_operator.core.durations import DAY, HOUR, MINUTE, format_duration

LANE = 30
"""Pixels of a stage."""
BAR = 16
"""Height of a bar in pixels."""
BOTTOM = 26
"""Pixels below the lanes, for the labels of the time."""
# A pipeline may be edited after days of rest. Drawn in full, they would leave no width for the attempts.
LONG_BREAK = 0.15
"""A break of at least this part of the working time is cut."""
# Wide enough that the line through its middle touches no bar.
BREAK = 0.05
"""Part of the working time as which a cut break is drawn."""
# Times that people count in, from seconds to a year.
MARKS = (
    *(1, 2, 5, 10, 15, 30),
    *(MINUTE * number for number in (1, 2, 5, 10, 15, 30)),
    *(HOUR * number for number in (1, 2, 3, 6, 12)),
    *(DAY * number for number in (1, 2, 5, 10, 30, 100, 365)),
)
"""Seconds between two labels of the time."""
LABELS = 5
"""Labels of the time on a narrow screen at most."""
OUTCOMES = {
    Outcome.SUCCEEDED: "succeeded",
    Outcome.INTERRUPTED: "interrupted",
    Outcome.FAILED: "failed",
    Outcome.STOPPED: "stopped",
    Outcome.RUNNING: "running",
}
"""Outcome of an attempt -> the kind of its bar."""


@dataclass(frozen=True)
class Span:
    """The times of an attempt."""

    stage: str
    attempt: AttemptStatus
    created: datetime
    started: datetime | None
    end: datetime

    @property
    def waited(self) -> float:
        """Seconds without a process: before its start, and while its Job was suspended."""
        begin = self.started or self.end
        before_start = (begin - self.created).total_seconds()
        return before_start + self.attempt.suspended_seconds

    @property
    def lost_from(self) -> datetime | None:
        """Time from which its work was lost; None if no work was lost."""
        if not self.attempt.lost_seconds or self.started is None:
            return None
        lost = self.end - timedelta(seconds=self.attempt.lost_seconds)
        # The seconds are computed from steps, so they may exceed the time that the process ran.
        return max(lost, self.started)


class Calendar:
    """Maps times to shares of the width. Breaks, in which no attempt waited or ran, are cut."""

    def __init__(self, spans: Sequence[Span]) -> None:
        periods = _periods(spans)
        lengths = [(end - begin).total_seconds() for begin, end in periods]
        # At least a second, by which the places are divided.
        self.working_seconds = max(sum(lengths), 1.0)
        self.breaks: list[tuple[float, float]] = []
        """Place of each cut break in seconds of the chart, and its real length in seconds."""
        first, _ = periods[0]
        self._starts = [(first, 0.0)]
        """Start of each period, and its place in seconds of the chart."""
        end = lengths[0]
        for length, (before, after) in zip(lengths[1:], pairwise(periods), strict=True):
            idle = (after[0] - before[1]).total_seconds()
            if idle > LONG_BREAK * self.working_seconds:
                self.breaks.append((end, idle))
                idle = BREAK * self.working_seconds
            self._starts.append((after[0], end + idle))
            end += idle + length
        self.length = max(1.0, end)

    def share(self, time: datetime) -> float:
        """Return the place of a time within an attempt."""
        start, place = self._starts[0]
        for later_start, later_place in self._starts:
            if later_start <= time:
                start = later_start
                place = later_place
        since = (time - start).total_seconds()
        share = (place + since) / self.length
        return min(1.0, max(0.0, share))


def timeline_section(record: RunRecord) -> Markup:
    """Return the section; empty before the first attempt."""
    spans = spans_of(record)
    if not spans:
        return Markup()
    calendar = Calendar(spans)
    names = list(dict.fromkeys(span.stage for span in spans))
    # The baseline of a name is near the lower edge of its bar.
    places = [(LANE * row + BAR + 1, name) for row, name in enumerate(names)]
    text = _description(spans, calendar)
    height = LANE * len(names) + BOTTOM
    lanes = _lanes(spans, names, calendar)
    drawn = chart("timeline", "Timeline", text, height, lanes)
    return section(
        "time",
        "Time",
        element("p", text),
        figure(height, places, drawn, _legend(spans)),
        _attempts(spans),
        element("p", _left_out(record), class_="remark"),
    )


def spans_of(record: RunRecord) -> list[Span]:
    """Return the attempts of the current results whose times are known, in the order of the stages."""
    spans = []
    for kind in STAGES:
        stage = record.stage(kind.name)
        for attempt in current_attempts(stage):
            created = attempt.created_at or attempt.started_at
            end = attempt.finished_at or record.at or attempt.started_at or created
            if created is None or end is None:
                continue
            started = attempt.started_at
            # The clocks of an operator and of a node may differ.
            end = max(end, started or created)
            span = Span(
                stage=kind.name,
                attempt=attempt,
                created=created,
                started=started,
                end=end,
            )
            spans.append(span)
    return spans


def _periods(spans: Sequence[Span]) -> list[tuple[datetime, datetime]]:
    """Return the periods in which any attempt waited or ran, without overlaps, by ascending time."""
    periods: list[tuple[datetime, datetime]] = []
    for span in sorted(spans, key=lambda span: span.created):
        begin = min(span.created, span.started or span.created)
        if periods and begin <= periods[-1][1]:
            first, last = periods.pop()
            periods.append((first, max(last, span.end)))
        else:
            periods.append((begin, span.end))
    return periods


def _description(spans: Sequence[Span], calendar: Calendar) -> str:
    ran = sum(_running_seconds(span) for span in spans)
    waited = sum(span.waited for span in spans)
    lost = sum(span.attempt.lost_seconds or 0 for span in spans)
    attempts = counted(len(spans), "attempt")
    text = f"{attempts} ran for {format_duration(ran)}"
    text += f" and waited for {format_duration(waited)}"
    text += f"; interruptions lost {format_duration(lost)} of work."
    if calendar.breaks:
        lengths = [format_duration(idle) for _, idle in calendar.breaks]
        breaks = ", ".join(lengths)
        text += f" Breaks of {breaks}, in which nothing waited or ran, are cut."
    return text


def _running_seconds(span: Span) -> float:
    if span.attempt.seconds is not None:
        return span.attempt.seconds
    if span.started is None:
        return 0.0
    return (span.end - span.started).total_seconds()


def _lanes(spans: Sequence[Span], names: Sequence[str], calendar: Calendar) -> Markup:
    bottom = LANE * len(names)
    shapes = [line(0, bottom, 1, bottom, "grid")]
    for at, _ in calendar.breaks:
        middle = at + BREAK * calendar.working_seconds / 2
        x = middle / calendar.length
        shapes.append(line(x, 0, x, bottom, "break"))
    for span in spans:
        lane = LANE * names.index(span.stage)
        shapes += _bars(span, lane + 4, calendar)
    shapes += _scale(calendar, bottom + 18)
    return join(shapes)


def _bars(span: Span, top: float, calendar: Calendar) -> list[Markup]:
    start = calendar.share(span.created)
    end = calendar.share(span.end)
    if span.started is None:
        return [bar(start, end, top, BAR, "waiting")]
    begin = calendar.share(span.started)
    bars = []
    if begin > start:
        bars.append(bar(start, begin, top, BAR, "waiting"))
    outcome = OUTCOMES[span.attempt.outcome]
    bars.append(bar(begin, end, top, BAR, f"bar {outcome}"))
    if span.lost_from:
        # Last, so that it covers the end of the attempt's bar.
        lost = calendar.share(span.lost_from)
        bars.append(bar(lost, end, top, BAR, "lost"))
    return bars


def _scale(calendar: Calendar, y: float) -> list[Markup]:
    """Return the time since the start; with cut breaks only the working time, as places mean no time then."""
    if calendar.breaks:
        text = f"{format_duration(calendar.working_seconds)} with attempts"
        return [label(0, y, "start"), label(1, y, text)]
    step = MARKS[-1]
    for mark in reversed(MARKS):
        if calendar.length / mark <= LABELS:
            step = mark
    labels = []
    for number in range(int(calendar.length // step) + 1):
        seconds = number * step
        text = format_duration(seconds)
        place = seconds / calendar.length
        labels.append(label(place, y, text))
    return labels


def _legend(spans: Sequence[Span]) -> Markup:
    kinds = {}
    if any(span.waited > 0 for span in spans):
        kinds["waiting"] = "waiting"
    for span in spans:
        kind = OUTCOMES[span.attempt.outcome]
        if span.started:
            kinds[f"bar {kind}"] = kind
    if any(span.lost_from for span in spans):
        kinds["lost"] = "lost work"
    return legend(kinds)


def _attempts(spans: Sequence[Span]) -> Markup:
    rows = []
    for span in spans:
        attempt = span.attempt
        begin = span.started or span.created
        row = {
            "Attempt": f"{span.stage} {attempt.number}",
            "Began (UTC)": f"{begin:%Y-%m-%d %H:%M:%S}",
            "Waited": format_duration(span.waited),
            "Ran": format_duration(_running_seconds(span)),
            "Outcome": _outcome(attempt),
            "Steps": _steps(attempt),
            "Lost": _lost(attempt),
            "Where": shortened(_place(attempt), 100),
        }
        rows.append(row)
    cells = [list(row.values()) for row in rows]
    return table("Attempts", list(rows[0]), cells, "wide")


def _outcome(attempt: AttemptStatus) -> str:
    text = attempt.outcome.lower()
    # A success has a message only if there is something to add, which its stage has, too.
    if attempt.message and attempt.outcome is not Outcome.SUCCEEDED:
        text += f": {shortened(attempt.message, 160)}"
    return text


def _steps(attempt: AttemptStatus) -> str:
    if attempt.last_step is None:
        return ""
    return f"{attempt.start_step or 0:,} to {attempt.last_step:,}"


def _lost(attempt: AttemptStatus) -> str:
    if attempt.lost_steps is None:
        return ""
    time = format_duration(attempt.lost_seconds or 0)
    return f"{attempt.lost_steps:,} steps ({time})"


def _place(attempt: AttemptStatus) -> str:
    place = attempt_place(attempt).removeprefix(" on ")
    parts = [place or attempt.capacity, attempt.node]
    known = [part for part in parts if part]
    # Only a run without a cluster has neither nodes nor a capacity.
    return ", ".join(known) or "this machine"


def _left_out(record: RunRecord) -> str:
    """Return which stages have no attempt here, and how many attempts are of earlier edits; empty if all are here."""
    earlier = 0
    reused = []
    for name, stage in record.status.stages.items():
        attempts = current_attempts(stage)
        earlier += len(stage.attempts) - len(attempts)
        if stage.state is StageState.SUCCEEDED and not attempts:
            reused.append(name)
    parts = []
    if reused:
        parts.append(f"Reused from earlier work: {', '.join(reused)}.")
    if earlier:
        parts.append(f"Attempts of earlier edits, not shown: {earlier}.")
    return " ".join(parts)
