"""Read JSON and JSON Lines, whichever of them a file holds.

People write an array or indented objects into a file named .jsonl, and one object a line into a file named .json. The
beginning of a file shows which it is.
"""

import codecs
import json
import re
from collections.abc import Iterator
from enum import Enum
from functools import partial
from io import BufferedReader, TextIOWrapper

from finetune_trainer.contract import DataFormat
from finetune_trainer.data.reading import json_window
from finetune_trainer.data.reading.columns import FieldColumns
from finetune_trainer.data.reading.json_window import LONG_INTEGER, JsonWindow
from finetune_trainer.data.reading.source_file import SourceFile
from finetune_trainer.data.reading.unread import has_text
from finetune_trainer.data.records.json_text import RepeatedKey, parse_json
from finetune_trainer.data.records.records import (
    Fields,
    InvalidRecord,
    kind_of,
    shortened,
)
from finetune_trainer.data.records.suggestions import LISTS_OF_RECORDS
from finetune_trainer.runtime.errors import DataInvalid

ReadRecord = tuple[int, Fields | InvalidRecord]
"""The line at which a record begins (in Parquet: its row), counted from 1, and the record or its error."""

_LIST_OF_RECORDS = re.compile(
    rb'\{\s*"(?:%s)"\s*:\s*\[\s*\{' % "|".join(LISTS_OF_RECORDS).encode()
)
"""The beginning of an object that holds all records in a list."""


class FileLayout(Enum):
    """How a file holds its records."""

    LINES = "JSON Lines"
    VALUES = "JSON objects over several lines"
    ARRAY = "a JSON array"
    LIST = "a JSON object with a list of records"


def layout_of(beginning: bytes) -> FileLayout:
    """Return the layout of a file with this beginning, which holds at least the first line if it is not very long."""
    text = beginning.removeprefix(codecs.BOM_UTF8).lstrip()
    first, line_break, rest = text.partition(b"\n")
    if text.startswith(b"["):
        # A list in each line holds no fields: each line is then invalid.
        has_lists = bool(rest.strip()) and _is_json(first)
        return FileLayout.LINES if has_lists else FileLayout.ARRAY
    if not text.startswith(b"{"):
        return FileLayout.LINES
    if _LIST_OF_RECORDS.match(text):
        return FileLayout.LIST
    if not line_break or _is_json(first):
        return FileLayout.LINES
    # The next line of an indented object is indented; after a damaged line there is another record.
    is_indented = first.strip() == b"{" or rest[:1].isspace()
    return FileLayout.VALUES if is_indented else FileLayout.LINES


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def read_json(
    source: SourceFile, form: DataFormat, columns: FieldColumns
) -> Iterator[ReadRecord]:
    """Yield the records of a file that its name or the manifest calls JSON or JSON Lines.

    Raise DataInvalid if the file as a whole cannot be read, or if nothing after a syntax error can be read.
    """
    with source.open() as file:
        beginning = file.peek()
        check_is_text(source.name, beginning)
        layout = layout_of(beginning)
        expected = FileLayout.ARRAY if form == "JSON" else FileLayout.LINES
        if layout is not expected and beginning.strip():
            columns.note(f"holds {layout.value}, and is read as such")
        if layout is FileLayout.LINES:
            yield from _lines(source, file, columns)
        else:
            yield from _values(source, file, layout, columns)


_OTHER_FILES = {
    b"PAR1": "Parquet: set the data set's format to Parquet, or name the file .parquet",
    b"\x1f\x8b": "compressed by gzip: add .gz to its name",
    b"\x28\xb5\x2f\xfd": "compressed by zstd: add .zst to its name",
    b"BZh91AY&SY": "compressed by bzip2: unpack it",
    b"\xfd7zXZ\x00": "compressed by xz: unpack it",
    b"PK\x03\x04": "a ZIP archive or a spreadsheet: save its table as CSV",
    b"version https://git-lfs": "a pointer of Git LFS: run git lfs pull, to get the file itself",
    b"<!DOCTYPE": "a web page: download the file itself",
    b"<html": "a web page: download the file itself",
}
"""Kinds of files by their first bytes, with the fix."""


def check_is_text(name: str, beginning: bytes) -> None:
    """Raise DataInvalid if a file is no text in UTF-8, or is a file of another kind."""
    for magic, kind in _OTHER_FILES.items():
        if beginning.startswith(magic):
            raise DataInvalid(f"{name}: the file is {kind}")
    has_mark = beginning.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    if has_mark or b"\0" in beginning[:1000]:
        raise DataInvalid(
            f"{name}: the file is UTF-16 or binary: save it as UTF-8, "
            f"for example with: iconv -f UTF-16 -t UTF-8 {name}"
        )


def _lines(
    source: SourceFile, file: BufferedReader, columns: FieldColumns
) -> Iterator[ReadRecord]:
    longest = json_window.LONGEST_RECORD
    lines = iter(partial(file.readline, longest), b"")
    for number, line in enumerate(lines, start=1):
        if len(line) == longest:
            raise DataInvalid(
                f"{source.name}:{number}: the line is longer than {longest >> 20} MiB: "
                "JSON Lines has one record a line; if the file is one array, set its format to JSON"
            )
        # Editors of Windows write a byte order mark at the start of a file, also of an empty file.
        ignored = b"\xef\xbb\xbf\r\n\t " if number == 1 else None
        if line.strip(ignored):
            yield number, _parsed(line, columns)


def _parsed(line: bytes, columns: FieldColumns) -> Fields | InvalidRecord:
    try:
        # The codec without the byte order mark is several times as fast.
        codec = "utf-8-sig" if line.startswith(codecs.BOM_UTF8) else "utf-8"
        return columns.select(_fields(parse_json(line.rstrip().decode(codec))))
    except UnicodeDecodeError as error:
        return InvalidRecord(
            f"byte 0x{line[error.start]:02x} at position {error.start + 1} is not UTF-8: save the file as UTF-8, "
            "for example with iconv -f LATIN1 -t UTF-8"
        )
    except json.JSONDecodeError as error:
        return InvalidRecord(_not_json(line, error))
    except RecursionError:
        return InvalidRecord("nested too deeply")
    except ValueError:
        return InvalidRecord(LONG_INTEGER)
    except InvalidRecord as error:
        return error


def _not_json(line: bytes, error: json.JSONDecodeError) -> str:
    problem = f"not JSON: {error.msg} at column {error.colno}"
    if error.pos == 0 and line[:1] not in b"{[":
        return f'{problem}: for plain text write {{"text": "…"}} in each line'
    return problem


def _fields(value: object) -> Fields:
    if isinstance(value, dict):
        return value
    reason = f"a record is a JSON object {{…}}, this is {kind_of(value)}"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        is_conversation = not value[0].keys().isdisjoint({"role", "from"})
        fix = 'write {"messages": […]}' if is_conversation else "put all into one array"
        reason = f"{reason}: {fix}"
    raise InvalidRecord(reason)


def _values(
    source: SourceFile, file: BufferedReader, layout: FileLayout, columns: FieldColumns
) -> Iterator[ReadRecord]:
    window = JsonWindow(source.name, as_text(file))
    match layout:
        case FileLayout.ARRAY:
            yield from _array(window, columns)
            if window.peek():
                raise window.fault(
                    f"not JSON: found {window.peek()} after the end of the array: put all records into it"
                )
        case FileLayout.LIST:
            yield from _list_in_object(window, columns)
        case _:
            yield from _sequence(window, columns)


def as_text(file: BufferedReader) -> TextIOWrapper:
    """Return a file as text; a byte that is not UTF-8 becomes a lone surrogate, so that only its record is rejected."""
    return TextIOWrapper(
        file, encoding="utf-8-sig", errors="surrogateescape", newline=""
    )


def _array(window: JsonWindow, columns: FieldColumns) -> Iterator[ReadRecord]:
    window.take("[")
    while window.peek() != "]":
        yield _record(window, columns)
        if window.peek() != "]":
            window.take(",")
    window.take("]")


def _sequence(window: JsonWindow, columns: FieldColumns) -> Iterator[ReadRecord]:
    while window.peek():
        yield _record(window, columns)
        # Parts of an array that were copied together.
        if window.peek() == ",":
            window.take(",")


def _record(window: JsonWindow, columns: FieldColumns) -> ReadRecord:
    line = window.line
    try:
        return line, columns.select(_fields(window.value()))
    except InvalidRecord as error:
        return line, error


def _list_in_object(window: JsonWindow, columns: FieldColumns) -> Iterator[ReadRecord]:
    window.take("{")
    window.peek()
    window.value()
    window.take(":")
    window.peek()
    yield from _array(window, columns)
    while window.peek() == ",":
        window.take(",")
        window.peek()
        name = window.value()
        window.take(":")
        window.peek()
        try:
            value = window.value()
        except RepeatedKey as error:
            raise window.fault(str(error)) from None
        # Another list may hold records, too.
        if isinstance(value, list | dict) or has_text(value):
            raise window.fault(
                f"the file has {shortened(str(name))} beside its list of records: write this list alone into the file"
            )
    window.take("}")
    if window.peek():
        raise window.fault(
            "not JSON: something follows the object with the list of records: write this list alone into the file"
        )
