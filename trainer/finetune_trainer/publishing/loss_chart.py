"""The loss of a training as lines of text, for the model card: every reader of Markdown shows it."""

import math
from collections.abc import Sequence

from finetune_trainer.contract import LossCurve
from finetune_trainer.contract.metric_rows import Row
from finetune_trainer.tracking.loss_curve import LossCurveBuilder

BLOCKS = " ▁▂▃▄▅▆▇█"
"""Eighths of a cell, from none to all of them."""
EIGHTHS = len(BLOCKS) - 1
LINES = 8
LABEL_WIDTH = 8


def loss_section(rows: Sequence[Row]) -> str:
    """Return the section of the card; empty if the metrics of the training are lost."""
    if not rows:
        return ""
    builder = LossCurveBuilder(rows[-1].step)
    builder.restart(rows)
    curve = builder.curve()
    if curve is None:
        return ""
    text = f"Mean training loss of each {curve.every_steps:,} steps"
    if curve.every_steps == 1:
        text = "Training loss of each step"
    if min(curve.losses) > 0:
        text += ", on a logarithmic scale"
    text += "."
    if curve.best:
        best = f"{curve.best.loss:.4g} at step {curve.best.step:,}"
        text += f" The lowest validation loss is {best}."
    return f"## Loss\n\n```text\n{loss_chart(curve)}\n```\n\n{text}"


def loss_chart(curve: LossCurve) -> str:
    """Return a column for each point of a curve, with the highest and the lowest loss and the last step beside them."""
    # The lowest column has one eighth, so that its step is seen.
    heights = [
        1 + round(share * (EIGHTHS * LINES - 1)) for share in _shares(curve.losses)
    ]
    labels = {LINES - 1: f"{max(curve.losses):.4g}", 0: f"{min(curve.losses):.4g}"}
    lines = []
    for row in reversed(range(LINES)):
        below = EIGHTHS * row
        cells = [BLOCKS[min(EIGHTHS, max(0, height - below))] for height in heights]
        line = f"{labels.get(row, ''):>{LABEL_WIDTH}} {''.join(cells)}"
        lines.append(line.rstrip())
    last = f"step {curve.step:,}"
    lines.append(f"{'':{LABEL_WIDTH}} {last:>{len(heights)}}")
    return "\n".join(lines)


def _shares(losses: Sequence[float]) -> list[float]:
    """Return the place of each loss from the lowest, 0, to the highest, 1; by the logarithm if all are positive."""
    values = list(losses)
    if min(values) > 0:
        values = [math.log(loss) for loss in losses]
    low = min(values)
    span = max(values) - low
    # A flat curve has no scale.
    if not span:
        return [0.0] * len(values)
    return [(value - low) / span for value in values]
