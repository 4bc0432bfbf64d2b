"""The data sets of a pipeline, read in their order: each is a list of files."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from finetune_trainer.contract import (
    DatasetSource,
    DataSource,
    Environment,
    Objective,
    PrepareConfig,
    Unrendered,
)
from finetune_trainer.contract.uris import without_secrets
from finetune_trainer.data.reading.columns import FieldColumns
from finetune_trainer.data.reading.formats import format_of, known_count, read_records
from finetune_trainer.data.reading.source_file import BUFFER_BYTES, SourceFile
from finetune_trainer.data.records.records import Fields, InvalidRecord
from finetune_trainer.runtime.errors import ConfigInvalid, DataInvalid
from finetune_trainer.runtime.progress.activity import activity
from finetune_trainer.stores.data_files import DataFile, fetch_dataset


@dataclass(frozen=True)
class OpenDataset:
    """The files of a data set, and the settings that say how its records are used."""

    field: str
    """The field of the manifest that names it, for messages: datasets[0], or validation."""
    source: DataSource
    files: tuple[DataFile, ...]
    """There is at least 1 file."""
    weight: float
    validation_fraction: float
    """Fraction of the records for validation; 1 for a data set that only validates."""
    pin: str | None = None
    """Identifies its content at its store; None on this machine."""

    @property
    def name(self) -> str:
        """The data set's name in messages: the name of its only file, or its URI."""
        if len(self.files) == 1:
            return self.files[0].name
        return without_secrets(str(self.source.uri))


class NumberedRecord(NamedTuple):
    """A record and its place in the data."""

    dataset: int
    """Position of its data set, counted from 0."""
    number: int
    """Position in its data set, counted from 0 over all files."""
    file: str
    """Name of its file."""
    line: int
    """Line at which it begins (in Parquet: its row), counted from 1."""
    fields: Fields | InvalidRecord


class _Wanted(NamedTuple):
    """A data set of the manifest that is not fetched yet."""

    field: str
    source: DatasetSource
    validation_fraction: float


def fetch_datasets(
    config: PrepareConfig, environment: Environment
) -> list[OpenDataset]:
    """Return the data sets of the manifest in its order, and then the validation set. Raise like `fetch_dataset`.

    A file is named by its last path segment, or by as many segments as it takes to tell all files apart.
    """
    all_wanted = _wanted(config)
    all_fetched = [fetch_dataset(wanted.source, environment) for wanted in all_wanted]
    names = _distinct_names(
        {file.name for fetched in all_fetched for file in fetched.files}
    )
    return [
        OpenDataset(
            field=wanted.field,
            source=wanted.source,
            files=tuple(
                DataFile(file.path, names[file.name]) for file in fetched.files
            ),
            weight=wanted.source.weight,
            validation_fraction=wanted.validation_fraction,
            pin=fetched.pin,
        )
        for wanted, fetched in zip(all_wanted, all_fetched, strict=True)
    ]


def _wanted(config: PrepareConfig) -> list[_Wanted]:
    held_out = config.validation.fraction or 0.0
    wanted = [
        _Wanted(f"datasets[{index}]", source, held_out)
        for index, source in enumerate(config.datasets)
    ]
    validation_set = config.validation.dataset()
    if validation_set:
        # Last, as in the pins of the result.
        wanted.append(_Wanted("validation", validation_set, 1.0))
    return wanted


def _distinct_names(names: set[str]) -> dict[str, str]:
    # The shortest names, because messages about records have them.
    segments = 1
    while True:
        short = {name: "/".join(name.split("/")[-segments:]) for name in names}
        if len(set(short.values())) == len(names):
            return short
        segments += 1


def _columns_of(
    dataset: OpenDataset, objective: Objective, unrendered: Unrendered
) -> FieldColumns:
    """Return the columns with a data set's fields; raise ConfigInvalid if it names columns that are not read."""
    try:
        return FieldColumns(dataset.source.columns, objective, unrendered)
    except ValueError as error:
        raise ConfigInvalid(f"{dataset.field}.columns {error}") from None


def _ignore(_line: str) -> None:
    """Do nothing with a line of a log."""


class RecordReader:
    """Reads the records of all data sets, and computes a digest of the bytes that it reads.

    `log` receives a line for each form that a data set turns out to have, and for the columns that are not read.
    """

    def __init__(
        self,
        datasets: Sequence[OpenDataset],
        objective: Objective = "SFT",
        unrendered: Unrendered = "Refuse",
        log: Callable[[str], None] = _ignore,
    ) -> None:
        self._datasets = datasets
        self._log = log
        self._columns = [
            _columns_of(dataset, objective, unrendered) for dataset in datasets
        ]
        self._files = [
            (dataset, file) for dataset in datasets for file in dataset.files
        ]
        self._formats = [
            format_of(file.path, dataset.source.format) for dataset, file in self._files
        ]
        self._opened: list[SourceFile] = []

    @property
    def name(self) -> str:
        """The subject of messages: the name of the only file, or the number of files."""
        if len(self._files) == 1:
            [(_, file)] = self._files
            return file.name
        return f"the data ({len(self._files)} files)"

    def read(self) -> Iterator[NumberedRecord]:
        """Yield all records, from the first; at the end, every file has been read to its last byte.

        Raise DataInvalid like `read_records`, and if a data set has no records.
        """
        self._opened = []
        for columns in self._columns:
            columns.restart()
        formats = iter(self._formats)
        for index, dataset in enumerate(self._datasets):
            number = 0
            columns = self._columns[index]
            for file in dataset.files:
                source = SourceFile(file.path, file.name)
                self._opened.append(source)
                for line, fields in read_records(source, next(formats), columns):
                    if columns.notes:
                        self._log_notes(dataset, columns)
                    activity.report()
                    yield NumberedRecord(index, number, source.name, line, fields)
                    number += 1
            self._log_final_notes(dataset, columns)
            if not number:
                raise DataInvalid(
                    f"{dataset.name} has no records; add records or correct {dataset.field}.uri"
                )

    def log_final_notes(self) -> None:
        """Log the notes about columns that were not read, for a caller that does not read all records."""
        for dataset, columns in zip(self._datasets, self._columns, strict=True):
            self._log_final_notes(dataset, columns)

    def _log_final_notes(self, dataset: OpenDataset, columns: FieldColumns) -> None:
        columns.add_final_notes()
        self._log_notes(dataset, columns)

    def _log_notes(self, dataset: OpenDataset, columns: FieldColumns) -> None:
        for note in columns.notes:
            self._log(f"prepare: {dataset.name}: {note}")
        columns.notes.clear()

    @property
    def unread_words(self) -> int:
        """The number of records so far with a single word in a column that nothing reads."""
        return sum(columns.records_with_words for columns in self._columns)

    @property
    def bytes_read(self) -> int:
        """The number of bytes read from the disk so far."""
        return sum(source.bytes_read for source in self._opened)

    def digest(self) -> str:
        """Return the SHA-256 of the bytes read so far, in hexadecimal.

        For several files, this is the SHA-256 of their digests, each in a line, in the order in which they are read.
        """
        digests = [source.digest() for source in self._opened]
        if len(self._files) == 1 and digests:
            return digests[0]
        lines = "".join(f"{digest}\n" for digest in digests)
        return hashlib.sha256(lines.encode()).hexdigest()

    def known_count(self) -> int | None:
        """Return the number of records, or None if it takes reading the files to know."""
        total = 0
        for (_, file), form in zip(self._files, self._formats, strict=True):
            count = known_count(SourceFile(file.path, file.name), form)
            if count is None:
                return None
            total += count
        return total

    def estimated_total(self, records: int) -> int | None:
        """Return an estimate of the number of records, or None if it cannot be estimated yet.

        The estimate extrapolates from the bytes that the records so far took.
        """
        size = sum(file.path.stat().st_size for _, file in self._files)
        read = self.bytes_read
        # Bytes are read a buffer at a time, so the bytes of the first buffer say nothing about the records so far.
        if BUFFER_BYTES <= read < size:
            return round(records * size / read)
        return None
