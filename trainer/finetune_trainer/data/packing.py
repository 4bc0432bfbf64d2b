"""Packed rows on the disk: what `prepare` writes and `train` reads by index, without ever holding them in memory.

A folder holds, for each split s of `train` and `validation`, three files of shape [rows, context length]
in C order and nothing else: `s.tokens.bin` (little-endian int32), `s.positions.bin` (little-endian int32,
0 at the first token of every document) and `s.counted.bin` (uint8, 1 where the token is a target of the
loss). Behind a row's last document stands padding, a document of its own of which nothing is counted.
`rows.json` says how many rows and tokens there are.
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
"""Rows among which a document may choose; more fill rows better and hold more tokens in memory."""

Tokens = NDArray[np.int32]
Flags = NDArray[np.uint8]


class Document(NamedTuple):
    """One record as tokens; both arrays are of shape [length]."""

    tokens: Tokens
    loss_mask: Flags
    """1 where the token is a target of the loss; never the first one, which nothing predicts."""


class PackedRows:
    """The rows of one split, read only and mapped into memory, so that any row costs one page fault."""

    def __init__(self, folder: Path, split: Split) -> None:
        index = json.loads((folder / INDEX).read_bytes())
        self.context_length: int = index["contextLength"]
        self.pad_token_id: int = index["padTokenId"]
        self.token_count: int = index[split]["tokens"]
        shape = (index[split]["rows"], self.context_length)
        self.tokens: Tokens = _mapped(folder / f"{split}.tokens.bin", "<i4", shape)
        self.positions: Tokens = _mapped(folder / f"{split}.positions.bin", "<i4", shape)
        self.loss_mask: Flags = _mapped(folder / f"{split}.counted.bin", "u1", shape)

    def __len__(self) -> int:
        return len(self.tokens)


def _mapped(path: Path, dtype: str, shape: tuple[int, int]) -> NDArray[Any]:
    # An empty file cannot be mapped.
    return np.memmap(path, dtype, "r", shape=shape) if shape[0] else np.empty(shape, dtype)


@dataclass
class _Bin:
    """A row that is being filled."""

    free: int
    documents: list[Document] = field(default_factory=list)


class PackedWriter:
    """Packs documents into rows as they come; the same documents in the same order give the same bytes.

    Each document goes, whole, into that one of the open rows where it leaves least room (best fit,
    Johnson 1973). Where it fits nowhere and no more rows may be open, the fullest is written out.
    """

    def __init__(self, folder: Path, context_length: int, pad_token_id: int) -> None:
        self._index: dict[str, object] = {"contextLength": context_length, "padTokenId": pad_token_id}
        self._path = folder / INDEX
        self._splits = {split: _SplitWriter(folder, split, context_length, pad_token_id) for split in SPLITS}

    def add(self, split: Split, document: Document) -> None:
        """Put a document of at most contextLength tokens into a row."""
        self._splits[split].add(document)

    def rows(self, split: Split) -> int:
        """Give the number of rows written; complete when the writer is closed."""
        return self._splits[split].rows

    def tokens(self, split: Split) -> int:
        """Give the number of tokens added, without padding."""
        return self._splits[split].tokens

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        for split in self._splits.values():
            split.close(write_open_rows=kind is None)
        if kind is None:
            counts = {name: {"rows": split.rows, "tokens": split.tokens} for name, split in self._splits.items()}
            self._path.write_text(json.dumps(self._index | counts, indent=1))


class _SplitWriter:
    def __init__(self, folder: Path, split: Split, context_length: int, pad_token_id: int) -> None:
        self.rows = self.tokens = 0
        self._pad_token_id = pad_token_id
        self._counting = np.arange(context_length, dtype="<i4")
        self._open: list[_Bin] = []  # by free room, the fullest first; among equals the oldest
        self._files: list[BinaryIO] = [
            (folder / f"{split}.{name}.bin").open("wb") for name in ("tokens", "positions", "counted")
        ]

    def add(self, document: Document) -> None:
        length = len(document.tokens)
        row = self._row_for(length)
        row.documents.append(document)
        row.free -= length
        self.tokens += length
        if row.free:
            insort(self._open, row, key=lambda row: row.free)
        else:
            self._write(row)

    def _row_for(self, length: int) -> _Bin:
        """Take the row out of the open ones in which the document leaves least room."""
        best = bisect_left(self._open, length, key=lambda row: row.free)
        if best < len(self._open):
            return self._open.pop(best)
        if len(self._open) == MAX_OPEN_BINS:
            self._write(self._open.pop(0))
        return _Bin(free=len(self._counting))

    def _write(self, row: _Bin) -> None:
        tokens = np.full(len(self._counting), self._pad_token_id, dtype="<i4")
        positions = np.empty_like(tokens)
        counted = np.zeros(len(tokens), dtype="u1")
        start = 0
        for document in row.documents:
            end = start + len(document.tokens)
            tokens[start:end] = document.tokens
            positions[start:end] = self._counting[: end - start]
            counted[start:end] = document.loss_mask
            start = end
        positions[start:] = self._counting[: len(tokens) - start]
        for file, column in zip(self._files, (tokens, positions, counted), strict=True):
            file.write(column.tobytes())
        self.rows += 1

    def close(self, *, write_open_rows: bool) -> None:
        while write_open_rows and self._open:
            self._write(self._open.pop(0))
        for file in self._files:
            file.close()
