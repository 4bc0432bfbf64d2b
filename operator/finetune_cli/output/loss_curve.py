"""The loss curve of a stage, drawn in one line that fits the terminal."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from finetune_cli.comparison.compare import TRAINING_LOSS
from finetune_cli.output.encoding import can_encode
from finetune_operator.api.status import Outcome, StageStatus
from finetune_trainer.contract import LossCurve, TrainResult
from finetune_trainer.contract.results import LAST_STEPS

BLOCKS = "▁▂▃▄▅▆▇█"
"""Signs of a loss from the lowest to the highest."""
MARK = "╎"
"""Sign of an interruption."""
# For an encoding without these signs, such as ASCII in a container without a locale.
ASCII_BLOCKS = ".:-=+*#@"
# No sign of ASCII_BLOCKS, so that a mark is no loss.
ASCII_MARK = "|"
# Deeper than the lines of attempts, which begin with an arrow.
INDENT = " " * 6
# Four digits and the point, with one to spare.
NUMBER_CELLS = 6
"""Characters of most losses."""
LEAST_CELLS = 8
"""A narrower curve shows nothing: the line then exceeds the width."""


class LossLines:
    """A renderable: the curve between its first and its newest loss, then the validation loss and the interruptions."""

    def __init__(self, stage: StageStatus, curve: LossCurve) -> None:
        self.curve = curve
        self.result = stage.result
        self.interrupted: list[int] = []
        for attempt in stage.attempts:
            # Attempts with another identity have trained another model: their steps are not in the curve.
            if attempt.identity != stage.identity:
                continue
            if attempt.outcome is not Outcome.INTERRUPTED:
                continue
            if attempt.last_step is not None:
                self.interrupted.append(attempt.last_step)
        # The status keeps only the newest attempts, so the count may be larger.
        missing = stage.interruptions - len(self.interrupted)
        self.more_interruptions = max(0, missing)

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> RenderResult:
        """Yield one or two lines."""
        plain = not can_encode(BLOCKS + MARK, options.encoding)
        losses = self.curve.losses
        first = f"{INDENT}loss {_number(losses[0])} "
        last = f" {_number(losses[-1])}"
        free = options.max_width - len(first) - len(last)
        width = max(LEAST_CELLS, free)
        line = sparkline(self.curve, self.interrupted, width, plain=plain)
        yield Text(f"{first}{line}{last}", style="cyan")
        mark = ASCII_MARK if plain else MARK
        notes = "; ".join(self._notes(mark))
        if notes:
            yield Text(f"{INDENT}{notes}", style="dim")

    def _notes(self, mark: str) -> Iterable[str]:
        if isinstance(self.result, TrainResult):
            steps = "each step"
            if self.curve.every_steps > 1:
                steps = f"{self.curve.every_steps} steps"
            # Not the curve's last number, so both say what they are.
            yield f"{TRAINING_LOSS} {_number(self.result.loss)}, {LAST_STEPS}; the curve has a point for {steps}"
        best = self.curve.best
        if best:
            newest = self.curve.validations[-1]
            loss = _number(newest.loss)
            text = f"validation loss {loss} at step {newest.step}"
            if newest is best:
                yield f"{text}, the best"
            else:
                lowest = _number(best.loss)
                yield f"{text}, best {lowest} at step {best.step}"
        if self.interrupted:
            text = ", ".join(str(step) for step in self.interrupted)
            if self.more_interruptions:
                text += f", and {self.more_interruptions} more"
            yield f"{mark} interrupted at step {text}"


def loss_lines(stage: StageStatus) -> Iterable[LossLines]:
    """Yield a renderable that draws the stage's curve, if the stage has one."""
    if stage.loss_curve:
        yield LossLines(stage, stage.loss_curve)


def sparkline(
    curve: LossCurve,
    interrupted: Sequence[int],
    width: int,
    *,
    plain: bool = False,
    bounds: Sequence[float] = (),
) -> str:
    """Return the curve in at most `width` characters, with a mark after the cell of each step in `interrupted`.

    A cell is one point, or the mean of several. The scale is logarithmic if all losses are positive: linearly, the
    first steps would leave one block for all others. It includes the losses in `bounds`, so that several curves may
    have one scale. With `plain`, all characters are ASCII.
    """
    blocks = ASCII_BLOCKS if plain else BLOCKS
    mark = ASCII_MARK if plain else MARK
    points = len(curve.losses)
    # Number of points up to each interruption: a step within a point counts as that point.
    ends = set()
    for step in interrupted:
        end = math.ceil(step / curve.every_steps)
        ends.add(min(points, end))
    # Every mark takes a cell of its own.
    free = width - len(ends)
    cells = max(1, min(points, free))
    # Whole points: cells differ by one point at most.
    numbers = range(cells + 1)
    edges = [number * points // cells for number in numbers]
    means = []
    for start, end in pairwise(edges):
        losses = curve.losses[start:end]
        means.append(sum(losses) / len(losses))
    levels = _levels(means, len(blocks), bounds)
    line = ""
    if 0 in ends:
        line = mark
    for level, (start, end) in zip(levels, pairwise(edges), strict=True):
        line += blocks[level]
        points_of_cell = range(start + 1, end + 1)
        if not ends.isdisjoint(points_of_cell):
            line += mark
    return line


def _levels(means: Sequence[float], blocks: int, bounds: Sequence[float]) -> list[int]:
    """Return for each mean the index of its block, 0 for the lowest; all 0 if the means are equal."""
    heights = [*means, *bounds]
    if min(heights) > 0:
        heights = [math.log(height) for height in heights]
    low = min(heights)
    high = max(heights)
    # A flat curve has no scale.
    if high == low:
        return [0] * len(means)
    scale = (blocks - 1) / (high - low)
    # Without the bounds, which only widen the scale.
    own = heights[: len(means)]
    return [round((height - low) * scale) for height in own]


def curves_above_each_other(
    curves: Mapping[str, LossCurve], width: int, *, plain: bool = False
) -> Iterator[str]:
    """Yield a line for each curve by its name, with its first and its last loss.

    All have one scale and one axis of steps, so that what is above each other is the same step.
    """
    bounds: list[float] = []
    steps = 1
    points = 1
    for curve in curves.values():
        bounds += [min(curve.losses), max(curve.losses)]
        steps = max(steps, curve.step)
        points = max(points, len(curve.losses))
    names = max(map(len, curves), default=0)
    numbers = 2 * (NUMBER_CELLS + 1)
    rest = width - names - 1 - numbers
    free = max(LEAST_CELLS, rest)
    # More cells than points would leave a part of the width empty.
    cells = min(free, points)
    for name, curve in curves.items():
        share = round(cells * curve.step / steps)
        line = sparkline(curve, [], max(1, share), plain=plain, bounds=bounds)
        columns = [
            name.ljust(names),
            _number(curve.losses[0]).rjust(NUMBER_CELLS),
            line.ljust(cells),
            _number(curve.losses[-1]),
        ]
        yield " ".join(columns)


def _number(loss: float) -> str:
    return f"{loss:.4g}"
