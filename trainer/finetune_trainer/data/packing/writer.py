"""Packing of documents into rows, as `prepare` writes them to disk."""

import hashlib
import json
import os
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from finetune_trainer.data.documents import SPLITS, Document, Split
from finetune_trainer.data.packing.row_format import (
    FIRST,
    INDEX,
    PADDING,
    empty_record,
    file_name,
    flags_of,
    seal_record,
    tokens_of,
)
from finetune_trainer.files import sync_folder

MAX_OPEN_BINS = 64
"""Rows that are filled at the same time. More rows pack better and hold more tokens in memory."""


@dataclass(frozen=True)
class SplitPart:
    """The content of a part in one split."""

    rows: int = 0
    tokens: int = 0
    """Tokens without padding."""
    targets: int = 0
    """Tokens that are targets of the loss."""
    largest_token: int = 0
    sha256: str = ""
    """Digest of the file; empty if there are no rows and no file."""


WrittenPart = Mapping[Split, SplitPart]


@dataclass
class _Bin:
    """A row that is being filled with documents."""

    free: int
    documents: list[Document] = field(default_factory=list)


def _free_space(row: _Bin) -> int:
    return row.free


class PackedWriter:
    """Online packing of documents into rows; the same documents in the same order give the same bytes.

    Each document goes undivided into the open bin that it fills best (best fit, Johnson 1973). If it fits no
    bin and MAX_OPEN_BINS are open, the fullest bin is written. Without `packing`, every document has a row of its own.
    The two documents of `pairs` are added one after the other, and their rows are in this order.

    `parts` are the parts that an earlier process wrote to the folder.
    """

    def __init__(
        self,
        folder: Path,
        context_length: int,
        pad_token_id: int,
        *,
        packing: bool = True,
        pairs: bool = False,
        parts: Iterable[WrittenPart] = (),
    ) -> None:
        # Train finds the other completion of a pair by the row's number, so pairs are never packed.
        packing = packing and not pairs
        self.parts: list[WrittenPart] = list(parts)
        """The complete parts."""
        self.pairs = pairs
        self._folder = folder
        self._index: dict[str, object] = {
            "contextLength": context_length,
            "padTokenId": pad_token_id,
            "packing": packing,
        }
        if pairs:
            self._index["pairs"] = True
        self._row = _RowBuilder(context_length, pad_token_id, packing=packing)
        self._splits = self._new_part()

    def _new_part(self) -> "dict[Split, _SplitWriter]":
        number = len(self.parts)
        return {
            split: _SplitWriter(self._folder, split, number, self._row)
            for split in SPLITS
        }

    def add(self, split: Split, document: Document) -> None:
        """Add a document of at most contextLength tokens to a row."""
        self._splits[split].add(document)

    def end_part(self) -> WrittenPart:
        """Write all open bins, flush the part's files to disk, and begin the next part."""
        part = {name: split.close() for name, split in self._splits.items()}
        self.parts.append(part)
        # The caller records the part as complete after this, so its files must be on disk by their names, too.
        sync_folder(self._folder)
        self._splits = self._new_part()
        return part

    @property
    def part_tokens(self) -> int:
        """Tokens in the part that is being written."""
        return sum(split.tokens for split in self._splits.values())

    @property
    def largest_token(self) -> int:
        """The largest token of all documents so far."""
        complete = [
            split.largest_token for part in self.parts for split in part.values()
        ]
        written = [split.largest_token for split in self._splits.values()]
        return max(*complete, *written)

    def rows(self, split: Split) -> int:
        """Return the number of rows in all complete parts."""
        return sum(part[split].rows for part in self.parts)

    def tokens(self, split: Split) -> int:
        """Return the number of tokens in all complete parts, without padding."""
        return sum(part[split].tokens for part in self.parts)

    def targets(self, split: Split) -> int:
        """Return the number of tokens in all complete parts that are targets of the loss."""
        return sum(part[split].targets for part in self.parts)

    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of every file of the complete parts by its name."""
        return {
            file_name(split, number): part[split].sha256
            for number, part in enumerate(self.parts)
            for split in SPLITS
            if part[split].rows
        }

    def write_index(self) -> None:
        """Write rows.json, after the last part."""
        index = dict(self._index)
        for split in SPLITS:
            largest_tokens = [part[split].largest_token for part in self.parts]
            index[split] = {
                "rows": [part[split].rows for part in self.parts],
                "tokens": self.tokens(split),
                "targets": self.targets(split),
                "largestToken": max(largest_tokens, default=0),
            }
        (self._folder / INDEX).write_text(json.dumps(index, indent=1))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        _error: object,
        _trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            for split in self._splits.values():
                split.abandon()
            return
        if self.part_tokens:
            self.end_part()
        self.write_index()


class _RowBuilder:
    """Builds the bytes of rows."""

    def __init__(
        self, context_length: int, pad_token_id: int, *, packing: bool
    ) -> None:
        self.context_length = context_length
        self.packing = packing
        self._pad_token_id = pad_token_id

    def build(self, documents: list[Document]) -> NDArray[np.uint8]:
        """Return a record without its checksum."""
        record = empty_record(self.context_length)
        tokens = tokens_of(record)
        flags = flags_of(record)
        start = 0
        for document in documents:
            end = start + len(document.tokens)
            tokens[start:end] = document.tokens
            flags[start:end] = document.loss_mask
            flags[start] |= FIRST
            start = end
        tokens[start:] = self._pad_token_id
        flags[start:] = PADDING
        if self.packing:
            # A slice, because a full row has no padding.
            flags[start : start + 1] |= FIRST
        return record


class _SplitWriter:
    """Packs the documents of one split and part into the rows of a file."""

    def __init__(self, folder: Path, split: Split, part: int, row: _RowBuilder) -> None:
        self.rows = 0
        self.tokens = 0
        self.largest_token = 0
        self._targets = 0
        self._path = folder / file_name(split, part)
        self._split: Split = split
        self._part = part
        self._row = row
        # Sorted by free space, the fullest first. Equally full bins stay in the order of their last document.
        self._open_bins: list[_Bin] = []
        # Opened by the first row: a split without rows has no file.
        self._file: BinaryIO | None = None
        self._sha256 = hashlib.sha256()

    def add(self, document: Document) -> None:
        length = len(document.tokens)
        self.tokens += length
        self._targets += int(np.count_nonzero(document.loss_mask[1:]))
        self.largest_token = max(self.largest_token, int(document.tokens.max()))
        if not self._row.packing:
            self._write([document])
            return
        row = self._take_bin(length)
        row.documents.append(document)
        row.free -= length
        if row.free:
            insort(self._open_bins, row, key=_free_space)
        else:
            self._write(row.documents)

    def _take_bin(self, length: int) -> _Bin:
        """Remove and return the open bin with the least free space that is enough; open a bin if there is none."""
        best = bisect_left(self._open_bins, length, key=_free_space)
        if best < len(self._open_bins):
            return self._open_bins.pop(best)
        if len(self._open_bins) == MAX_OPEN_BINS:
            self._write(self._open_bins.pop(0).documents)
        return _Bin(free=self._row.context_length)

    def _write(self, documents: list[Document]) -> None:
        record = self._row.build(documents)
        seal_record(record, self._split, self._part, self.rows)
        if self._file is None:
            self._file = self._path.open("wb")
        self._file.write(record.data)
        self._sha256.update(record.data)
        self.rows += 1

    def close(self) -> SplitPart:
        """Write the open bins, flush the file to disk, and return its content in numbers."""
        while self._open_bins:
            self._write(self._open_bins.pop(0).documents)
        if self._file is None:
            return SplitPart()
        # The state of the part names these rows, so they must survive a crash before it is written.
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return SplitPart(
            self.rows,
            self.tokens,
            self._targets,
            self.largest_token,
            self._sha256.hexdigest(),
        )

    def abandon(self) -> None:
        """Close the file without completing it."""
        if self._file is not None:
            self._file.close()
