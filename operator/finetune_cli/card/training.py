"""The section about training: the loss, its validations and the interruptions."""

from finetune_cli.card.chart import (
    area,
    chart,
    curve,
    dot,
    figure,
    label,
    legend,
    line,
)
from finetune_cli.card.loss_points import InterruptionMark, Losses, losses_of
from finetune_cli.card.markup import (
    Markup,
    details,
    element,
    join,
    section,
    shortened,
    table,
)
from finetune_cli.card.record import RunRecord
from finetune_cli.output.metrics import TRAIN

TOP = 18
"""Pixels above the plot, for the marks of interruptions."""
PLOT = 230
"""Height of the plot in pixels."""
BOTTOM = 26
"""Pixels below the plot, for the steps."""
HEIGHT = TOP + PLOT + BOTTOM
# More dots would hide the curve.
DOTS = 40
"""Validations with a dot of their own at most."""
# The newest: the table is read for how the training ended, and a card has to stay small.
LISTED = 60
"""Validations in the table at most."""


def training_section(record: RunRecord) -> Markup:
    """Return the section; empty before the first step."""
    stage = record.stage(TRAIN)
    losses = losses_of(stage, stage.loss_curve, record.rows)
    if losses is None:
        return Markup()
    text = _description(losses)
    # A text's baseline is below its middle.
    heights = [(_y(losses, tick) + 4, f"{tick:.4g}") for tick in losses.axis().ticks()]
    return section(
        "training",
        "Training",
        element("p", text),
        figure(HEIGHT, heights, _plot(losses, text), _legend(losses)),
        _interruptions(losses, stage.interruptions),
        details("Validations", _validations(losses)),
    )


def _description(losses: Losses) -> str:
    """Return the chart in words."""
    first = losses.points[0]
    last = losses.points[-1]
    text = (
        f"The training loss went from {first.mean:.4g} to {last.mean:.4g} "
        f"in {last.step:,.0f} steps."
    )
    if losses.best:
        step, loss = losses.best
        text += f" The lowest validation loss is {loss:.4g}, at step {step:,}."
    if losses.interruptions:
        marks = [f"{mark.step:,}" for mark in losses.interruptions]
        steps = ", ".join(marks)
        text += f" Training was interrupted at step {steps}, and resumed."
    return text


def _y(losses: Losses, loss: float) -> float:
    # SVG counts pixels from the top.
    height = 1 - losses.axis().share(loss)
    return TOP + PLOT * height


def _plot(losses: Losses, text: str) -> Markup:
    def place(step: float, loss: float) -> tuple[float, float]:
        return step / losses.steps, _y(losses, loss)

    means = [place(point.step, point.mean) for point in losses.points]
    upper = [place(point.step, point.highest) for point in losses.points]
    lower = [place(point.step, point.lowest) for point in losses.points]
    shapes = [_grid(losses)]
    shapes += [_mark(interrupted, losses.steps) for interrupted in losses.interruptions]
    # First what is large: later shapes are drawn above earlier ones.
    if losses.has_range:
        border = [*upper, *reversed(lower)]
        shapes.append(area(border, HEIGHT, "range"))
    shapes.append(curve(means, HEIGHT, "loss"))
    validations = [place(step, loss) for step, loss in losses.validations]
    if len(validations) > 1:
        shapes.append(curve(validations, HEIGHT, "validation"))
    if len(validations) <= DOTS:
        shapes += [dot(x, y, "validation-dot", 3.5) for x, y in validations]
    if losses.best:
        x, y = place(*losses.best)
        shapes.append(dot(x, y, "best", 7))
    return chart("loss", "Loss of the training", text, HEIGHT, *shapes)


def _grid(losses: Losses) -> Markup:
    shapes = []
    for tick in losses.axis().ticks():
        y = _y(losses, tick)
        shapes.append(line(0, y, 1, y, "grid"))
    # Quarters are few enough for the narrowest screen.
    for quarter in range(5):
        share = quarter / 4
        step = round(losses.steps * share)
        text = f"{step:,}"
        if quarter == 0:
            text = "step 0"
        shapes.append(label(share, TOP + PLOT + 18, text))
    return join(shapes)


def _mark(interrupted: InterruptionMark, steps: int) -> Markup:
    x = min(1.0, interrupted.step / steps)
    shapes = [
        line(x, TOP, x, TOP + PLOT, "interruption"),
        label(x, 13, "▼", "mark", "middle"),
    ]
    if interrupted.lost_steps:
        first = interrupted.step - interrupted.lost_steps
        begin = max(0, first) / steps
        corners = [
            (begin, TOP),
            (x, TOP),
            (x, TOP + PLOT),
            (begin, TOP + PLOT),
        ]
        shapes.insert(0, area(corners, HEIGHT, "lost-steps"))
    return join(shapes)


def _legend(losses: Losses) -> Markup:
    kinds = {"loss": "training loss"}
    if losses.has_range:
        # All points but the last have as many steps as the first.
        steps = losses.points[0].step
        kinds["range"] = f"lowest to highest of each {steps:,.0f} steps"
    if losses.validations:
        kinds["validation"] = "validation loss"
        kinds["best"] = "the best, whose weights are the result"
    if losses.interruptions:
        kinds["interruption"] = "▼ interrupted"
    if any(interrupted.lost_steps for interrupted in losses.interruptions):
        kinds["lost-steps"] = "steps that were repeated"
    if losses.axis().is_logarithmic:
        return legend(kinds, "logarithmic scale")
    return legend(kinds)


def _interruptions(losses: Losses, total: int) -> Markup:
    rows = [
        (
            f"attempt {interrupted.attempt}",
            f"{interrupted.step:,}",
            f"{interrupted.lost_steps:,}",
            shortened(interrupted.message),
        )
        for interrupted in losses.interruptions
    ]
    head = ("Interrupted", "At step", "Steps lost", "Reason")
    caption = "Interruptions of the training"
    # The status keeps the newest attempts only.
    if total > len(rows):
        caption += f": {total} in all, of which the status has {len(rows)}"
    return table(caption, head, rows)


def _validations(losses: Losses) -> Markup:
    best = losses.best
    rows = []
    for point in losses.validations[-LISTED:]:
        step, loss = point
        remark = ""
        if point == best:
            remark = "the best"
        rows.append((f"{step:,}", f"{loss:.5g}", remark))
    return table("Validations", ("Step", "Validation loss", "Remark"), rows)
