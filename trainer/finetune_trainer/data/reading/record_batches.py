"""Join records into batches, and decide for each record whether it is used, how often, and in which split."""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from finetune_trainer.data.documents import Split
from finetune_trainer.data.reading.datasets import NumberedRecord, OpenDataset
from finetune_trainer.data.reading.unread import PartlyRead
from finetune_trainer.data.records.records import Fields, InvalidRecord

BATCH_RECORDS = 1000
BATCH_CHARACTERS = 256 * 1024
"""A batch ends with the record that reaches BATCH_RECORDS or BATCH_CHARACTERS, and with its data set."""


def split_of(seed: int, record: int, validation_fraction: float) -> Split:
    """Return the split of a record, which depends only on the seed and the record's number in its data set.

    So a record stays in its split when other records are appended, and no state is needed.
    """
    if _is_drawn(f"{seed}:{record}", validation_fraction):
        return "validation"
    return "train"


def uses_of(seed: int, record: int, weight: float) -> int:
    """Return how often a record is used: the weight, rounded up for a random part of the records, else rounded down.

    This part depends only on the seed and the record's number in its data set. A larger weight never uses a record
    less often.
    """
    whole = math.floor(weight)
    fraction = weight - whole
    # The suffix makes the draw independent of the draw of the split.
    if fraction and _is_drawn(f"{seed}:{record}:weight", fraction):
        return whole + 1
    return whole


def _is_drawn(text: str, fraction: float) -> bool:
    """Return whether a text is among the fraction of all texts whose digests are the lowest."""
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8]) < fraction * 2**64


class Position(NamedTuple):
    """The position up to which the data sets have been read."""

    source_bytes: int
    source_digest: str


class UsedRecord(NamedTuple):
    """A record of a batch without its fields."""

    file: str
    line: int
    split: Split
    uses: int
    is_partly_read: bool = False
    """Whether a column of the record has a text that nothing reads, which the manifest allows."""


@dataclass
class RecordBatch:
    """Consecutive records of one data set."""

    dataset: int
    count: int = 0
    """Number of all its records, also of records that are not used."""
    records: list[UsedRecord] = field(default_factory=list)
    fields: list[Fields | InvalidRecord] = field(default_factory=list)
    """The fields of `records`, in the same order."""
    characters: int = 0
    position: Position | None = None
    """The position after this batch. None at the end of a data set: the reader had to read further to see the end."""

    @property
    def is_full(self) -> bool:
        """Return whether the batch has reached one of its limits."""
        return len(self.records) == BATCH_RECORDS or self.characters >= BATCH_CHARACTERS


def batches_of(
    records: Iterator[NumberedRecord],
    datasets: Sequence[OpenDataset],
    seed: int,
    names: frozenset[str],
    position: Callable[[], Position],
) -> Iterator[RecordBatch]:
    """Yield all records in batches; `names` are the fields that count for the size of a batch."""
    batch: RecordBatch | None = None
    for record in records:
        if batch is not None and batch.dataset != record.dataset:
            yield batch
            batch = None
        batch = batch or RecordBatch(record.dataset)
        _add(batch, record, datasets[record.dataset], seed, names)
        if batch.is_full:
            batch.position = position()
            yield batch
            batch = None
    if batch is not None:
        yield batch


def _add(
    batch: RecordBatch,
    record: NumberedRecord,
    dataset: OpenDataset,
    seed: int,
    names: frozenset[str],
) -> None:
    batch.count += 1
    uses = uses_of(seed, record.number, dataset.weight)
    if not uses:
        return
    split = split_of(seed, record.number, dataset.validation_fraction)
    if split == "validation":
        # Weights are for training: validation records are never repeated.
        uses = 1
    is_partly_read = isinstance(record.fields, PartlyRead)
    batch.records.append(
        UsedRecord(record.file, record.line, split, uses, is_partly_read)
    )
    batch.fields.append(record.fields)
    batch.characters += _characters(record.fields, names)


def _characters(record: Fields | InvalidRecord, names: frozenset[str]) -> int:
    """Return the length of all texts in a record's fields of these names."""
    if isinstance(record, InvalidRecord):
        return 0
    total = 0
    values = [value for name, value in record.items() if name in names]
    # A list in place of recursion: a record may be nested as deeply as its parser allows.
    while values:
        value: Any = values.pop()
        if isinstance(value, str):
            total += len(value)
        elif isinstance(value, dict):
            values.extend(value.values())
        elif isinstance(value, list):
            values.extend(value)
    return total
