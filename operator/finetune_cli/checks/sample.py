"""Reads the first records of a file on this machine: their texts, their columns, and a prompt."""

import csv
import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

MAX_RECORDS = 2000
"""Number of records that are read: enough for a percentile, and fast."""
MAX_BYTES = 64 << 20
"""Largest file that is read."""
SAMPLED = (".jsonl", ".ndjson", ".json", ".csv")
"""Endings of files that are read, also with .gz behind them."""
UNREADABLE = (OSError, ValueError, EOFError, RecursionError, csv.Error)
COMPLETE = (
    {"messages"},
    {"prompt", "completion"},
    {"text"},
    {"chosen", "rejected"},
    {"preferred_output", "non_preferred_output"},
    {"conversations"},
    {"conversation"},
    {"instruction", "output"},
)
"""Columns of the forms that prepare reads as they are."""
OTHER_NAMES = {
    "prompt": ("question", "query", "input", "instruction", "problem", "source"),
    "completion": ("answer", "response", "output", "reply", "solution", "target"),
    "messages": ("chat", "dialog", "dialogue", "turns"),
    "text": ("content", "document", "body", "code"),
}
"""Field of a record -> names that its column often has instead, the likeliest first."""
QUESTIONS = ("question", "query", "instruction", "problem")
"""Names of columns whose text is a question to an assistant, and not the beginning of a text."""
PAIR = ("prompt", "completion")
PREFERENCES = ({"chosen", "rejected"}, {"preferred_output", "non_preferred_output"})
"""Columns of pairs of completions."""


@dataclass(frozen=True)
class Sample:
    """The first records of a data set."""

    records: list[dict[str, Any]]

    @property
    def columns(self) -> dict[str, str]:
        """The columns that the manifest must name, by the field that each holds; empty if it must name none."""
        names = set(self.records[0]) if self.records else set()
        if any(form <= names for form in COMPLETE):
            return {}
        columns: dict[str, str] = {}
        for field in PAIR:
            column = _column(field, names - set(columns.values()))
            if column:
                columns[field] = column
        if len(columns) == len(PAIR):
            if columns["prompt"] in QUESTIONS:
                # A conversation, which the chat template renders: as a server asks.
                named = (("instruction", "prompt"), ("output", "completion"))
                return {field: columns[part] for field, part in named}
            return {
                field: column for field, column in columns.items() if field != column
            }
        for field in ("messages", "text"):
            column = _column(field, names)
            if column:
                return {field: column}
        return {}

    @property
    def has_preferences(self) -> bool:
        """Whether the records are pairs of completions, from which only DPO learns."""
        names = set(self.records[0]) if self.records else set()
        return any(form <= names for form in PREFERENCES)

    @property
    def texts(self) -> list[str]:
        """All text of each record, without the names of its columns."""
        return ["\n".join(_texts(record)) for record in self.records]

    @property
    def prompt(self) -> str | None:
        """The prompt of the first record; None if it is not known."""
        if not self.records:
            return None
        record = self.records[0]
        messages = record.get("messages")
        if isinstance(messages, list):
            for message in messages:
                if isinstance(message, dict) and message.get("role") == "user":
                    return _text(message.get("content"))
            return None
        columns = self.columns
        column = columns.get("instruction") or columns.get("prompt", "prompt")
        return _text(record.get(column))

    @property
    def problem(self) -> str:
        """Why the manifest may not fit the records; empty if their form is known."""
        if not self.records:
            return "it has no records"
        names = set(self.records[0])
        if self.columns or any(form <= names for form in COMPLETE):
            return ""
        shown = ", ".join(sorted(map(str, names))[:8])
        return f"no form of records is known with the columns {shown}: write columns"


def read_sample(path: Path) -> Sample | None:
    """Return the first records of a JSON Lines, JSON or CSV file; None if it is none of them, or damaged."""
    try:
        # JSON is parsed as a whole; of the other formats only the first records are read.
        if path.stat().st_size > MAX_BYTES and path.suffix == ".json":
            return None
        records = list(islice(_records(path), MAX_RECORDS))
    except UNREADABLE:
        # The stage that reads the file reports what is wrong.
        return None
    return Sample([record for record in records if isinstance(record, dict)])


def _records(path: Path) -> Iterator[Any]:
    # A byte order mark, as Excel writes it, would become a part of the first column's name. The csv module needs
    # line ends as they are, because a quoted cell may have some.
    suffix = path.suffix
    if suffix == ".gz":
        suffix = path.with_suffix("").suffix
        with gzip.open(path, "rt", encoding="utf-8-sig", newline="") as text:
            yield from _parsed(text, suffix)
        return
    with path.open(encoding="utf-8-sig", newline="") as text:
        yield from _parsed(text, suffix)


def _parsed(text: TextIO, suffix: str) -> Iterator[Any]:
    match suffix:
        case ".jsonl" | ".ndjson":
            yield from (json.loads(line) for line in text if line.strip())
        case ".json":
            records = json.load(text)
            if isinstance(records, list):
                yield from records
        case ".csv":
            yield from csv.DictReader(text)
        case _:
            raise ValueError(suffix)


def _column(field: str, names: set[str]) -> str | None:
    """Return the name of the column that holds a field; None if no name is known."""
    for name in (field, *OTHER_NAMES[field]):
        if name in names:
            return name
    return None


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)


def _text(value: Any) -> str | None:
    if isinstance(value, str) and value.strip():
        return value
    return None
