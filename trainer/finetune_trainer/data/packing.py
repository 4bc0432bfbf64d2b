"""Packed rows on disk: `prepare` packs documents into rows and writes them; `train` reads single rows.

A folder holds a file for each split and part, `train-00000.rows`, with the rows of that part one after another;
`data.row_format` describes a row's bytes. A part has the rows of consecutive records. A split without rows in a part
has no file for it. `rows.json` holds all that train must know before it reads a row: numbers of rows, tokens and
targets, and the largest token.

For pairs, row 2 i of a split holds the chosen completion of pair i with its prompt, and row 2 i + 1 the rejected one.

The rest of a row after its last document is padding. In packed rows padding is a document of its own, with positions
from 0. In a row of one document its positions continue those of the document, so that they never restart.
"""

import hashlib
import json
import os
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from finetune_trainer.data.row_format import (
    FIRST,
    PADDING,
    SPLITS,
    TARGET,
    Flags,
    Split,
    Tokens,
    empty_record,
    flags_of,
    is_intact,
    positions_of,
    record_size,
    seal_record,
    tokens_of,
)
from finetune_trainer.files import sync_folder
from finetune_trainer.runtime.artifacts import CorruptArtifact
from finetune_trainer.runtime.errors import DataInvalid

INDEX = "rows.json"
ROW_FILES = "*.rows"
"""Pattern of the files whose content is verified row by row, when it is read."""
MAX_OPEN_BINS = 64
"""Rows that are filled at the same time. More of them pack better and hold more tokens in memory."""
MAX_OPEN_FILES = 64
"""Files that a reader keeps open."""


class Document(NamedTuple):
    """One record as tokens; both arrays are of shape [length]."""

    tokens: Tokens
    loss_mask: Flags
    """1 where the token is a target of the loss. Never the first token: no earlier token predicts it."""


@dataclass(frozen=True)
class SplitPart:
    """What one part holds of one split."""

    rows: int = 0
    tokens: int = 0
    """Tokens without padding."""
    targets: int = 0
    """Tokens that are targets of the loss."""
    largest_token: int = 0
    sha256: str = ""
    """Digest of the file; empty if there are no rows and no file."""


Part = Mapping[Split, SplitPart]


def file_name(split: Split, part: int) -> str:
    """Return the name of the file with a split's rows of one part."""
    return f"{split}-{part:05}.rows"


def corrupt_rows(folder: Path, error: CorruptArtifact) -> DataInvalid:
    """Return the error for rows that are not as they were written."""
    return DataInvalid(
        f"the packed rows are corrupt: {error}: delete {folder} and run prepare again"
    )


class RowBatch(NamedTuple):
    """Rows as they are on disk."""

    tokens: Tokens
    """[B, L] int32."""
    flags: Flags
    """[B, L] uint8, of `data.row_format`."""

    @property
    def loss_mask(self) -> Flags:
        """[B, L], 1 where the token is a target of the loss."""
        return self.flags & np.uint8(TARGET)

    @property
    def positions(self) -> NDArray[np.int64]:
        """[B, L], 0 at the first token of every document."""
        return positions_of(self.flags)

    @property
    def is_padding(self) -> NDArray[np.bool_]:
        """[B, L], whether the token comes after the row's last document."""
        is_padding: NDArray[np.bool_] = self.flags & PADDING != 0
        return is_padding

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[B], the numbers of tokens without padding."""
        lengths: NDArray[np.int64] = np.sum(~self.is_padding, axis=1, dtype=np.int64)
        return lengths

    def cut(self, length: int) -> "RowBatch":
        """Return the first tokens of each row."""
        return RowBatch(self.tokens[:, :length], self.flags[:, :length])

    def flattened(self) -> "RowBatch":
        """Return one row: the documents of all rows, one after the other, without padding."""
        is_token = ~self.is_padding
        return RowBatch(self.tokens[is_token].reshape(1, -1), self.flags[is_token].reshape(1, -1))


class PackedRows:
    """The rows of one split, read one by one. To open them reads only the index."""

    def __init__(self, folder: Path, split: Split) -> None:
        index = json.loads((folder / INDEX).read_bytes())
        self._folder, self._split = folder, split
        self.context_length: int = index["contextLength"]
        self.pad_token_id: int = index["padTokenId"]
        self.packed: bool = index["packing"]
        """Whether a row may hold several documents."""
        self.pairs: bool = index.get("pairs", False)
        """Whether two rows at a time are a pair of a chosen and a rejected completion."""
        self.split: Split = split
        self.token_count: int = index[split]["tokens"]
        """Tokens without padding."""
        self.target_count: int = index[split]["targets"]
        """Tokens that are targets of the loss."""
        self.largest_token: int = index[split]["largestToken"]
        self._ends = list(accumulate(index[split]["rows"]))
        """For every part the number of rows in it and before it."""
        self._files = _RowFiles(folder, split)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, indices: Iterable[int] | NDArray[np.int64]) -> RowBatch:
        """Read the rows with these indices; raise DataInvalid if one of them is not as it was written."""
        wanted = [int(index) for index in indices]
        records = np.empty((len(wanted), record_size(self.context_length)), dtype=np.uint8)
        try:
            for record, index in zip(records, wanted, strict=True):
                record[:] = self._record(index)
        except CorruptArtifact as error:
            raise corrupt_rows(self._folder, error) from error
        return RowBatch(tokens_of(records), flags_of(records))

    def _record(self, index: int) -> NDArray[np.uint8]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        part = bisect_right(self._ends, index)
        row = index - (self._ends[part - 1] if part else 0)
        size = record_size(self.context_length)
        # Not memory-mapped: a file that was cut meanwhile then gives an error, not SIGBUS.
        data = os.pread(self._files.descriptor(part), size, row * size)
        name = f"{self._folder.name}/{file_name(self._split, part)}"
        if len(data) < size:
            raise CorruptArtifact(f"{name} has {len(data)} of the {size} bytes of row {row}")
        record = np.frombuffer(data, dtype=np.uint8)
        if not is_intact(record, self._split, part, row):
            raise CorruptArtifact(f"{name}: row {row} does not match its checksum")
        return record


class _RowFiles:
    """Descriptors of the files of a split, the MAX_OPEN_FILES that were used last."""

    def __init__(self, folder: Path, split: Split) -> None:
        self._folder, self._split = folder, split
        self._open: OrderedDict[int, int] = OrderedDict()

    def descriptor(self, part: int) -> int:
        """Return an open descriptor of a part's file."""
        if part not in self._open:
            if len(self._open) == MAX_OPEN_FILES:
                os.close(self._open.popitem(last=False)[1])
            self._open[part] = os.open(self._folder / file_name(self._split, part), os.O_RDONLY)
        self._open.move_to_end(part)
        return self._open[part]

    def __del__(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)


@dataclass
class _Bin:
    """A row that is being filled with documents."""

    free: int
    documents: list[Document] = field(default_factory=list)


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
        parts: Iterable[Part] = (),
    ) -> None:
        packing = packing and not pairs
        self.parts: list[Part] = list(parts)
        """The complete parts."""
        self.pairs = pairs
        self._folder = folder
        self._index: dict[str, object] = {
            "contextLength": context_length,
            "padTokenId": pad_token_id,
            "packing": packing,
            **({"pairs": True} if pairs else {}),
        }
        self._row = _RowBuilder(context_length, pad_token_id, packing=packing)
        self._splits = self._new_part()

    def _new_part(self) -> "dict[Split, _SplitWriter]":
        return {
            split: _SplitWriter(self._folder, split, len(self.parts), self._row) for split in SPLITS
        }

    def add(self, split: Split, document: Document) -> None:
        """Add a document of at most contextLength tokens to a row."""
        self._splits[split].add(document)

    def end_part(self) -> Part:
        """Write all open bins, flush the part's files to disk, and begin the next part."""
        self.parts.append({name: split.close() for name, split in self._splits.items()})
        sync_folder(self._folder)
        self._splits = self._new_part()
        return self.parts[-1]

    @property
    def part_tokens(self) -> int:
        """Tokens in the part that is being written."""
        return sum(split.tokens for split in self._splits.values())

    def rows(self, split: Split) -> int:
        """Return the number of rows in all complete parts."""
        return sum(part[split].rows for part in self.parts)

    def tokens(self, split: Split) -> int:
        """Return the number of tokens in all complete parts, without padding."""
        return sum(part[split].tokens for part in self.parts)

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
        splits = {
            split: {
                "rows": [part[split].rows for part in self.parts],
                "tokens": self.tokens(split),
                "targets": sum(part[split].targets for part in self.parts),
                "largestToken": max((part[split].largest_token for part in self.parts), default=0),
            }
            for split in SPLITS
        }
        (self._folder / INDEX).write_text(json.dumps(self._index | splits, indent=1))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: object, _trace: TracebackType | None
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

    def __init__(self, context_length: int, pad_token_id: int, *, packing: bool) -> None:
        self.context_length, self.packing = context_length, packing
        self._pad_token_id = pad_token_id

    def build(self, documents: list[Document]) -> NDArray[np.uint8]:
        """Return a record without its checksum."""
        record = empty_record(self.context_length)
        tokens, flags = tokens_of(record), flags_of(record)
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
            flags[start : start + 1] |= FIRST
        return record


class _SplitWriter:
    """Packs the documents of one split and part into the rows of one file."""

    def __init__(self, folder: Path, split: Split, part: int, row: _RowBuilder) -> None:
        self.rows = self.tokens = self._targets = self._largest_token = 0
        self._path, self._split, self._part = folder / file_name(split, part), split, part
        self._row = row
        self._open_bins: list[
            _Bin
        ] = []  # sorted by free space: the fullest first, the oldest first among equals
        self._file: BinaryIO | None = None
        self._sha256 = hashlib.sha256()

    def add(self, document: Document) -> None:
        length = len(document.tokens)
        self.tokens += length
        self._targets += int(np.count_nonzero(document.loss_mask[1:]))
        self._largest_token = max(self._largest_token, int(document.tokens.max()))
        if not self._row.packing:
            self._write([document])
            return
        row = self._take_bin(length)
        row.documents.append(document)
        row.free -= length
        if row.free:
            insort(self._open_bins, row, key=lambda row: row.free)
        else:
            self._write(row.documents)

    def _take_bin(self, length: int) -> _Bin:
        """Remove and return the open bin with the least free space that is enough; open one if there is none."""
        best = bisect_left(self._open_bins, length, key=lambda row: row.free)
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
        """Write the open bins, flush the file to disk, and return what is in it."""
        while self._open_bins:
            self._write(self._open_bins.pop(0).documents)
        if self._file is None:
            return SplitPart()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return SplitPart(
            self.rows, self.tokens, self._targets, self._largest_token, self._sha256.hexdigest()
        )

    def abandon(self) -> None:
        """Close the file without completing it."""
        if self._file is not None:
            self._file.close()
