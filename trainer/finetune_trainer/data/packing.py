"""Packed rows on disk: `prepare` writes them and `train` reads them by index, memory-mapped.

A folder holds three files for each split `s`, `train` or `validation`. Each is an array of shape
[rows, context length] in C order, without a header:

    s.tokens.bin      little-endian int32
    s.positions.bin   little-endian int32, 0 at the first token of every document
    s.counted.bin     uint8, the loss mask: 1 where the token is a target of the loss

The rest of a row after its last document is padding. Padding is a document of its own with a loss mask of 0.
`rows.json` holds the numbers of rows and tokens.
"""

import json
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")

INDEX = "rows.json"
MAX_OPEN_BINS = 64
"""Rows that are filled at the same time. More of them pack better and hold more tokens in memory."""

Tokens = NDArray[np.int32]
Flags = NDArray[np.uint8]


class Document(NamedTuple):
    """One record as tokens; both arrays are of shape [length]."""

    tokens: Tokens
    loss_mask: Flags
    """1 where the token is a target of the loss. Never the first token: no earlier token predicts it."""


class PackedRows:
    """The rows of one split, read-only and memory-mapped: only the rows that are read are loaded."""

    def __init__(self, folder: Path, split: Split) -> None:
        index = json.loads((folder / INDEX).read_bytes())
        self.context_length: int = index["contextLength"]
        self.pad_token_id: int = index["padTokenId"]
        self.token_count: int = index[split]["tokens"]
        shape = (index[split]["rows"], self.context_length)
        self.tokens: Tokens = _memory_map(folder / f"{split}.tokens.bin", "<i4", shape)
        self.positions: Tokens = _memory_map(folder / f"{split}.positions.bin", "<i4", shape)
        self.loss_mask: Flags = _memory_map(folder / f"{split}.counted.bin", "u1", shape)

    def __len__(self) -> int:
        return len(self.tokens)


def _memory_map(path: Path, dtype: str, shape: tuple[int, int]) -> NDArray[Any]:
    # mmap fails for an empty file.
    return np.memmap(path, dtype, "r", shape=shape) if shape[0] else np.empty(shape, dtype)


@dataclass
class _Bin:
    """A row that is being filled with documents."""

    free: int
    documents: list[Document] = field(default_factory=list)


class PackedWriter:
    """Online packing of documents into rows; the same documents in the same order give the same bytes.

    Each document goes undivided into the open bin that it fills best (best fit, Johnson 1973). If it fits no
    bin and MAX_OPEN_BINS are open, the fullest bin is written.
    """

    def __init__(self, folder: Path, context_length: int, pad_token_id: int) -> None:
        self._index: dict[str, object] = {"contextLength": context_length, "padTokenId": pad_token_id}
        self._path = folder / INDEX
        self._splits = {split: _SplitWriter(folder, split, context_length, pad_token_id) for split in SPLITS}

    def add(self, split: Split, document: Document) -> None:
        """Add a document of at most contextLength tokens to a row."""
        self._splits[split].add(document)

    def rows(self, split: Split) -> int:
        """Return the number of rows written so far; it is final when the writer is closed."""
        return self._splits[split].rows

    def tokens(self, split: Split) -> int:
        """Return the number of tokens added, without padding."""
        return self._splits[split].tokens

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        for split in self._splits.values():
            split.close(write_open_bins=kind is None)
        if kind is None:
            counts = {name: {"rows": split.rows, "tokens": split.tokens} for name, split in self._splits.items()}
            self._path.write_text(json.dumps(self._index | counts, indent=1))


class _SplitWriter:
    """Packs one split into its three files."""

    def __init__(self, folder: Path, split: Split, context_length: int, pad_token_id: int) -> None:
        self.rows = self.tokens = 0
        self._pad_token_id = pad_token_id
        self._position_ids = np.arange(context_length, dtype="<i4")
        self._open_bins: list[_Bin] = []  # sorted by free space: the fullest first, the oldest first among equals
        self._files: list[BinaryIO] = [
            (folder / f"{split}.{name}.bin").open("wb") for name in ("tokens", "positions", "counted")
        ]

    def add(self, document: Document) -> None:
        length = len(document.tokens)
        row = self._take_bin(length)
        row.documents.append(document)
        row.free -= length
        self.tokens += length
        if row.free:
            insort(self._open_bins, row, key=lambda row: row.free)
        else:
            self._write(row)

    def _take_bin(self, length: int) -> _Bin:
        """Remove and return the open bin with the least free space that is enough; open one if there is none."""
        best = bisect_left(self._open_bins, length, key=lambda row: row.free)
        if best < len(self._open_bins):
            return self._open_bins.pop(best)
        if len(self._open_bins) == MAX_OPEN_BINS:
            self._write(self._open_bins.pop(0))
        return _Bin(free=len(self._position_ids))

    def _write(self, row: _Bin) -> None:
        tokens = np.full(len(self._position_ids), self._pad_token_id, dtype="<i4")
        positions = np.empty_like(tokens)
        loss_mask = np.zeros(len(tokens), dtype="u1")
        start = 0
        for document in row.documents:
            end = start + len(document.tokens)
            tokens[start:end] = document.tokens
            positions[start:end] = self._position_ids[: end - start]
            loss_mask[start:end] = document.loss_mask
            start = end
        positions[start:] = self._position_ids[: len(tokens) - start]
        for file, column in zip(self._files, (tokens, positions, loss_mask), strict=True):
            file.write(column.tobytes())
        self.rows += 1

    def close(self, *, write_open_bins: bool) -> None:
        while write_open_bins and self._open_bins:
            self._write(self._open_bins.pop(0))
        for file in self._files:
            file.close()
