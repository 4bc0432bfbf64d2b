"""Documents: records as tokens. Counts: what became of the records."""

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from finetune_trainer.data.reasons import InvalidReason
from finetune_trainer.data.records.records import Shape

Split = Literal["train", "validation"]
# The order is part of the format on disk: a row's checksum holds the index of its split.
SPLITS: tuple[Split, ...] = ("train", "validation")

Tokens = NDArray[np.int32]
Flags = NDArray[np.uint8]


class Document(NamedTuple):
    """A record as tokens; both arrays are of shape [length]."""

    tokens: Tokens
    loss_mask: Flags
    """1 if the token is a target of the loss. Never the first token: no earlier token predicts it."""


class SpecialTexts(BaseModel):
    """Records whose own texts hold the text of a special token, such as </s>."""

    records: int = 0
    first: str = ""
    """FILE:LINE of the first such record."""
    tokens: list[str] = Field(default=[])
    """The first such tokens, each once."""


class Counts(BaseModel):
    """Counts of the records read so far."""

    # A part's state with a field of another version is not resumed: its counts may mean something else.
    model_config = ConfigDict(extra="forbid")

    records: int = 0
    invalid: int = 0
    truncated: int = 0
    dropped: int = 0
    split: int = 0
    """Records split into several documents because they were too long."""
    unrendered: int = 0
    """Records with a text that is not in the rows."""
    by_turn: int = 0
    """Conversations of which turns have examples of their own."""
    unused: int = 0
    """Records left out by the weight of their data set."""
    boundary_tokens: int = 0
    """Examples in which a token spans prompt and completion."""
    ends_unlearned: int = 0
    """Conversations whose last turns are out of the loss."""
    glued: int = 0
    """Records in which nothing separates the prompt from its completion."""
    unknown_tokens: int = 0
    """Tokens of the rows that stand for text that the tokenizer does not have."""
    special: SpecialTexts = SpecialTexts()
    dataset: int = 0
    """Position of the data set of the last record that was used."""
    shape: Shape | None = None
    """The shape of all valid records of this data set."""
    conversations: bool = False
    """Whether any records are conversations."""
    reasons: list[InvalidReason] = Field(default=[])
    """The first reasons why records are invalid, each once."""
    unrendered_places: list[str] = Field(default=[])
    """The kinds of places that were reported because the rows do not hold their text."""
