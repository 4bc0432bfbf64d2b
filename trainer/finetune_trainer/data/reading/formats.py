"""Read a data set's file as a stream of numbered records.

JSON, JSON Lines and CSV have their own readers here instead of a library's. An invalid record must be named by its
line, and the valid records around it must still be used. Parquet is read by pyarrow, batch by batch.
"""

import csv
import json
import re
from collections.abc import Iterator
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TextIO

from pyarrow import ArrowInvalid
from pyarrow.parquet import ParquetFile

from finetune_trainer.contract import DataFormat
from finetune_trainer.data.reading.columns import FieldColumns
from finetune_trainer.data.reading.source_file import COMPRESSIONS, SourceFile
from finetune_trainer.data.records.records import (
    NESTED,
    Fields,
    InvalidRecord,
    kind_of,
    shortened,
)
from finetune_trainer.runtime.errors import ConfigInvalid, DataInvalid

FORMAT_BY_EXTENSION: dict[str, DataFormat] = {
    ".jsonl": "JSONLines",
    ".ndjson": "JSONLines",
    ".json": "JSON",
    ".csv": "CSV",
    ".parquet": "Parquet",
}
# Without a limit, an unclosed quote would load the whole file.
LONGEST_RECORD = 64 * 1024 * 1024
"""Maximum size of a record in characters (bytes for JSON Lines)."""
PARQUET_BATCH = 256
"""Rows in memory at a time."""
DIGEST_CHUNK = 1024 * 1024
"""Bytes read at a time for the digest of a Parquet file."""
JSON_CHUNK = 64 * 1024
"""Characters read at a time."""

ReadRecord = tuple[int, Fields | InvalidRecord]
"""The line at which a record begins (in Parquet: its row), counted from 1, and the record or its error."""


def format_of(path: Path, requested: DataFormat) -> DataFormat:
    """Return the requested format, or for Auto the format of the file's extension.

    Raises ConfigInvalid for an unknown extension, and for a compressed Parquet file.
    """
    compressed = path.suffix.lower() in COMPRESSIONS
    extension = Path(path.stem).suffix if compressed else path.suffix
    form: DataFormat | None = requested
    if requested == "Auto":
        form = FORMAT_BY_EXTENSION.get(extension.lower())
    if form is None:
        raise ConfigInvalid(
            f"{path.name}: unknown file extension {extension or '(none)'}: set the data set's format to JSONLines, "
            f"JSON, CSV or Parquet (compressed files must be unpacked, except {' and '.join(COMPRESSIONS)})"
        )
    if compressed and form == "Parquet":
        raise ConfigInvalid(
            f"{path.name}: compressed Parquet files must be unpacked, because they are read in parts"
        )
    return form


def read_records(
    source: SourceFile, form: DataFormat, columns: FieldColumns | None = None
) -> Iterator[ReadRecord]:
    """Yield the file's records in order; at the end, the source has been read to its last byte.

    Raises DataInvalid if the file as a whole cannot be read, or if nothing after a syntax error can be read.
    """
    columns = columns or FieldColumns()
    match form:
        case "JSONLines":
            return _jsonl(source, columns)
        case "JSON":
            return _json(source, columns)
        case "CSV":
            return _csv(source, columns)
        case "Parquet":
            return _parquet(source, columns)
        case "Auto":
            return read_records(source, format_of(source.path, form), columns)


def known_count(source: SourceFile, form: DataFormat) -> int | None:
    """Return the number of records, or None if it takes reading the file to know."""
    if form != "Parquet":
        return None
    with _opened(source) as file:
        return int(file.metadata.num_rows)


def _jsonl(source: SourceFile, columns: FieldColumns) -> Iterator[ReadRecord]:
    with source.open() as file:
        lines = iter(partial(file.readline, LONGEST_RECORD), b"")
        for number, line in enumerate(lines, start=1):
            if len(line) == LONGEST_RECORD:
                raise DataInvalid(
                    f"{source.name}:{number}: the line is longer than {LONGEST_RECORD >> 20} MiB: "
                    "JSON Lines has one record a line; if the file is one array, set its format to JSON"
                )
            # Editors of Windows write a byte order mark at the start of a file, also of an empty file.
            ignored = b"\xef\xbb\xbf\r\n\t " if number == 1 else None
            if line.strip(ignored):
                yield number, _parsed(line, columns)


def _parsed(line: bytes, columns: FieldColumns) -> Fields | InvalidRecord:
    try:
        text = line.rstrip().decode("utf-8-sig")
        return columns.select(_fields(json.loads(text)))
    except UnicodeDecodeError as error:
        return InvalidRecord(
            f"byte 0x{line[error.start]:02x} at position {error.start + 1} is not UTF-8"
        )
    except json.JSONDecodeError as error:
        return InvalidRecord(f"not JSON: {error.msg} at column {error.colno}")
    except RecursionError:
        return InvalidRecord("nested too deeply")
    except InvalidRecord as error:
        return error


def _fields(value: object) -> Fields:
    if not isinstance(value, dict):
        raise InvalidRecord(
            f"a record is a JSON object {{…}}, this is {kind_of(value)}"
        )
    return value


def _as_text(source: SourceFile) -> TextIO:
    # A byte that is not UTF-8 becomes a lone surrogate. Only the record that holds it is rejected later.
    return TextIOWrapper(
        source.open(), encoding="utf-8-sig", errors="surrogateescape", newline=""
    )


def _json(source: SourceFile, columns: FieldColumns) -> Iterator[ReadRecord]:
    with _as_text(source) as file:
        window = _JsonWindow(source.name, file)
        if not window.peek():
            return
        if window.peek() == "{":
            raise window.fault(
                "the file begins with {, not with [: put all records into one array, "
                "or set its format to JSONLines if there is one record a line"
            )
        window.take("[")
        while window.peek() != "]":
            line = window.line
            value = window.value()
            try:
                yield line, columns.select(_fields(value))
            except InvalidRecord as error:
                yield line, error
            if window.peek() != "]":
                window.take(",")
        window.take("]")
        if window.peek():
            raise window.fault(
                f"not JSON: found {window.peek()} after the end of the array: put all records into it"
            )


class _JsonWindow:
    """A sliding window over a JSON text: the part in memory starts at the next unread character."""

    _space = re.compile(r"[ \t\r\n]*")
    _decoder = json.JSONDecoder()

    def __init__(self, name: str, file: TextIO) -> None:
        self.line = 1
        self._name = name
        self._file = file
        self._text = ""
        self._at = 0
        """Position in the text of the next unread character."""
        self._ended = False

    def fault(self, message: str, at: int | None = None) -> DataInvalid:
        """Return an error at the current line, or at the line of a character of the window."""
        line = self.line
        if at:
            line += self._text.count("\n", self._at, at)
        return DataInvalid(f"{self._name}:{line}: {message}")

    def peek(self) -> str:
        """Return the next non-space character, or an empty string at the end of the file."""
        while True:
            space = self._space.match(self._text, self._at)
            if space is not None:
                self._move(space.end())
            if self._at < len(self._text):
                return self._text[self._at]
            if self._ended:
                return ""
            self._read_chunk()

    def take(self, expected: str) -> None:
        """Consume the next character; raise DataInvalid if it is not the expected character."""
        character = self.peek()
        if character != expected:
            observed = character or "the end of the file"
            raise self.fault(f"not JSON: expected {expected} and found {observed}")
        self._move(self._at + 1)

    def value(self) -> object:
        """Parse and consume a JSON value; raise DataInvalid if that fails."""
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                # Before the end of the file, the value may only be cut by the end of the window.
                if self._ended:
                    raise self.fault(
                        f"not JSON: {error.msg}; nothing after it can be read",
                        error.pos,
                    ) from None
            except RecursionError:
                raise self.fault("nested too deeply") from None
            else:
                # A value that ends with the window, for example a number, may continue in the next chunk.
                if end < len(self._text) or self._ended:
                    self._move(end)
                    return value
            if len(self._text) - self._at > LONGEST_RECORD:
                raise self.fault(
                    f"not JSON, or a record longer than {LONGEST_RECORD >> 20} MiB"
                )
            self._read_chunk()

    def _move(self, at: int) -> None:
        self.line += self._text.count("\n", self._at, at)
        self._at = at

    def _read_chunk(self) -> None:
        # The window doubles each time, so that a long record is not parsed once per chunk.
        unread = self._text[self._at :]
        chunk = self._file.read(max(JSON_CHUNK, len(unread)))
        self._text = unread + chunk
        self._at = 0
        self._ended = not chunk


def _csv(source: SourceFile, columns: FieldColumns) -> Iterator[ReadRecord]:
    csv.field_size_limit(LONGEST_RECORD)
    with _as_text(source) as file:
        # strict: a misplaced quote is an error of its record.
        rows = csv.reader(file, strict=True)
        header = next(rows, None)
        if header is None:
            return
        problem = columns.problem(header)
        if problem:
            raise DataInvalid(
                f"{source.name}:1: the first line must name the columns, separated by commas: it {problem}; "
                f"found {shortened(','.join(header))}"
            )
        yield from _csv_rows(rows, header, columns)


def _csv_rows(
    rows: Any, header: list[str], columns: FieldColumns
) -> Iterator[ReadRecord]:
    while True:
        # A quoted cell may span lines, so the record's first line is the line after the record before it.
        line = rows.line_num + 1
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            yield line, InvalidRecord(f"not CSV: {error}")
            continue
        if len(row) == len(header):
            yield line, _cells(dict(zip(header, row, strict=True)), columns)
        elif row:
            yield (
                line,
                InvalidRecord(f"{len(row)} cells, but the header names {len(header)}"),
            )


def _cells(row: Fields, columns: FieldColumns) -> Fields | InvalidRecord:
    fields = columns.select(row)
    if "messages" not in fields:
        return fields
    try:
        return fields | {"messages": json.loads(fields["messages"])}
    except ValueError as error:
        return InvalidRecord(f"messages is not JSON: {error}")


def _opened(source: SourceFile) -> ParquetFile:
    # Not buffered ahead, so that memory does not grow with the size of a row group.
    try:
        return ParquetFile(source.path, buffer_size=1 << 20, pre_buffer=False)
    except ArrowInvalid as error:
        raise DataInvalid(f"{source.name}: not Parquet: {error}") from None


def _parquet(source: SourceFile, columns: FieldColumns) -> Iterator[ReadRecord]:
    # Parquet is not read from its first byte to its last, so its digest takes a pass of its own.
    with source.open() as file:
        while file.read(DIGEST_CHUNK):
            pass
    with _opened(source) as parquet:
        names = parquet.schema_arrow.names
        problem = columns.problem(names)
        if problem:
            raise DataInvalid(
                f"{source.name}: {problem}; it has {shortened(', '.join(names))}"
            )
        number = 1
        for batch in parquet.iter_batches(PARQUET_BATCH, columns=columns.among(names)):
            for record in _rows(batch, columns):
                yield number, record
                number += 1


def _rows(batch: Any, columns: FieldColumns) -> list[Fields | InvalidRecord]:
    try:
        rows: list[Fields] = batch.to_pylist()
    except UnicodeDecodeError:
        # Parquet files may hold invalid UTF-8: convert row by row to find the invalid record.
        if len(batch) == 1:
            return [InvalidRecord("holds bytes that are not UTF-8")]
        return [_rows(batch.slice(row, 1), columns)[0] for row in range(len(batch))]
    return [_selected(row, columns) for row in rows]


def _selected(row: Fields, columns: FieldColumns) -> Fields | InvalidRecord:
    try:
        return _without_nulls(columns.select(row))
    except InvalidRecord as error:
        return error


def _without_nulls(fields: Fields) -> Fields:
    """Remove nulls within conversations and tools: in Parquet, every object has the fields of all objects."""
    return {
        name: _pruned(value) if name in NESTED else value
        for name, value in fields.items()
    }


def _pruned(value: Any) -> Any:
    match value:
        case dict():
            return {
                key: _pruned(inner) for key, inner in value.items() if inner is not None
            }
        case list():
            return [_pruned(inner) for inner in value]
        case _:
            return value
