"""Read tables of cells: CSV with any usual separator."""

import csv
import re
from collections.abc import Iterator
from typing import Any

from finetune_trainer.data.reading import json_window
from finetune_trainer.data.reading.columns import FieldColumns
from finetune_trainer.data.reading.json_files import (
    ReadRecord,
    as_text,
    check_is_text,
)
from finetune_trainer.data.reading.source_file import SourceFile
from finetune_trainer.data.records.records import Fields, InvalidRecord, shortened
from finetune_trainer.runtime.errors import DataInvalid

SEPARATORS = {",": "a comma", "\t": "a tab", ";": "a semicolon", "|": "a bar"}
"""Separators of cells, and their names."""
# Some spreadsheets end lines with a carriage return alone.
_LINE_END = re.compile(r"\r\n|\r|\n")


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
        header = [
            name.strip() or f"column {number}"
            for number, name in enumerate(first, start=1)
        ]
        _check_header(source.name, header, columns)
        if separator != ",":
            columns.note(f"its cells are separated by {SEPARATORS[separator]}")
        yield from _csv_rows(rows, header, columns)


def _separator(beginning: bytes, columns: FieldColumns) -> str:
    """Return the separator with which the first line names the columns that are read."""
    text = beginning.decode("utf-8-sig", "replace")
    line = _LINE_END.split(text, maxsplit=1)[0]
    headers = {}
    for separator in SEPARATORS:
        cells = next(csv.reader([line], delimiter=separator), [])
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
        if header.count(column) > 1:
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
