"""Messages between the process that reads records and those that tokenize them.

A message is its length in 8 bytes, and Python's own format for plain values. Unlike JSON, this format keeps every type
that a reader of JSON or CSV yields, and unlike a pickle, it cannot name code. Both processes run the same Python.
"""

import marshal
from collections.abc import Sequence
from dataclasses import asdict
from itertools import accumulate, pairwise
from typing import IO, Any, cast

import numpy as np

from finetune_trainer.contract import Objective, PrepareRecipe
from finetune_trainer.data.documents import Document
from finetune_trainer.data.record_tokenizer import TokenizedBatch, TokenizerSettings
from finetune_trainer.data.records import Fields, InvalidRecord, Shape, fields_of

_VERSION = 2
"""Of the format. Later ones spend time to find values that occur twice."""
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
    message = file.read(int.from_bytes(length))
    return message if len(message) == int.from_bytes(length) else None


def settings_message(
    settings: TokenizerSettings, recipe: PrepareRecipe, objective: Objective = "SFT"
) -> bytes:
    """Return the first message to a process that tokenizes."""
    return marshal.dumps(
        (asdict(settings), recipe.model_dump_json(by_alias=True), objective), _VERSION
    )


def read_settings(message: bytes) -> tuple[TokenizerSettings, PrepareRecipe, Objective]:
    """Return the content of the first message."""
    settings, recipe, objective = _loads(message)
    return TokenizerSettings(**settings), PrepareRecipe.model_validate_json(recipe), objective


def records_message(records: Sequence[Fields | InvalidRecord], shape: Shape) -> bytes | None:
    """Return a message with a batch, or None if it has a value of another type, as Parquet may have, such as a date."""
    names = fields_of(shape)
    try:
        return marshal.dumps((shape, [_sent(record, names) for record in records]), _VERSION)
    except ValueError:
        return None


def read_records(message: bytes) -> tuple[list[Fields | InvalidRecord], Shape | None]:
    """Return the batch of a message."""
    shape, records = _loads(message)
    return [
        InvalidRecord(record) if isinstance(record, str) else record for record in records
    ], shape


def batch_message(batch: TokenizedBatch) -> bytes:
    """Return a message with a tokenized batch: the tokens of all documents are one block of bytes."""
    documents = [
        document for outcome in batch.outcomes if isinstance(outcome, tuple) for document in outcome
    ]
    outcomes = [
        [len(each.tokens) for each in one] if isinstance(one, tuple) else one
        for one in batch.outcomes
    ]
    tokens = b"".join(document.tokens.tobytes() for document in documents)
    loss_masks = b"".join(document.loss_mask.tobytes() for document in documents)
    content = (batch.shape, outcomes, batch.truncated, batch.boundary_tokens, tokens, loss_masks)
    return marshal.dumps(content, _VERSION)


def read_batch(message: bytes) -> TokenizedBatch:
    """Return the tokenized batch of a message."""
    shape, outcomes, truncated, boundary_tokens, tokens, loss_masks = _loads(message)
    all_tokens, all_masks = (
        np.frombuffer(tokens, dtype=np.int32),
        np.frombuffer(loss_masks, dtype=np.uint8),
    )
    batch, start = TokenizedBatch(shape, [], truncated, boundary_tokens), 0
    for outcome in outcomes:
        if not isinstance(outcome, list):
            batch.outcomes.append(outcome)
            continue
        ends = list(accumulate(outcome, initial=start))
        # Copies: a document that waits in a row for others must not keep its whole batch in memory.
        batch.outcomes.append(
            tuple(
                Document(all_tokens[one:end].copy(), all_masks[one:end].copy())
                for one, end in pairwise(ends)
            )
        )
        start = ends[-1]
    return batch


def _sent(record: Fields | InvalidRecord, names: frozenset[str]) -> Fields | str:
    """Return what formatting needs of a record: of other fields, whether they are null."""
    if isinstance(record, InvalidRecord):
        return str(record)
    return {
        name: value if name in names or value is None else True for name, value in record.items()
    }


def _loads(message: bytes) -> Any:
    return cast("Any", marshal.loads(message))  # noqa: S302  from our own process, through a pipe of ours
