"""Read Parquet, batch by batch: the columns that are needed, and all others that may hold a text."""

import re
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyarrow import ArrowInvalid
from pyarrow.parquet import ParquetFile

from finetune_trainer.data.reading.columns import FieldColumns
from finetune_trainer.data.reading.json_files import ReadRecord
from finetune_trainer.data.reading.source_file import SourceFile
from finetune_trainer.data.records.records import Fields, InvalidRecord, shortened
from finetune_trainer.runtime.errors import DataInvalid

BATCH_ROWS = 256
"""Rows in memory at a time."""
BATCH_BYTES = 32 * 1024 * 1024
"""Bytes of the columns of these rows; tables may hold images, too."""
DIGEST_CHUNK = 1024 * 1024
"""Bytes read at a time for the digest of a Parquet file."""
_CONTROL = re.compile(r"[\0-\x08\x0e-\x1a\x1c-\x1f]")
"""Characters that no text has, but numbers and images as bytes have."""


def open_parquet(source: SourceFile) -> ParquetFile:
    """Open a Parquet file; raise DataInvalid if it is none."""
    # Not buffered ahead, so that memory does not grow with the size of a row group.
    try:
        return ParquetFile(source.path, buffer_size=1 << 20, pre_buffer=False)
    except (ArrowInvalid, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            # An error of the disk. Errors of the content have no number.
            raise
        raise DataInvalid(f"{source.name}: not Parquet: {error}") from None


def read_parquet(source: SourceFile, columns: FieldColumns) -> Iterator[ReadRecord]:
    """Yield the rows of a Parquet file, of which only the columns that are needed are read."""
    # Parquet is not read from its first byte to its last, so its digest takes a pass of its own.
    with source.open() as file:
        while file.read(DIGEST_CHUNK):
            pass
    with open_parquet(source) as parquet:
        schema = parquet.schema_arrow
        names = schema.names
        problem = columns.problem(names) or _repeated(names)
        if problem:
            raise DataInvalid(f"{source.name}: {problem}")
        wanted = columns.among(names)
        wanted += [
            name
            for name in names
            if name not in wanted and may_hold_text(schema.field(name).type)
        ]
        columns.add_labels(name for name in names if name not in wanted)
        number = 1
        for batch in _batches(source, parquet, wanted):
            for record in _rows(batch, columns):
                yield number, record
                number += 1


def _repeated(names: list[str]) -> str:
    for name in names:
        if names.count(name) > 1:
            return f"it has the column {shortened(name)} twice: rename one of them"
    return ""


def _batches(
    source: SourceFile, parquet: ParquetFile, columns: list[str]
) -> Iterator[Any]:
    """Yield batches of rows; raise DataInvalid if the file is damaged."""
    try:
        yield from parquet.iter_batches(_batch_rows(parquet, columns), columns=columns)
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise DataInvalid(f"{source.name}: damaged: {error}") from None


def _batch_rows(parquet: ParquetFile, columns: list[str]) -> int:
    """Return the number of rows in memory at a time: fewer than BATCH_ROWS if they are large."""
    metadata = parquet.metadata
    wanted = [
        index
        for index in range(metadata.num_columns)
        if _is_of(parquet.schema.column(index).path, columns)
    ]
    largest = 1
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        size = sum(group.column(index).total_uncompressed_size for index in wanted)
        largest = max(largest, size // max(1, group.num_rows))
    return max(1, min(BATCH_ROWS, BATCH_BYTES // largest))


def _is_of(path: str, columns: list[str]) -> bool:
    return any(path == column or path.startswith(f"{column}.") for column in columns)


def may_hold_text(kind: Any) -> bool:
    """Return whether values of an Arrow type may hold a text: as text, or as bytes that are one."""
    if pa.types.is_dictionary(kind):
        return may_hold_text(kind.value_type)
    if isinstance(kind, pa.BaseExtensionType):
        return may_hold_text(kind.storage_type)
    if pa.types.is_map(kind):
        # The keys of a map are names, as in JSON.
        return may_hold_text(kind.item_type)
    if pa.types.is_nested(kind):
        return any(
            may_hold_text(kind.field(index).type) for index in range(kind.num_fields)
        )
    kinds = (
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_string_view,
        pa.types.is_binary,
        pa.types.is_large_binary,
        pa.types.is_binary_view,
    )
    return any(is_kind(kind) for is_kind in kinds)


def _rows(batch: Any, columns: FieldColumns) -> list[Fields | InvalidRecord]:
    try:
        rows: list[Fields] = batch.to_pylist(maps_as_pydicts="strict")
    except (UnicodeDecodeError, KeyError) as error:
        # Parquet files may hold invalid UTF-8: convert row by row to find the invalid record.
        if len(batch) > 1:
            return [_rows(batch.slice(row, 1), columns)[0] for row in range(len(batch))]
        if isinstance(error, KeyError):
            return [
                InvalidRecord(
                    "a map has a key twice, so a value would be lost: remove one of them"
                )
            ]
        return [InvalidRecord("holds bytes that are not UTF-8")]
    return [_selected(row, columns) for row in rows]


def _selected(row: Fields, columns: FieldColumns) -> Fields | InvalidRecord:
    fields = {
        name: _as_json(value) if type(value) in _CONVERTED else value
        for name, value in row.items()
    }
    try:
        return columns.select(fields)
    except InvalidRecord as error:
        return error


_CONVERTED = frozenset({list, dict, bytes})


def _as_json(value: Any) -> Any:
    """Return a value as JSON has it: texts of bytes, and objects without the nulls that all objects have in Parquet."""
    match value:
        case bytes():
            return _decoded(value)
        case dict():
            return {
                key: _as_json(inner)
                for key, inner in value.items()
                if inner is not None
            }
        case list():
            return [_as_json(inner) for inner in value]
        case _:
            return value


def _decoded(value: bytes) -> str | bytes:
    """Return the text that bytes are; the bytes if they are none."""
    # Writers such as Spark's do not always mark texts as such.
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return value
    return value if _CONTROL.search(text) else text
