"""Messages between the process that reads records and those that tokenize them.

A message is its length in 8 bytes, and Python's own format for plain values. Unlike JSON, this format keeps every type
that a reader of JSON or CSV yields, and unlike a pickle, it cannot name code. Both processes run the same Python.
"""

import marshal
from collections.abc import Sequence
from dataclasses import asdict
from typing import IO, Any, cast

import numpy as np

from finetune_trainer.contract import PrepareRecipe
from finetune_trainer.data.packing import Document
from finetune_trainer.data.record_tokenizer import TokenizedBatch, TokenizerSettings
from finetune_trainer.data.records import FIELDS, Fields, InvalidRecord, Shape

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


def settings_message(settings: TokenizerSettings, recipe: PrepareRecipe) -> bytes:
    """Return the first message to a process that tokenizes."""
    return marshal.dumps((asdict(settings), recipe.model_dump_json(by_alias=True)), _VERSION)


def read_settings(message: bytes) -> tuple[TokenizerSettings, PrepareRecipe]:
    """Return the content of the first message."""
    settings, recipe = _loads(message)
    return TokenizerSettings(**settings), PrepareRecipe.model_validate_json(recipe)


def records_message(records: Sequence[Fields | InvalidRecord], shape: Shape | None) -> bytes | None:
    """Return a message with a batch, or None if it has a value of another type, as Parquet may have, such as a date."""
    try:
        return marshal.dumps((shape, [_sent(record) for record in records]), _VERSION)
    except ValueError:
        return None


def read_records(message: bytes) -> tuple[list[Fields | InvalidRecord], Shape | None]:
    """Return the batch of a message."""
    shape, records = _loads(message)
    return [InvalidRecord(record) if isinstance(record, str) else record for record in records], shape


def batch_message(batch: TokenizedBatch) -> bytes:
    """Return a message with a tokenized batch: the tokens of all documents are one block of bytes."""
    documents = [outcome for outcome in batch.outcomes if isinstance(outcome, Document)]
    outcomes = [len(one.tokens) if isinstance(one, Document) else one for one in batch.outcomes]
    tokens = b"".join(document.tokens.tobytes() for document in documents)
    loss_masks = b"".join(document.loss_mask.tobytes() for document in documents)
    content = (batch.shape, outcomes, batch.truncated, batch.boundary_tokens, tokens, loss_masks)
    return marshal.dumps(content, _VERSION)


def read_batch(message: bytes) -> TokenizedBatch:
    """Return the tokenized batch of a message."""
    shape, outcomes, truncated, boundary_tokens, tokens, loss_masks = _loads(message)
    all_tokens, all_masks = np.frombuffer(tokens, dtype=np.int32), np.frombuffer(loss_masks, dtype=np.uint8)
    batch, start = TokenizedBatch(shape, [], truncated, boundary_tokens), 0
    for outcome in outcomes:
        if not isinstance(outcome, int):
            batch.outcomes.append(outcome)
            continue
        end = start + outcome
        # Copies: a document that waits in a row for others must not keep its whole batch in memory.
        batch.outcomes.append(Document(all_tokens[start:end].copy(), all_masks[start:end].copy()))
        start = end
    return batch


def _sent(record: Fields | InvalidRecord) -> Fields | str:
    """Return what formatting needs of a record: of other fields, whether they are null."""
    if isinstance(record, InvalidRecord):
        return str(record)
    return {name: value if name in FIELDS or value is None else True for name, value in record.items()}


def _loads(message: bytes) -> Any:
    return cast("Any", marshal.loads(message))  # noqa: S302  from our own process, through a pipe of ours
