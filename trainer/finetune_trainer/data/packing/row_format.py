"""The files and the bytes of packed rows: `prepare` writes them, `train` reads single rows.

A folder holds a file for each split and part, `train-00000.rows`, with the rows of that part one after another. A part
has the rows of consecutive records. A split without rows in a part has no file for it. `rows.json` holds all that train
must know before it reads a row: numbers of rows, tokens and targets, and the largest token.

A row of L tokens is a record of 5 L + 8 bytes:

    tokens      L little-endian int32
    flags       L uint8, the sum of the flags TARGET, FIRST and PADDING that apply
    checksum    8 bytes of BLAKE2b over tokens and flags

The checksum is personalized with the row's split, part and number. So it detects a changed byte, a torn row, and a row
in another row's place, when the row is read. Reading a row therefore needs no other row to be read first.

For pairs, row 2 i of a split holds the chosen completion of pair i with its prompt. Row 2 i + 1 holds the rejected
completion.

The rest of a row after its last document is padding. In packed rows, padding is a document with positions from 0. In a
row of one document, the positions of the padding continue the document's, so that they never restart.
"""

import hashlib
import struct

import numpy as np
from numpy.typing import NDArray

from finetune_trainer.data.documents import SPLITS, Flags, Split, Tokens

INDEX = "rows.json"
ROW_FILES = "*.rows"
"""Pattern of the files whose content is verified row by row, when it is read."""

# Bits, so that one byte holds all flags of a token.
TARGET = 1
"""Flag: the token is a target of the loss."""
FIRST = 2
"""Flag: the token is the first token of a document."""
PADDING = 4
"""Flag: the token is padding."""

TOKEN_BYTES = 4
FLAG_BYTES = 1
CHECKSUM_BYTES = 8

Bytes = NDArray[np.uint8]


def file_name(split: Split, part: int) -> str:
    """Return the name of the file with a split's rows of a part."""
    return f"{split}-{part:05}.rows"


def record_size(context_length: int) -> int:
    """Return the number of bytes of a row."""
    return context_length * (TOKEN_BYTES + FLAG_BYTES) + CHECKSUM_BYTES


def empty_record(context_length: int) -> Bytes:
    """Return a record whose bytes are all 0."""
    return np.zeros(record_size(context_length), dtype=np.uint8)


def tokens_of(records: Bytes) -> Tokens:
    """Return a view on the tokens of records of shape [..., record size]."""
    # Little-endian on every machine: another machine may read the volume.
    return records[..., : TOKEN_BYTES * _context_length(records)].view("<i4")


def flags_of(records: Bytes) -> Flags:
    """Return a view on the flags of records of shape [..., record size]."""
    return records[..., TOKEN_BYTES * _context_length(records) : -CHECKSUM_BYTES]


def _context_length(records: Bytes) -> int:
    size: int = records.shape[-1]
    return (size - CHECKSUM_BYTES) // (TOKEN_BYTES + FLAG_BYTES)


def seal_record(record: Bytes, split: Split, part: int, row: int) -> None:
    """Write the checksum at the end of a record of shape [record size]."""
    checksum = _checksum(record, split, part, row)
    record[-CHECKSUM_BYTES:] = np.frombuffer(checksum, dtype=np.uint8)


def is_intact(record: Bytes, split: Split, part: int, row: int) -> bool:
    """Return whether a record of shape [record size] has its checksum and is in its place."""
    stored = record[-CHECKSUM_BYTES:].tobytes()
    return stored == _checksum(record, split, part, row)


def _checksum(record: Bytes, split: Split, part: int, row: int) -> bytes:
    # 16 bytes, the length of a person of BLAKE2b: split, three zeros, part, row.
    place = struct.pack("<BxxxIQ", SPLITS.index(split), part, row)
    content = record[:-CHECKSUM_BYTES].data
    return hashlib.blake2b(content, digest_size=CHECKSUM_BYTES, person=place).digest()


def positions_of(flags: Flags) -> NDArray[np.int64]:
    """Return the position of every token in its document; flags and result have shape [B, L].

    Positions restart at every first token, and nowhere else.
    """
    index = np.arange(flags.shape[-1], dtype=np.int64)
    starts = np.where(flags & FIRST, index, 0)
    # The index of the latest first token, at every token.
    latest_start = np.maximum.accumulate(starts, axis=-1)
    return index - latest_start
