"""Results of stages in words: records and rows, scores beside the base model's scores."""

import math
from collections.abc import Iterator

from finetune_cli.forecast.counts import unknown_text
from finetune_trainer.contract import EvaluateResult, PrepareResult, Score

COMMON_SHARE = 0.01
"""Share of records from which on a loss is no exception any more."""
CHANGED = {
    "truncated": "truncated",
    "dropped": "dropped",
    "invalid": "invalid",
    "unrendered": "not rendered in full",
}
"""Counts of records of which training does not see all, and their words."""


def changed_records(result: PrepareResult) -> dict[str, int]:
    """Return the numbers of records of which training does not see all, by the names of the counts; without zeros."""
    counts = {name: getattr(result, name) for name in CHANGED}
    return {name: count for name, count in counts.items() if count}


def share_text(count: int, total: int) -> str:
    """Return a share in percent with three digits, such as 100 % or 0.25 %."""
    return f"{100 * count / max(1, total):.3g} %"


def records_text(result: PrepareResult) -> str:
    """Return records and rows, such as 200 records → 193 rows, 200 truncated (100 %)."""
    rows = result.train_rows + result.validation_rows
    records = counted(result.records, "record")
    parts = [f"{records} → {counted(rows, 'row')}"]
    counts = {}
    for name, count in changed_records(result).items():
        counts[CHANGED[name]] = count
    # What the manifest asks for, and what loses nothing.
    counts["split"] = result.split
    counts["with a word in a column that is not read"] = result.unread_words
    counts["left out by weights"] = result.unused
    for words, count in counts.items():
        if count:
            share = share_text(count, result.records)
            parts.append(f"{count:,} {words} ({share})")
    # Absent in the results of earlier versions.
    if result.train_targets is not None:
        learned = f"{result.train_targets:,} of {result.train_tokens:,} tokens learned"
        parts.append(learned)
    if result.unknown_fraction:
        parts.append(unknown_text(result.unknown_fraction))
    return ", ".join(parts)


def score_texts(result: EvaluateResult) -> Iterator[str]:
    """Yield the scores; with several tasks, each begins with its task."""
    for task, metrics in result.scores.items():
        for metric, score in metrics.items():
            text = f"{metric} {score_text(score)}"
            # Of a single task, the name would only make the line longer.
            if len(result.scores) > 1:
                text = f"{task} {text}"
            yield text


def score_text(score: Score) -> str:
    """Return a score, as in 0.172 → 0.477 (+0.305 ± 0.034) if the base model's score is known."""
    value = number_text(score.value)
    if score.base is None:
        return f"{value}{margin_text(score.stderr)}"
    difference = score.value - score.base
    gain = difference_text(difference, score.difference_stderr)
    return f"{number_text(score.base)} → {value} ({gain})"


def difference_text(difference: float, stderr: float | None) -> str:
    """Return a difference with its sign and its standard error, as in +0.305 ± 0.034."""
    return f"{difference:+.3g}{margin_text(stderr)}"


def margin_text(stderr: float | None) -> str:
    """Return a standard error behind its number, as in ± 0.034; empty if it is not known."""
    if stderr is None or not math.isfinite(stderr):
        return ""
    # An estimated error has no more than two digits that mean anything.
    return f" ± {stderr:.2g}"


def number_text(value: float) -> str:
    """Return a score as people compare it."""
    # Three digits behind the point, as scores between 0 and 1 are compared; larger numbers such as perplexities fewer.
    if abs(value) < 1:
        return f"{value:.3f}"
    return f"{value:.4g}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, as in 1 row or 2,000 rows."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}s"
