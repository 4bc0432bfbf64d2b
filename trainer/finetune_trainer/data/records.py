"""Read a data set's file as numbered records, one at a time.

JSON, JSON Lines and CSV have their own readers here instead of a library's. An invalid record must be named by its
line, and the valid records around it must still be used. Parquet is read by pyarrow, batch by batch.
"""

import csv
import json
import re
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Literal, TextIO

from pyarrow import ArrowInvalid
from pyarrow.parquet import ParquetFile

from finetune_trainer.data.source import Source
from finetune_trainer.runtime.errors import ConfigInvalid, DataInvalid

Format = Literal["auto", "jsonl", "json", "csv", "parquet"]
Shape = Literal["messages", "prompt and completion", "text"]
Fields = dict[str, Any]

SHAPES: dict[Shape, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt and completion": ("prompt", "completion"),
    "text": ("text",),
}
NESTED = ("messages", "tools")
"""Fields that hold lists of objects; `tools` belongs to `messages`."""
FIELDS = {name for names in SHAPES.values() for name in names} | set(NESTED)
SUPPORTED_SHAPES = "messages, prompt and completion, or text"

FORMAT_BY_EXTENSION: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".parquet": "parquet",
}
LONGEST_RECORD = 64 * 1024 * 1024
"""Maximum size in characters (bytes for JSON Lines). Without it an unclosed quote would load the whole file."""
PARQUET_BATCH = 256
"""Rows in memory at a time."""
DIGEST_CHUNK = 1024 * 1024
"""Bytes read at a time for the digest of a Parquet file."""
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
    """A record cannot be used. The message holds the reason; the caller adds the file and the line."""


ReadRecord = tuple[int, Fields | InvalidRecord]
"""The line at which a record begins (in Parquet: its row), counted from 1, and the record or its error."""


def format_of(path: Path, requested: Format) -> Format:
    """Return the requested format, or for `auto` the one of the file's extension.

    Raises ConfigInvalid for a folder and for an unknown extension.
    """
    if path.is_dir():
        raise ConfigInvalid(f"{path} is a folder: set dataset.uri to one file in it")
    if requested != "auto":
        return requested
    try:
        return FORMAT_BY_EXTENSION[path.suffix.lower()]
    except KeyError:
        raise ConfigInvalid(
            f"{path.name}: unknown file extension {path.suffix or '(none)'}: "
            "set dataset.format to jsonl, json, csv or parquet (compressed files must be unpacked)"
        ) from None


def read_records(source: Source, form: Format) -> Iterator[ReadRecord]:
    """Yield the file's records in order; at the end, the source has been read to its last byte.

    Raises DataInvalid if the file as a whole cannot be read, or if nothing after a syntax error can be read.
    """
    match form:
        case "jsonl":
            return _jsonl(source)
        case "json":
            return _json(source)
        case "csv":
            return _csv(source)
        case "parquet":
            return _parquet(source)
        case "auto":
            return read_records(source, format_of(source.path, form))


def known_count(source: Source, form: Format) -> int | None:
    """Return the number of records, or None if it takes reading the file to know."""
    if form != "parquet":
        return None
    with _opened(source.path) as file:
        return int(file.metadata.num_rows)


def complete_shapes(names: set[str]) -> list[Shape]:
    """Return the shapes whose fields are all present."""
    return [shape for shape, fields in SHAPES.items() if names.issuperset(fields)]


def _jsonl(source: Source) -> Iterator[ReadRecord]:
    with source.open() as lines:
        for number, line in enumerate(iter(lambda: lines.readline(LONGEST_RECORD), b""), start=1):
            if len(line) == LONGEST_RECORD:
                raise DataInvalid(
                    f"{source.name}:{number}: the line is longer than {LONGEST_RECORD >> 20} MiB: "
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
    except InvalidRecord as error:
        return error


def _fields(value: object) -> Fields:
    if not isinstance(value, dict):
        raise InvalidRecord(f"a record is a JSON object {{…}}, this is {kind_of(value)}")
    return value


def kind_of(value: object) -> str:
    """Return the name of a value's JSON type, with its article."""
    return KINDS.get(type(value), f"a {type(value).__name__}")


def text_of(fields: Fields, name: str, where: str = "") -> str:
    """Return a field that must be text; raise InvalidRecord if it is none, or if it is not valid Unicode."""
    value = fields.get(name)
    if not isinstance(value, str):
        raise InvalidRecord(f"{where}{name} must be a string, it is {kind_of(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRecord(
            f"{where}{name}: character {error.start + 1} is {_describe_surrogate(value[error.start])}: "
            "save the file as UTF-8"
        ) from None
    return value


def _describe_surrogate(surrogate: str) -> str:
    escaped_bytes = range(0xDC80, 0xDD00)  # what errors="surrogateescape" makes of bytes 0x80 to 0xff
    code = ord(surrogate)
    return f"byte 0x{code - 0xDC00:02x}, not UTF-8" if code in escaped_bytes else f"a lone surrogate (\\u{code:04x})"


def check_not_blank(text: str, name: str) -> None:
    """Raise InvalidRecord if a text has no character but spaces."""
    if not text.strip():
        raise InvalidRecord(f"{name} is empty: there is nothing to learn")


def _as_text(source: Source) -> TextIO:
    # A byte that is not UTF-8 becomes a lone surrogate. Only the record that holds it is rejected later.
    return TextIOWrapper(source.open(), encoding="utf-8-sig", errors="surrogateescape", newline="")


def _json(source: Source) -> Iterator[ReadRecord]:
    with _as_text(source) as file:
        window = _JsonWindow(source.name, file)
        if not window.peek():
            return
        if window.peek() == "{":
            raise window.fault(
                "the file begins with {, not with [: put all records into one array, "
                "or set dataset.format to jsonl if there is one record a line"
            )
        window.take("[")
        while window.peek() != "]":
            line = window.line
            value = window.value()
            try:
                yield line, _fields(value)
            except InvalidRecord as error:
                yield line, error
            if window.peek() != "]":
                window.take(",")
        window.take("]")
        if window.peek():
            raise window.fault(f"not JSON: found {window.peek()} after the end of the array: put all records into it")


class _JsonWindow:
    """A sliding window over a JSON text: the part in memory starts at the next unread character."""

    _space = re.compile(r"[ \t\r\n]*")
    _decoder = json.JSONDecoder()

    def __init__(self, name: str, file: TextIO) -> None:
        self.line = 1
        self._name, self._file = name, file
        self._text, self._at, self._ended = "", 0, False

    def fault(self, message: str, at: int | None = None) -> DataInvalid:
        """Return an error at the current line, or at the line of a character of the window."""
        line = self.line + self._text.count("\n", self._at, at) if at else self.line
        return DataInvalid(f"{self._name}:{line}: {message}")

    def peek(self) -> str:
        """Return the next non-space character, or an empty string at the end of the file."""
        while True:
            space = self._space.match(self._text, self._at)
            self._move(space.end() if space else self._at)
            if self._at < len(self._text) or self._ended:
                return self._text[self._at : self._at + 1]
            self._read_chunk()

    def take(self, expected: str) -> None:
        """Consume one character; raise DataInvalid if it is not the expected one."""
        found = self.peek()
        if found != expected:
            raise self.fault(f"not JSON: expected {expected} and found {found or 'the end of the file'}")
        self._move(self._at + 1)

    def value(self) -> object:
        """Parse and consume one JSON value; raise DataInvalid where that fails."""
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if self._ended:
                    raise self.fault(f"not JSON: {error.msg}; nothing after it can be read", error.pos) from None
            except RecursionError:
                raise self.fault("nested too deeply") from None
            else:
                # A value that ends with the window, for example a number, may continue in the next chunk.
                if end < len(self._text) or self._ended:
                    self._move(end)
                    return value
            if len(self._text) - self._at > LONGEST_RECORD:
                raise self.fault(f"not JSON, or a record longer than {LONGEST_RECORD >> 20} MiB")
            self._read_chunk()

    def _move(self, at: int) -> None:
        self.line += self._text.count("\n", self._at, at)
        self._at = at

    def _read_chunk(self) -> None:
        # The window doubles each time, so that a long record is not parsed once per chunk.
        unread = self._text[self._at :]
        chunk = self._file.read(max(JSON_CHUNK, len(unread)))
        self._text, self._at, self._ended = unread + chunk, 0, not chunk


def _csv(source: Source) -> Iterator[ReadRecord]:
    csv.field_size_limit(LONGEST_RECORD)
    with _as_text(source) as file:
        rows = csv.reader(file, strict=True)
        header = next(rows, None)
        if header is None:
            return
        if not complete_shapes(set(header)):
            raise DataInvalid(
                f"{source.name}:1: the first line must name the columns ({SUPPORTED_SHAPES}, separated by commas); "
                f"found {_shortened(','.join(header))}"
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


def _parquet(source: Source) -> Iterator[ReadRecord]:
    # Parquet is not read from its first byte to its last, so its digest takes a pass of its own.
    with source.open() as file:
        while file.read(DIGEST_CHUNK):
            pass
    with _opened(source.path) as parquet:
        names = parquet.schema_arrow.names
        if not complete_shapes(set(names)):
            raise DataInvalid(
                f"{source.name}: needs the columns {SUPPORTED_SHAPES}; it has {_shortened(', '.join(names))}"
            )
        columns = [name for name in names if name in FIELDS]
        number = 1
        for batch in parquet.iter_batches(PARQUET_BATCH, columns=columns):
            for record in _rows(batch):
                yield number, record
                number += 1


def _rows(batch: Any) -> list[Fields | InvalidRecord]:
    try:
        rows: list[Fields] = batch.to_pylist()
    except UnicodeDecodeError:
        # Parquet files may hold invalid UTF-8: convert row by row to find the invalid record.
        return [_rows(batch.slice(row, 1))[0] for row in range(len(batch))] if len(batch) > 1 else [_not_utf8()]
    return [_without_nulls(row) for row in rows]


def _without_nulls(fields: Fields) -> Fields:
    """Remove nulls within conversations and tools: in Parquet, an object has all fields that any other one has."""
    return {name: _pruned(value) if name in NESTED else value for name, value in fields.items()}


def _pruned(value: Any) -> Any:
    match value:
        case dict():
            return {key: _pruned(inner) for key, inner in value.items() if inner is not None}
        case list():
            return [_pruned(inner) for inner in value]
        case _:
            return value


def _not_utf8() -> InvalidRecord:
    return InvalidRecord("holds bytes that are not UTF-8")


def _shortened(text: str, limit: int = 80) -> str:
    return ascii(text if len(text) <= limit else text[: limit - 1] + "…")[1:-1]
