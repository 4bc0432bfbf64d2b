"""Read tables: CSV with any usual separator, and Parquet, batch by batch."""

import csv
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyarrow import ArrowInvalid
from pyarrow.parquet import ParquetFile

from finetune_trainer.data.reading import json_window
from finetune_trainer.data.reading.columns import FieldColumns
from finetune_trainer.data.reading.json_files import (
    ReadRecord,
    as_text,
    check_is_text,
)
from finetune_trainer.data.reading.source_file import SourceFile
from finetune_trainer.data.reading.unread import has_text
from finetune_trainer.data.records.records import Fields, InvalidRecord, shortened
from finetune_trainer.runtime.errors import DataInvalid

PARQUET_BATCH = 256
"""Rows in memory at a time."""
DIGEST_CHUNK = 1024 * 1024
"""Bytes read at a time for the digest of a Parquet file."""
SEPARATORS = {",": "a comma", "\t": "a tab", ";": "a semicolon", "|": "a bar"}
"""Separators of cells, and their names."""


def read_csv(source: SourceFile, columns: FieldColumns) -> Iterator[ReadRecord]:
    """Yield the rows of a table of cells; raise DataInvalid if its first line does not name the columns."""
    csv.field_size_limit(json_window.LONGEST_RECORD)
    with source.open() as file:
        beginning = file.peek()
        check_is_text(source.name, beginning)
        separator = _separator(beginning, columns)
        # strict: a misplaced quote is an error of its record.
        rows = csv.reader(as_text(file), strict=True, delimiter=separator)
        try:
            first = next(rows, None)
        except csv.Error as error:
            raise DataInvalid(f"{source.name}:1: not CSV: {error}") from None
        if first is None:
            return
        header = [name.strip() for name in first]
        _check_header(source.name, header, columns)
        if separator != ",":
            columns.note(f"its cells are separated by {SEPARATORS[separator]}")
        yield from _csv_rows(rows, header, columns)


def _separator(beginning: bytes, columns: FieldColumns) -> str:
    """Return the separator with which the first line names the columns that are read."""
    line = beginning.decode("utf-8-sig", "replace").partition("\n")[0]
    headers = {}
    for separator in SEPARATORS:
        cells = next(csv.reader([line.strip("\r")], delimiter=separator), [])
        headers[separator] = [cell.strip() for cell in cells]
    for separator, header in headers.items():
        if header and not columns.problem(header):
            return separator
    return max(headers, key=lambda separator: len(headers[separator]))


def _check_header(name: str, header: list[str], columns: FieldColumns) -> None:
    problem = columns.problem(header)
    if problem:
        raise DataInvalid(
            f"{name}:1: the first line must name the columns: it {problem}"
        )
    for column in header:
        if column and header.count(column) > 1:
            raise DataInvalid(
                f"{name}:1: the first line names the column {shortened(column)} twice: rename one of them"
            )


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
            yield line, _selected(dict(zip(header, row, strict=True)), columns)
        elif row:
            yield (
                line,
                InvalidRecord(
                    f"{len(row)} cells, but the header names {len(header)}: quote cells that hold the separator"
                ),
            )


def _selected(row: Fields, columns: FieldColumns) -> Fields | InvalidRecord:
    try:
        return columns.select(row)
    except InvalidRecord as error:
        return error


def open_parquet(source: SourceFile) -> ParquetFile:
    """Open a Parquet file; raise DataInvalid if it is none."""
    # Not buffered ahead, so that memory does not grow with the size of a row group.
    try:
        return ParquetFile(source.path, buffer_size=1 << 20, pre_buffer=False)
    except ArrowInvalid as error:
        raise DataInvalid(f"{source.name}: not Parquet: {error}") from None


def read_parquet(source: SourceFile, columns: FieldColumns) -> Iterator[ReadRecord]:
    """Yield the rows of a Parquet file, of which only the columns that are needed are read."""
    # Parquet is not read from its first byte to its last, so its digest takes a pass of its own.
    with source.open() as file:
        while file.read(DIGEST_CHUNK):
            pass
    with open_parquet(source) as parquet:
        names = parquet.schema_arrow.names
        problem = columns.problem(names)
        if problem:
            raise DataInvalid(f"{source.name}: {problem}")
        wanted = columns.among(names)
        wanted += _with_texts(parquet, [name for name in names if name not in wanted])
        columns.add_labels(name for name in names if name not in wanted)
        number = 1
        for batch in parquet.iter_batches(PARQUET_BATCH, columns=wanted):
            for record in _rows(batch, columns):
                yield number, record
                number += 1


def _with_texts(parquet: ParquetFile, unread: list[str]) -> list[str]:
    """Return the columns that hold texts in the first batch, so that all texts in them are looked at."""
    schema = parquet.schema_arrow
    suspects = [name for name in unread if _may_hold_text(schema.field(name).type)]
    if not suspects:
        return []
    for batch in parquet.iter_batches(PARQUET_BATCH, columns=suspects):
        return [name for name in suspects if _holds_text(batch.column(name))]
    return []


def _may_hold_text(kind: Any) -> bool:
    if pa.types.is_dictionary(kind):
        return _may_hold_text(kind.value_type)
    if pa.types.is_nested(kind):
        return any(
            _may_hold_text(kind.field(index).type) for index in range(kind.num_fields)
        )
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _holds_text(column: Any) -> bool:
    try:
        return has_text(column.to_pylist())
    except UnicodeDecodeError:
        return True


def _rows(batch: Any, columns: FieldColumns) -> list[Fields | InvalidRecord]:
    try:
        rows: list[Fields] = batch.to_pylist()
    except UnicodeDecodeError:
        # Parquet files may hold invalid UTF-8: convert row by row to find the invalid record.
        if len(batch) == 1:
            return [InvalidRecord("holds bytes that are not UTF-8")]
        return [_rows(batch.slice(row, 1), columns)[0] for row in range(len(batch))]
    return [_selected(_without_nulls(row), columns) for row in rows]


def _without_nulls(fields: Fields) -> Fields:
    """Remove nulls within objects: in Parquet, every object has the fields of all objects."""
    return {
        name: _pruned(value) if type(value) in {list, dict} else value
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
