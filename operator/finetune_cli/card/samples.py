"""The section about samples: what the model wrote before training and after."""

from collections.abc import Sequence

from finetune_cli.card.markup import (
    Markup,
    code,
    details,
    element,
    section,
    table,
)
from finetune_cli.card.record import RunRecord
from finetune_cli.output.metrics import TRAIN
from finetune_trainer.contract import TrainResult
from finetune_trainer.contract.sample_rows import SampleRow

PROMPTS = 8
"""Prompts of a card; the API allows no more."""
# Enough to see how the text changed: a training may write many.
BETWEEN = 4
"""Samples of a prompt between the first and the last, evenly chosen."""
LONG_TEXT = 1000
"""Characters of a prompt, and of a text before and after."""
SHORT_TEXT = 200
"""Characters of a text in between."""


def samples_section(record: RunRecord) -> Markup:
    """Return the section; empty without samples."""
    by_prompt: dict[str, list[SampleRow]] = {}
    for row in record.samples:
        by_prompt.setdefault(row.prompt, []).append(row)
    prompts = list(by_prompt)[:PROMPTS]
    best = _best_step(record)
    articles = []
    for number, prompt in enumerate(prompts, 1):
        articles.append(_article(number, by_prompt[prompt], best))
    if not articles:
        return Markup()
    text = "Texts that the model wrote during training, always its most likely words."
    return section("samples", "Samples", element("p", text), *articles)


def _best_step(record: RunRecord) -> int | None:
    """Return the step of the resulting weights, or None before training is done."""
    result = record.stage(TRAIN).result
    if not isinstance(result, TrainResult):
        return None
    return result.best_step


def _article(number: int, rows: Sequence[SampleRow], best: int | None) -> Markup:
    before = rows[0]
    after = _resulting(rows, best)
    texts = [_text(before, best)]
    if after.step != before.step:
        texts.append(_text(after, best))
    shown = {before.step, after.step}
    others = [row for row in rows if row.step not in shown]
    return element(
        "article",
        element("h3", f"Prompt {number}"),
        element("pre", code(before.prompt, LONG_TEXT)),
        element("div", *texts, class_="sides"),
        details(f"{len(rows)} samples of this prompt", _between(number, others)),
    )


def _resulting(rows: Sequence[SampleRow], best: int | None) -> SampleRow:
    """Return the sample of the weights that are the result; the newest sample if there is none of them."""
    for row in rows:
        if row.step == best:
            return row
    return rows[-1]


def _title(row: SampleRow, best: int | None) -> str:
    if row.step == 0:
        return "Before training"
    if row.step == best:
        return f"After training (step {row.step:,}, the result)"
    return f"At step {row.step:,}"


def _text(row: SampleRow, best: int | None) -> Markup:
    title = element("h4", _title(row, best))
    content = code(row.text, LONG_TEXT)
    # A model may end its answer at once.
    if not row.text:
        content = element("em", "no text")
    return element("div", title, element("pre", content))


def _between(number: int, rows: Sequence[SampleRow]) -> Markup:
    count = min(BETWEEN, len(rows))
    lines = []
    for index in range(count):
        row = rows[index * len(rows) // count]
        text = code(row.text, SHORT_TEXT)
        lines.append((f"{row.step:,}", text))
    caption = f"Samples of prompt {number} in between"
    if len(rows) > count:
        caption += f", {count} of {len(rows)}"
    return table(caption, ("Step", "Text"), lines, "texts")
