"""The loss curve of a stage, drawn in one line that fits the terminal."""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from finetune_cli.encoding import can_encode
from finetune_operator.api.status import Outcome, StageStatus
from finetune_trainer.contract import LossCurve

BLOCKS, ASCII_BLOCKS = "▁▂▃▄▅▆▇█", ".:-=+*#@"
"""Signs of a loss from the lowest to the highest, and those for an encoding without the former."""
MARK, ASCII_MARK = "╎", "|"
"""Sign of an interruption."""
INDENT = " " * 6
LEAST_CELLS = 8
"""A narrower curve shows nothing: the line then exceeds the width."""


class LossLines:
    """A renderable: the curve between its first and its newest loss, then the validation loss and the interruptions."""

    def __init__(self, stage: StageStatus, curve: LossCurve) -> None:
        self.curve = curve
        own = [one for one in stage.attempts if one.identity == stage.identity]
        ends = (one.last_step for one in own if one.outcome is Outcome.INTERRUPTED)
        self.interrupted = [step for step in ends if step is not None]
        self.more_interruptions = max(0, stage.interruptions - len(self.interrupted))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield one or two lines."""
        plain = not can_encode(BLOCKS + MARK, options.encoding)
        first, last = (
            f"{INDENT}loss {_number(self.curve.losses[0])} ",
            f" {_number(self.curve.losses[-1])}",
        )
        width = max(LEAST_CELLS, options.max_width - len(first) - len(last))
        line = sparkline(self.curve, self.interrupted, width, plain=plain)
        yield Text(f"{first}{line}{last}", style="cyan")
        notes = "; ".join(self._notes(ASCII_MARK if plain else MARK))
        if notes:
            yield Text(f"{INDENT}{notes}", style="dim")

    def _notes(self, mark: str) -> Iterable[str]:
        if self.curve.best:
            newest, best = self.curve.validations[-1], self.curve.best
            text = f"validation loss {_number(newest.loss)} at step {newest.step}"
            yield (
                f"{text}, the best"
                if newest is best
                else f"{text}, best {_number(best.loss)} at step {best.step}"
            )
        if self.interrupted:
            steps = ", ".join(str(step) for step in self.interrupted)
            more = f", and {self.more_interruptions} more" if self.more_interruptions else ""
            yield f"{mark} interrupted at step {steps}{more}"


def loss_lines(stage: StageStatus) -> Iterable[LossLines]:
    """Yield what draws the stage's curve, if it has one."""
    if stage.loss_curve:
        yield LossLines(stage, stage.loss_curve)


def sparkline(
    curve: LossCurve, interrupted: Sequence[int], width: int, *, plain: bool = False
) -> str:
    """Return the curve in at most `width` characters, with a mark after the cell of each step in `interrupted`.

    A cell is one point, or the mean of several. The scale is logarithmic where all losses are positive: linearly, the
    first steps would leave one block for all others. With `plain`, all characters are ASCII.
    """
    blocks, mark = (ASCII_BLOCKS, ASCII_MARK) if plain else (BLOCKS, MARK)
    points = len(curve.losses)
    ends = {min(points, -(-step // curve.every_steps)) for step in interrupted}
    """Number of points up to each interruption."""
    cells = max(1, min(points, width - len(ends)))
    edges = [cell * points // cells for cell in range(cells + 1)]
    means = [_mean(curve.losses[start:end]) for start, end in pairwise(edges)]
    heights = [math.log(mean) for mean in means] if min(means) > 0 else means
    low, high = min(heights), max(heights)
    scale = (len(blocks) - 1) / (high - low) if high > low else 0.0
    line = mark if 0 in ends else ""
    for (start, end), height in zip(pairwise(edges), heights, strict=True):
        line += blocks[round((height - low) * scale)]
        line += mark if any(start < one <= end for one in ends) else ""
    return line


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _number(loss: float) -> str:
    return f"{loss:.4g}"
