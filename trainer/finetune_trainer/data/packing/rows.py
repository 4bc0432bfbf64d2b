"""Packed rows on disk as `train` reads them: single rows, in any order."""

import json
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from finetune_trainer.contract import Environment
from finetune_trainer.data.documents import Flags, Split, Tokens
from finetune_trainer.data.packing.row_format import (
    INDEX,
    PADDING,
    ROW_FILES,
    TARGET,
    file_name,
    flags_of,
    is_intact,
    positions_of,
    record_size,
    tokens_of,
)
from finetune_trainer.runtime.artifacts import CorruptArtifact, verify
from finetune_trainer.runtime.errors import DataInvalid, SourceNotFound

MAX_OPEN_FILES = 64
"""Files that a reader keeps open."""


def corrupt_rows(folder: Path, error: CorruptArtifact) -> DataInvalid:
    """Return the error for rows that differ from the rows that were written."""
    return DataInvalid(
        f"the packed rows are corrupt: {error}: delete {folder} and run prepare again"
    )


def open_prepared(environment: Environment, prepare: str) -> Path:
    """Return the folder of the rows that prepare with this identity wrote, the sizes of its files verified.

    No row is read here. Every row is verified when it is read. Raise SourceNotFound or DataInvalid.
    """
    folder = environment.stage_dir("prepare", prepare) / "output"
    if not folder.is_dir():
        raise SourceNotFound(
            f"{folder} does not exist, so there are no packed rows: run the stage prepare first"
        )
    try:
        verify(folder, sizes_only=ROW_FILES)
    except CorruptArtifact as error:
        raise corrupt_rows(folder, error) from error
    return folder


class RowBatch(NamedTuple):
    """Rows as they are on disk."""

    tokens: Tokens
    """[B, L] int32."""
    flags: Flags
    """[B, L] uint8, of `data.row_format`."""

    @property
    def loss_mask(self) -> Flags:
        """[B, L], 1 if the token is a target of the loss."""
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
        """Return the first `length` tokens of each row."""
        return RowBatch(self.tokens[:, :length], self.flags[:, :length])

    def flattened(self) -> "RowBatch":
        """Return a single row: the documents of all rows, in order, without padding."""
        is_token = ~self.is_padding
        tokens = self.tokens[is_token]
        flags = self.flags[is_token]
        return RowBatch(tokens.reshape(1, -1), flags.reshape(1, -1))


class PackedRows:
    """The rows of one split; opening them reads only the index."""

    def __init__(self, folder: Path, split: Split) -> None:
        index = json.loads((folder / INDEX).read_bytes())
        self._folder = folder
        self.context_length: int = index["contextLength"]
        self.pad_token_id: int = index["padTokenId"]
        self.packed: bool = index["packing"]
        """Whether a row may hold several documents."""
        # The writer leaves this out of the index unless the rows are pairs.
        self.pairs: bool = index.get("pairs", False)
        """Whether two rows at a time are a pair of a chosen and a rejected completion."""
        self.split: Split = split
        self.token_count: int = index[split]["tokens"]
        """Tokens without padding."""
        self.target_count: int = index[split]["targets"]
        """Tokens that are targets of the loss."""
        self.largest_token: int = index[split]["largestToken"]
        rows_by_part: list[int] = index[split]["rows"]
        self._ends = list(accumulate(rows_by_part))
        """For every part the number of rows in it and before it."""
        self._files = _RowFiles(folder, split)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, indices: Iterable[int] | NDArray[np.int64]) -> RowBatch:
        """Read the rows with these indices; raise DataInvalid if a row is damaged."""
        wanted = [int(index) for index in indices]
        records = np.empty(
            (len(wanted), record_size(self.context_length)), dtype=np.uint8
        )
        try:
            for record, index in zip(records, wanted, strict=True):
                # Copied into one array: the bytes of a row that was read cannot be changed.
                record[:] = self._record(index)
        except CorruptArtifact as error:
            raise corrupt_rows(self._folder, error) from error
        return RowBatch(tokens_of(records), flags_of(records))

    def _record(self, index: int) -> NDArray[np.uint8]:
        part, row = self._place(index)
        size = record_size(self.context_length)
        descriptor = self._files.descriptor(part)
        # Not memory-mapped: if a file is cut meanwhile, this gives an error, and a mapping gives SIGBUS.
        data = os.pread(descriptor, size, row * size)
        name = f"{self._folder.name}/{file_name(self.split, part)}"
        if len(data) < size:
            raise CorruptArtifact(
                f"{name} has {len(data)} of the {size} bytes of row {row}"
            )
        record = np.frombuffer(data, dtype=np.uint8)
        if not is_intact(record, self.split, part, row):
            raise CorruptArtifact(f"{name}: row {row} does not match its checksum")
        return record

    def _place(self, index: int) -> tuple[int, int]:
        """Return the part of a row, and the row's number in this part."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        part = bisect_right(self._ends, index)
        if part == 0:
            return part, index
        rows_before = self._ends[part - 1]
        return part, index - rows_before


class _RowFiles:
    """Descriptors of the files of a split, the MAX_OPEN_FILES that were used last."""

    def __init__(self, folder: Path, split: Split) -> None:
        self._folder = folder
        self._split = split
        self._open: OrderedDict[int, int] = OrderedDict()

    def descriptor(self, part: int) -> int:
        """Return an open descriptor of a part's file."""
        descriptor = self._open.get(part)
        if descriptor is not None:
            self._open.move_to_end(part)
            return descriptor
        if len(self._open) == MAX_OPEN_FILES:
            _, least_recent = self._open.popitem(last=False)
            os.close(least_recent)
        path = self._folder / file_name(self._split, part)
        descriptor = os.open(path, os.O_RDONLY)
        self._open[part] = descriptor
        return descriptor

    def __del__(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
