"""Find the columns of a record whose text nothing reads.

A text is not lost if a text that is read contains it, such as the column `prompt` beside the same conversation. Labels,
such as an id, a date or a URL, hold nothing to learn.
"""

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from finetune_trainer.data.records.records import Fields, shortened
from finetune_trainer.data.records.unrendered import LABEL, RenderedText, is_label

_as_label = LABEL.fullmatch
SYSTEM_COLUMNS = frozenset(
    {"system_content", "system_instruction", "system_message", "system_prompt"}
)
"""Other names of the column `system`."""
TEXT_COLUMNS = SYSTEM_COLUMNS | frozenset(
    {
        "candidates",
        "choices",
        "context",
        "contexts",
        "document",
        "documents",
        "history",
        "input",
        "inputs",
        "options",
        "passage",
        "passages",
        "query",
        "question",
        "system",
    }
)
"""Columns that hold texts, however short. In any other column, a single word is a label."""


_NESTED = frozenset({dict, list})


class PartlyRead(dict[str, Any]):
    """The fields of a record with a text that nothing reads, which the manifest allows."""


def texts_in(value: object) -> Iterator[str]:
    """Yield every text in a value, also in lists and objects."""
    # A list in place of recursion: a record may be nested as deeply as its parser allows.
    values = [value]
    while values:
        inner = values.pop()
        if isinstance(inner, str):
            yield inner
        elif isinstance(inner, dict):
            values.extend(inner.values())
        elif isinstance(inner, list):
            values.extend(inner)


def has_text(value: object) -> bool:
    """Return whether a value holds a text that is no label."""
    return any(not is_label(text) for text in texts_in(value))


def unread_columns(
    record: Fields,
    columns: Iterable[str],
    fields: Fields,
    text_columns: Collection[str] = TEXT_COLUMNS,
    search: type[RenderedText] = RenderedText,
) -> list[str]:
    """Return the columns, among these, with a text that is no label and in no text of the fields.

    In `text_columns` a label is a text, too. `search` finds a text in the text of all fields.
    """
    suspects = []
    # Without a call of Python for each value: this runs for every record.
    for column in columns:
        value: Any = record.get(column)
        kind = type(value)
        if kind is str:
            if _as_label(value) is None or (value and column in text_columns):
                suspects.append(column)
        elif kind in _NESTED and (column in text_columns or has_text(value)):
            suspects.append(column)
    if not suspects:
        return suspects
    read = search("\n".join(texts_in(fields)))
    return [
        column
        for column in suspects
        if not _is_held(record[column], read, labels=column in text_columns)
    ]


def unread_words(record: Fields, columns: Iterable[str], fields: Fields) -> list[str]:
    """Return the columns, among these, that hold a single word which no text of the fields has."""
    words = [
        column
        for column in columns
        if type(record.get(column)) is str and record[column].isalpha()
    ]
    if not words:
        return words
    read = "\n".join(texts_in(fields))
    return [column for column in words if record[column] not in read]


def _is_held(value: object, read: RenderedText, *, labels: bool) -> bool:
    """Return whether every text of a value is in the texts that are read; labels only if they count."""
    texts = [text for text in texts_in(value) if labels or not is_label(text)]
    return all(map(read.holds, texts))


def cut_refusal(columns: list[str]) -> str:
    """Return the reason why a record is invalid of which a template writes a part of these columns only."""
    names = shortened(", ".join(columns))
    subject = f"column {names}: the template writes a part of its text only"
    if len(columns) > 1:
        subject = f"columns {names}: the template writes a part of their text only"
    return (
        f"{subject}: write all of it, or leave out the rest with columns: {{ignored: [{names}]}} "
        "or prepare.unrendered: Warn"
    )


def refusal(columns: list[str], template: str) -> str:
    """Return the reason why a record with such columns is invalid.

    `template` is the entry of `columns` that would read the first of them, or empty if no field can have a template.
    """
    names = shortened(", ".join(columns))
    subject = f"column {names}: its text is"
    if len(columns) > 1:
        subject = f"columns {names}: their text is"
    fixes = f"leave it out with columns: {{ignored: [{names}]}}"
    if template:
        fixes = f"write columns: {{{template}}}, or {fixes}"
    return f"{subject} not used: {fixes}"
