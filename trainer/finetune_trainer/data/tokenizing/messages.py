"""Messages between the process that reads records and the processes that tokenize them.

A message is its length in 8 bytes, followed by values in the format of Python's `marshal`. Unlike JSON, this format
keeps every type that a reader of JSON or CSV yields. Unlike a pickle, it cannot name code. Both processes run the same
Python, so the format may differ between versions of Python.
"""

import marshal
from collections.abc import Sequence
from dataclasses import asdict
from itertools import accumulate, pairwise
from typing import IO, Any, cast

import numpy as np

from finetune_trainer.contract import Objective, PrepareRecipe
from finetune_trainer.data.documents import Document
from finetune_trainer.data.records.records import (
    Fields,
    InvalidRecord,
    Shape,
    fields_of,
)
from finetune_trainer.data.tokenizing.record_tokenizer import (
    TokenizedBatch,
    TokenizerSettings,
)

_VERSION = 2
"""Version of marshal's format. Later versions spend time to find values that occur twice."""
_LENGTH_BYTES = 8


def send(file: IO[bytes], message: bytes) -> None:
    """Write a message."""
    file.write(len(message).to_bytes(_LENGTH_BYTES))
    file.write(message)
    file.flush()


def receive(file: IO[bytes]) -> bytes | None:
    """Read a message; return None if the other process has ended."""
    length = file.read(_LENGTH_BYTES)
    if len(length) < _LENGTH_BYTES:
        return None
    size = int.from_bytes(length)
    message = file.read(size)
    return message if len(message) == size else None


def settings_message(
    settings: TokenizerSettings, recipe: PrepareRecipe, objective: Objective = "SFT"
) -> bytes:
    """Return the first message to a process that tokenizes."""
    content = (asdict(settings), recipe.model_dump_json(by_alias=True), objective)
    return marshal.dumps(content, _VERSION)


def read_settings(message: bytes) -> tuple[TokenizerSettings, PrepareRecipe, Objective]:
    """Return the content of the first message."""
    settings, recipe, objective = _loads(message)
    return (
        TokenizerSettings(**settings),
        PrepareRecipe.model_validate_json(recipe),
        objective,
    )


def records_message(
    records: Sequence[Fields | InvalidRecord], shape: Shape
) -> bytes | None:
    """Return a message with a batch, or None if a value has a type that marshal lacks, such as a date of Parquet."""
    names = fields_of(shape)
    try:
        return marshal.dumps(
            (shape, [_sent(record, names) for record in records]), _VERSION
        )
    except ValueError:
        return None


def read_records(message: bytes) -> tuple[list[Fields | InvalidRecord], Shape | None]:
    """Return the batch of a message."""
    shape, values = _loads(message)
    # A text is the reason why a record is invalid: fields are always a dict.
    records = [
        InvalidRecord(value) if isinstance(value, str) else value for value in values
    ]
    return records, shape


def batch_message(batch: TokenizedBatch) -> bytes:
    """Return a message with a tokenized batch: the tokens of all documents are one block of bytes."""
    # Lists of lengths stand for documents, so that marshal handles few values.
    outcomes: list[list[int] | str | None] = []
    documents: list[Document] = []
    for outcome in batch.outcomes:
        if isinstance(outcome, tuple):
            documents.extend(outcome)
            outcomes.append([len(document.tokens) for document in outcome])
        else:
            outcomes.append(outcome)
    tokens = b"".join(document.tokens.tobytes() for document in documents)
    loss_masks = b"".join(document.loss_mask.tobytes() for document in documents)
    content = (
        batch.shape,
        outcomes,
        batch.truncated,
        batch.split,
        batch.unrendered,
        batch.by_turn,
        batch.boundary_tokens,
        batch.ends_unlearned,
        batch.glued,
        batch.unrendered_texts,
        batch.unknown_tokens,
        batch.special_texts,
        tokens,
        loss_masks,
    )
    return marshal.dumps(content, _VERSION)


def read_batch(message: bytes) -> TokenizedBatch:
    """Return the tokenized batch of a message."""
    (
        shape,
        outcomes,
        truncated,
        split,
        unrendered,
        by_turn,
        boundary_tokens,
        ends_unlearned,
        glued,
        unrendered_texts,
        unknown_tokens,
        special_texts,
        tokens,
        loss_masks,
    ) = _loads(message)
    all_tokens = np.frombuffer(tokens, dtype=np.int32)
    all_masks = np.frombuffer(loss_masks, dtype=np.uint8)
    batch = TokenizedBatch(
        shape,
        [],
        truncated,
        split,
        unrendered,
        by_turn,
        boundary_tokens,
        ends_unlearned,
        glued,
        unrendered_texts,
        unknown_tokens,
        special_texts,
    )
    batch_start = 0
    for outcome in outcomes:
        if not isinstance(outcome, list):
            batch.outcomes.append(outcome)
            continue
        bounds = list(accumulate(outcome, initial=batch_start))
        # Copies: a document that waits in a row for others must not keep its whole batch in memory.
        documents = [
            Document(all_tokens[start:end].copy(), all_masks[start:end].copy())
            for start, end in pairwise(bounds)
        ]
        batch.outcomes.append(tuple(documents))
        batch_start = bounds[-1]
    return batch


def _sent(record: Fields | InvalidRecord, names: frozenset[str]) -> Fields | str:
    """Return the fields that formatting reads; of other fields it only sees whether they are null."""
    if isinstance(record, InvalidRecord):
        return str(record)
    # An error names all fields of a record, and null fields do not count.
    return {
        name: value if name in names or value is None else True
        for name, value in record.items()
    }


def _loads(message: bytes) -> Any:
    return cast("Any", marshal.loads(message))  # noqa: S302  from our own process, through a pipe of ours
