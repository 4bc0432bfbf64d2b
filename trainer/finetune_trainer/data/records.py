"""From a data set's file to numbered records, one at a time.

JSON, JSON Lines and CSV are read here and not by a library, because a bad record must be named by its
line while the good ones around it go on; Parquet is read by pyarrow, batch by batch.
"""

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TextIO

from pyarrow import ArrowInvalid
from pyarrow.parquet import ParquetFile

from finetune_trainer.runtime.errors import ConfigInvalid, DataInvalid

Format = Literal["auto", "jsonl", "json", "csv", "parquet"]
Shape = Literal["messages", "prompt and completion", "text"]
Fields = dict[str, Any]

SHAPES: dict[Shape, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt and completion": ("prompt", "completion"),
    "text": ("text",),
}
WANTED = "messages, prompt and completion, or text"

ENDINGS: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".parquet": "parquet",
}
LONGEST_RECORD = 64 * 1024 * 1024
"""Characters; keeps an unclosed quote from pulling the whole file into memory."""
PARQUET_BATCH = 256
"""Rows held at a time."""
JSON_CHUNK = 64 * 1024
"""Characters read at a time."""


KINDS: dict[type, str] = {
    type(None): "null",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}


class InvalidRecord(Exception):
    """A record that cannot be used; says why, and leaves it to the caller to say where."""


ReadRecord = tuple[int, Fields | InvalidRecord]
"""The line that a record begins at (in Parquet: its row), counted from 1, and what was found there."""


def format_of(path: Path, wanted: Format) -> Format:
    """Settle what `auto` means for a file, by its ending; raise ConfigInvalid where that says nothing."""
    if path.is_dir():
        raise ConfigInvalid(f"{path} is a folder: let dataset.uri name one file in it")
    if wanted != "auto":
        return wanted
    try:
        return ENDINGS[path.suffix.lower()]
    except KeyError:
        raise ConfigInvalid(
            f"{path.name}: the ending {path.suffix or '(none)'} says nothing about its format: "
            "set dataset.format to jsonl, json, csv or parquet (compressed files must be unpacked)"
        ) from None


def read_records(path: Path, form: Format) -> Iterator[ReadRecord]:
    """Give what the file holds, record by record, in order.

    Raises DataInvalid where the file as a whole cannot be read, or where nothing behind a fault can.
    """
    match form:
        case "jsonl":
            return _jsonl(path)
        case "json":
            return _json(path)
        case "csv":
            return _csv(path)
        case "parquet":
            return _parquet(path)
        case "auto":
            return read_records(path, format_of(path, form))


def count_records(path: Path, form: Format) -> int | None:
    """Give the number of records where it is to be had without reading them, for the progress bar."""
    if form == "parquet":
        with _opened(path) as file:
            return int(file.metadata.num_rows)
    if form != "jsonl":
        return None
    with path.open("rb") as lines:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: lines.read(1 << 20), b""))


def complete_shapes(names: set[str]) -> list[Shape]:
    """Give the shapes of which all fields are there."""
    return [shape for shape, fields in SHAPES.items() if names.issuperset(fields)]


def _jsonl(path: Path) -> Iterator[ReadRecord]:
    with path.open("rb") as lines:
        for number, line in enumerate(iter(lambda: lines.readline(LONGEST_RECORD), b""), start=1):
            if len(line) == LONGEST_RECORD:
                raise DataInvalid(
                    f"{path.name}:{number}: the line is longer than {LONGEST_RECORD >> 20} MiB: "
                    "JSON Lines has one record a line; if the file is one array, set dataset.format to json"
                )
            if line.strip(b"\xef\xbb\xbf\r\n\t " if number == 1 else None):
                yield number, _parsed(line)


def _parsed(line: bytes) -> Fields | InvalidRecord:
    try:
        return _fields(json.loads(line.rstrip().decode("utf-8-sig")))
    except UnicodeDecodeError as error:
        return InvalidRecord(f"byte 0x{line[error.start]:02x} at position {error.start + 1} is not UTF-8")
    except json.JSONDecodeError as error:
        return InvalidRecord(f"not JSON: {error.msg} at column {error.colno}")
    except RecursionError:
        return InvalidRecord("nested too deeply")
    except InvalidRecord as unusable:
        return unusable


def _fields(value: object) -> Fields:
    if not isinstance(value, dict):
        raise InvalidRecord(f"a record is a JSON object {{…}}, this is {kind_of(value)}")
    return value


def kind_of(value: object) -> str:
    """Name a value's type in JSON's words."""
    return KINDS.get(type(value), f"a {type(value).__name__}")


def _json(path: Path) -> Iterator[ReadRecord]:
    # A byte that is not UTF-8 becomes a lone surrogate; the record that holds it is refused later, and only that one.
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        window = _JsonWindow(path.name, file)
        if not window.peek():
            return
        if window.peek() == "{":
            raise window.fault(
                "the file begins with {, not with [: put the records into one array, "
                "or set dataset.format to jsonl if there is one record a line"
            )
        window.take("[")
        while window.peek() != "]":
            line = window.line
            value = window.value()
            try:
                yield line, _fields(value)
            except InvalidRecord as unusable:
                yield line, unusable
            if window.peek() != "]":
                window.take(",")


class _JsonWindow:
    """The part of a JSON text that is in memory: from the next unread character on."""

    _space = re.compile(r"[ \t\r\n]*")
    _decoder = json.JSONDecoder()

    def __init__(self, name: str, file: TextIO) -> None:
        self.line = 1
        self._name, self._file = name, file
        self._text, self._at, self._ended = "", 0, False

    def fault(self, words: str, at: int | None = None) -> DataInvalid:
        line = self.line + self._text.count("\n", self._at, at) if at else self.line
        return DataInvalid(f"{self._name}:{line}: {words}")

    def peek(self) -> str:
        """Give the next character that is no space, or nothing at the end."""
        while True:
            space = self._space.match(self._text, self._at)
            self._move(space.end() if space else self._at)
            if self._at < len(self._text) or self._ended:
                return self._text[self._at : self._at + 1]
            self._read_on()

    def take(self, wanted: str) -> None:
        found = self.peek()
        if found != wanted:
            raise self.fault(f"not JSON: expected {wanted} and found {found or 'the end of the file'}")
        self._move(self._at + 1)

    def value(self) -> object:
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if self._ended:
                    raise self.fault(f"not JSON: {error.msg}; nothing behind it can be read", error.pos) from None
            except RecursionError:
                raise self.fault("nested too deeply") from None
            else:
                # What ends where the window ends may go on behind it.
                if end < len(self._text) or self._ended:
                    self._move(end)
                    return value
            if len(self._text) - self._at > LONGEST_RECORD:
                raise self.fault(f"not JSON, or a record longer than {LONGEST_RECORD >> 20} MiB")
            self._read_on()

    def _move(self, at: int) -> None:
        self.line += self._text.count("\n", self._at, at)
        self._at = at

    def _read_on(self) -> None:
        # Twice as much each time, so that a long record is not parsed a thousand times over.
        unread = self._text[self._at :]
        chunk = self._file.read(max(JSON_CHUNK, len(unread)))
        self._text, self._at, self._ended = unread + chunk, 0, not chunk


def _csv(path: Path) -> Iterator[ReadRecord]:
    csv.field_size_limit(LONGEST_RECORD)
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        rows = csv.reader(file, strict=True)
        header = next(rows, None)
        if header is None:
            return
        if not complete_shapes(set(header)):
            raise DataInvalid(
                f"{path.name}:1: the first line must name the columns ({WANTED}, separated by commas); "
                f"it says {_shortened(','.join(header))}"
            )
        yield from _csv_rows(rows, header)


def _csv_rows(rows: Any, header: list[str]) -> Iterator[ReadRecord]:
    while True:
        line = rows.line_num + 1
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            yield line, InvalidRecord(f"not CSV: {error}")
            continue
        if len(row) == len(header):
            yield line, _cells(dict(zip(header, row, strict=True)))
        elif row:
            yield line, InvalidRecord(f"{len(row)} cells where the header names {len(header)}")


def _cells(fields: Fields) -> Fields | InvalidRecord:
    if "messages" not in fields:
        return fields
    try:
        return fields | {"messages": json.loads(fields["messages"])}
    except ValueError as error:
        return InvalidRecord(f"messages is not JSON: {error}")


def _opened(path: Path) -> ParquetFile:
    try:
        return ParquetFile(path, buffer_size=1 << 20, pre_buffer=False)
    except ArrowInvalid as error:
        raise DataInvalid(f"{path.name}: not Parquet: {error}") from None


def _parquet(path: Path) -> Iterator[ReadRecord]:
    with _opened(path) as file:
        names = file.schema_arrow.names
        if not complete_shapes(set(names)):
            raise DataInvalid(f"{path.name}: needs the columns {WANTED}; it has {_shortened(', '.join(names))}")
        wanted = [name for name in names if any(name in fields for fields in SHAPES.values())]
        number = 1
        for batch in file.iter_batches(PARQUET_BATCH, columns=wanted):
            for found in _rows(batch):
                yield number, found
                number += 1


def _rows(batch: Any) -> list[Fields | InvalidRecord]:
    try:
        rows: list[Fields | InvalidRecord] = batch.to_pylist()
    except UnicodeDecodeError:
        # Parquet does not check its strings; look for the bad one.
        return [_rows(batch.slice(at, 1))[0] for at in range(len(batch))] if len(batch) > 1 else [_not_utf8()]
    return rows


def _not_utf8() -> InvalidRecord:
    return InvalidRecord("holds bytes that are not UTF-8")


def _shortened(text: str, limit: int = 80) -> str:
    return ascii(text if len(text) <= limit else text[: limit - 1] + "…")[1:-1]
