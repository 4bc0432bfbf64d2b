"""The section about money: from the price of on-demand nodes to the money spent."""

from decimal import Decimal

from finetune_cli.card.chart import Axis, bar, chart, label
from finetune_cli.card.markup import (
    Markup,
    element,
    join,
    section,
    shortened,
    table,
)
from finetune_cli.card.record import RunRecord
from finetune_operator.api.costs import Costs, PipelineCosts
from finetune_operator.api.spec import STAGES
from finetune_operator.core.attempts.costs import amount_text
from finetune_operator.core.durations import format_duration

LANE = 46
"""Pixels of a step of the waterfall: a text above its bar."""
BAR = 16
"""Height of a bar in pixels."""
# The platform team writes the currency as any text; a code such as EUR has three characters.
LONGEST_CURRENCY = 16
NO_PRICE = "The prices of the nodes are not known, so there are times and no amounts."


def costs_section(record: RunRecord) -> Markup:
    """Return the section; empty before an attempt has ended."""
    costs = record.status.costs
    if costs:
        currency = shortened(costs.currency, LONGEST_CURRENCY)
        costs = costs.model_copy(update={"currency": currency})
    rows = _rows(record, costs)
    if not rows:
        return Markup()
    head = ["Stage", "Attempts", "Running time", "Lost time"]
    caption = "Running time of all attempts, also of earlier edits"
    drawn = element("p", NO_PRICE)
    if costs:
        head += ["Spent", "Lost", "On demand"]
        caption += f", and costs in {costs.currency}"
        drawn = _waterfall(costs)
    return section("cost", "Cost", drawn, table(caption, head, rows, "numbers"))


def _waterfall(costs: PipelineCosts) -> Markup:
    """Return the steps from the on-demand price to the money spent, in words and as a chart."""
    # The money that was spent on work that counts.
    useful = costs.spent - costs.lost
    highest = max(costs.on_demand, costs.spent, useful)
    steps = (
        ("on-demand nodes, no interruption", Decimal(), costs.on_demand, "on-demand"),
        ("cheaper nodes", costs.on_demand, useful, "saved"),
        ("lost to interruptions", useful, costs.spent, "lost"),
        ("spent", Decimal(), costs.spent, "spent"),
    )
    # Free work has no scale.
    axis = Axis(0.0, float(highest) or 1.0)
    shapes = []
    for number, (text, begin, end, kind) in enumerate(steps):
        top = LANE * number
        amount = amount_text(end - begin, costs.currency)
        title = f"{text}: {amount}"
        shapes.append(label(0, top + 15, title, anchor="start"))
        # A step down, as cheaper nodes mostly are, ends below its beginning.
        low, high = sorted((float(begin), float(end)))
        left = axis.share(low)
        right = axis.share(high)
        shapes.append(bar(left, right, top + 21, BAR, f"bar {kind}"))
    words = _words(costs)
    height = LANE * len(steps)
    drawn = chart("waterfall", "Cost", words, height, *shapes)
    return join((element("p", words), element("figure", drawn)))


def _words(costs: PipelineCosts) -> str:
    spent = amount_text(costs.spent, costs.currency)
    lost = amount_text(costs.lost, costs.currency)
    demanded = amount_text(costs.on_demand, costs.currency)
    difference = amount_text(abs(costs.saved), costs.currency)
    # Spot nodes whose interruptions lose much work may cost more than on-demand nodes.
    verb = "saved" if costs.saved >= 0 else "paid more"
    text = f"The run has cost {spent}, of which {lost} were lost to interruptions. "
    text += f"The same work costs {demanded} on on-demand nodes: {difference} {verb}."
    if costs.unpriced:
        text += f" The price of {costs.unpriced} attempts is not known; they are in no amount."
    return text


def _rows(record: RunRecord, money: PipelineCosts | None) -> list[list[str]]:
    rows = []
    for kind in STAGES:
        stage = record.stage(kind.name)
        if stage.costs:
            lost = format_duration(stage.lost_seconds)
            rows.append(_row(kind.name, stage.costs, lost, money))
    # Without prices there is nothing to add up but times, which the section about time has.
    if rows and money:
        lost = format_duration(record.status.lost_seconds)
        rows.append(_row("all", money, lost, money))
    return rows


def _row(name: str, costs: Costs, lost: str, money: PipelineCosts | None) -> list[str]:
    cells = [
        name,
        f"{costs.attempts:,}",
        format_duration(costs.seconds),
        lost,
    ]
    # Zero would be wrong: attempts without a price have a cost, too.
    if money and costs.unpriced == costs.attempts:
        cells += ["not known"] * 3
    elif money:
        # Without the currency, which is in the caption.
        for amount in (costs.spent, costs.lost, costs.on_demand):
            cells.append(amount_text(amount, "").strip())
    return cells
