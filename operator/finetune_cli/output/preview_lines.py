"""Output of a preview: each example with its learned part marked, and lines with the counts."""

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from finetune_trainer.contract.preview import PreviewedExample, PreviewReport

MARKS = ("{+", "+}")
"""Begin and end of the learned part without a terminal, as in `git diff --word-diff`."""


def print_examples(report: PreviewReport, console: Console) -> None:
    """Print each example: where its record is, its tokens, and its text."""
    for example in report.examples:
        console.print(Text(_heading(example), style="bold cyan"))
        console.print(_text(example, marked=not console.is_terminal))
        console.print()


def _heading(example: PreviewedExample) -> str:
    share = example.learned_tokens / example.tokens
    heading = f"{example.file}:{example.line}"
    heading += f"  {example.tokens:,} tokens"
    heading += f", {example.learned_tokens:,} learned ({share:.0%})"
    if example.truncated:
        heading += ", truncated to prepare.contextLength"
    return heading


def _text(example: PreviewedExample, *, marked: bool) -> Text:
    """Return the text; the learned part is bold and green, and `marked` if there may be no colours."""
    text = Text()
    for segment in example.segments:
        if not segment.learned:
            text.append(segment.text, style="dim")
            continue
        shown = segment.text
        if marked:
            shown = shown.join(MARKS)
        text.append(shown, style="bold green")
    return text


def usable_records(report: PreviewReport) -> Iterator[str]:
    """Yield a line with the usable and the invalid records, and a line for each invalid record that is named."""
    counts = report.counts
    if counts is None:
        return
    used = counts.records - counts.unused
    usable = used - counts.invalid - counts.dropped
    first = "the first " if report.is_sample else ""
    line = f"{first}{used:,} records: {usable:,} usable"
    share = f"{counts.truncated / max(1, used):.0%}"
    others = {
        "invalid": counts.invalid,
        "dropped as too long": counts.dropped,
        f"truncated ({share})": counts.truncated,
        "split": counts.split,
        "not rendered in full": counts.unrendered,
        "with a word in a column that is not read": counts.unread_words,
    }
    for words, count in others.items():
        if count:
            line += f", {count:,} {words}"
    yield line
    # A problem of the data names the records that it is about.
    named = "\n".join(problem.message for problem in report.problems)
    yield from (text for text in report.invalid_records if text not in named)


def learned_tokens(report: PreviewReport) -> str:
    """Return how many tokens are learned; empty if it is unknown."""
    counts = report.counts
    if counts is None or not counts.train_tokens:
        return ""
    share = counts.train_targets / counts.train_tokens
    learned = f"{counts.train_targets:,} of them learned ({share:.0%})"
    return f"{counts.train_tokens:,} tokens, {learned}"
