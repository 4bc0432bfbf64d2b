"""Read a data set's file as a stream of numbered records.

JSON, JSON Lines and CSV have their own readers here instead of a library's. An invalid record must be named by its
line, and the valid records around it must still be used. Parquet is read by pyarrow, batch by batch.
"""

from collections.abc import Iterator
from pathlib import Path

from finetune_trainer.contract import DataFormat
from finetune_trainer.data.reading.columns import FieldColumns
from finetune_trainer.data.reading.json_files import ReadRecord, read_json
from finetune_trainer.data.reading.parquet_tables import open_parquet, read_parquet
from finetune_trainer.data.reading.source_file import COMPRESSIONS, SourceFile
from finetune_trainer.data.reading.tables import read_csv
from finetune_trainer.runtime.errors import ConfigInvalid

FORMAT_BY_EXTENSION: dict[str, DataFormat] = {
    ".jsonl": "JSONLines",
    ".ndjson": "JSONLines",
    ".json": "JSON",
    ".csv": "CSV",
    ".tsv": "CSV",
    ".parquet": "Parquet",
}
_OTHER_EXTENSIONS = {
    ".txt": 'plain text: write {"text": "…"} for each document, one a line, into a file named .jsonl',
    ".md": 'plain text: write {"text": "…"} for each document, one a line, into a file named .jsonl',
    ".xlsx": "a spreadsheet: save its table as CSV",
    ".xls": "a spreadsheet: save its table as CSV",
    ".arrow": "an Arrow file: save it as Parquet, for example with datasets' Dataset.to_parquet",
    ".zip": "an archive: unpack it",
    ".tar": "an archive: unpack it",
}
"""Files of other kinds, with the fix."""


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
        raise ConfigInvalid(_unknown_extension(path, extension))
    if compressed and form == "Parquet":
        raise ConfigInvalid(
            f"{path.name}: compressed Parquet files must be unpacked, because they are read in parts"
        )
    return form


def _unknown_extension(path: Path, extension: str) -> str:
    other = _OTHER_EXTENSIONS.get(extension.lower())
    if other:
        return (
            f"{path.name}: {extension} is {other}; if it holds one of them after all, set the data set's format to "
            "JSONLines, JSON, CSV or Parquet"
        )
    return (
        f"{path.name}: unknown file extension {extension or '(none)'}: set the data set's format to JSONLines, "
        f"JSON, CSV or Parquet (compressed files must be unpacked, except {' and '.join(COMPRESSIONS)})"
    )


def read_records(
    source: SourceFile, form: DataFormat, columns: FieldColumns | None = None
) -> Iterator[ReadRecord]:
    """Yield the file's records in order; at the end, the source has been read to its last byte.

    Raises DataInvalid if the file as a whole cannot be read, or if nothing after a syntax error can be read.
    """
    columns = columns or FieldColumns()
    match form:
        case "JSONLines" | "JSON":
            return read_json(source, form, columns)
        case "CSV":
            return read_csv(source, columns)
        case "Parquet":
            return read_parquet(source, columns)
        case "Auto":
            return read_records(source, format_of(source.path, form), columns)


def known_count(source: SourceFile, form: DataFormat) -> int | None:
    """Return the number of records, or None if it takes reading the file to know."""
    if form != "Parquet":
        return None
    with open_parquet(source) as file:
        return int(file.metadata.num_rows)
