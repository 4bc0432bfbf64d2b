"""Format and tokenize a batch of records. Batches are independent, so several processes may share the work."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from finetune_trainer.contract import Objective, PrepareRecipe
from finetune_trainer.data.documents import Document
from finetune_trainer.data.records.chat_template import ChatTemplate, template_of
from finetune_trainer.data.records.records import Fields, InvalidRecord, Shape
from finetune_trainer.data.tokenizing.encoder import (
    EncodedExample,
    Encoder,
    FormattedRecord,
    RecordFormatter,
)
from finetune_trainer.data.tokenizing.preferences import PreferenceFormatter
from finetune_trainer.data.tokenizing.special_text import SpecialText

Formatter = RecordFormatter | PreferenceFormatter
FORMATTERS: dict[Objective, type[Formatter]] = {
    "SFT": RecordFormatter,
    "DPO": PreferenceFormatter,
}
"""The formatter of records for each objective."""
Documents = tuple[Document, ...]
"""The documents of a record: the chosen and the rejected document of a pair, or all documents of another record."""
RecordOutcome = Documents | str | None
"""A record as tokens, or the reason why it is invalid, or None if it is dropped as too long."""


@dataclass
class TokenizedBatch:
    """The outcome of every record of a batch."""

    shape: Shape | None
    """The shape of the valid records so far."""
    outcomes: list[RecordOutcome] = field(default_factory=list)
    """In the order of the records."""
    truncated: int = 0
    split: int = 0
    """Records split into several documents because they were too long."""
    unrendered: int = 0
    """Records with a text that is not in their documents."""
    by_turn: int = 0
    """Conversations of which turns have examples of their own."""
    boundary_tokens: int = 0
    """Examples in which a token spans text with loss and text without loss."""
    ends_unlearned: int = 0
    """Conversations whose last turns are out of the loss."""
    glued: int = 0
    """Records in which nothing separates the prompt from its completion."""
    unrendered_texts: list[tuple[int, str]] = field(default_factory=list)
    """The position of a record in the batch, and a sentence about a text that is not in its documents."""
    unknown_tokens: list[tuple[int, int]] = field(default_factory=list)
    """The position of a record in the batch, and the number of its tokens that stand for unknown text."""
    special_texts: list[tuple[int, str]] = field(default_factory=list)
    """The position of a record in the batch, and the first special token whose text its own texts hold."""


@dataclass(frozen=True)
class TokenizerSettings:
    """Everything that formatting and tokenizing needs of a tokenizer, in values that can be sent to another process."""

    backend: str
    """JSON of the fast tokenizer."""
    chat_template: dict[str, str]
    """The template for all conversations by `default`, and perhaps a template for tools by `tool_use`."""
    special_tokens_map: dict[str, str]
    split_special_tokens: bool
    bos_token_id: int | None
    eos_token_id: int | None

    @classmethod
    def of(cls, tokenizer: Any) -> "TokenizerSettings":
        """Return the settings of a tokenizer of transformers."""
        templates = {"default": template_of(tokenizer)}
        variants = tokenizer.chat_template
        if isinstance(variants, dict) and "tool_use" in variants:
            templates["tool_use"] = variants["tool_use"]
        return cls(
            backend=tokenizer.backend_tokenizer.to_str(),
            chat_template=templates,
            special_tokens_map=dict(tokenizer.special_tokens_map),
            split_special_tokens=tokenizer.split_special_tokens,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )


class LoadedTokenizer:
    """A tokenizer made from its settings, with the attributes of a tokenizer of transformers that are used here."""

    def __init__(self, settings: TokenizerSettings) -> None:
        self.backend_tokenizer = Tokenizer.from_str(settings.backend)
        self.chat_template = settings.chat_template
        self.special_tokens_map = settings.special_tokens_map
        self.split_special_tokens = settings.split_special_tokens
        self.bos_token_id = settings.bos_token_id
        self.eos_token_id = settings.eos_token_id

    def get_chat_template(self) -> str:
        """Return the template for conversations without tools."""
        return self.chat_template["default"]


class RecordTokenizer:
    """Formats records, tokenizes them, and truncates or drops records that are too long."""

    def __init__(
        self, tokenizer: Any, recipe: PrepareRecipe, objective: Objective = "SFT"
    ) -> None:
        self._chat = ChatTemplate(tokenizer)
        self._recipe = recipe
        self._formatter = FORMATTERS[objective]
        self._pairs = objective == "DPO"
        self._encoder = Encoder(tokenizer)
        self._special_text = SpecialText(tokenizer)

    def tokenize(
        self, records: Sequence[Fields | InvalidRecord], shape: Shape | None
    ) -> TokenizedBatch:
        """Return the outcomes of records of one data set; `shape` is the shape of its earlier records, if known."""
        formatter = self._formatter(self._chat, shape)
        formatted = [self._formatted(formatter, record) for record in records]
        batch = TokenizedBatch(formatter.shape)
        boundary_tokens_before = self._encoder.boundary_tokens
        # All texts in one call: the tokenizer's library spreads them over the processors.
        texts = [
            text
            for record in formatted
            if isinstance(record, FormattedRecord)
            for text in record.examples
        ]
        encoded = iter(self._encoder.encode(texts) if texts else ())
        for index, record in enumerate(formatted):
            if isinstance(record, str):
                batch.outcomes.append(record)
                continue
            of_record = [next(encoded) for _ in record.examples]
            outcome = self._outcome(index, record, of_record, batch)
            batch.outcomes.append(outcome)
            if isinstance(outcome, tuple):
                special = self._special_text.first(records[index])
                if special:
                    batch.special_texts.append((index, special))
        batch.boundary_tokens = self._encoder.boundary_tokens - boundary_tokens_before
        return batch

    def _formatted(
        self, formatter: Formatter, record: Fields | InvalidRecord
    ) -> FormattedRecord | str:
        """Return the texts of a record, or the reason why it is invalid."""
        if isinstance(record, InvalidRecord):
            return str(record)
        try:
            formatted = formatter.format(record)
        except InvalidRecord as error:
            return str(error)
        if formatted.unrendered and self._recipe.unrendered == "Refuse":
            return formatted.unrendered[0]
        return formatted

    def _outcome(
        self,
        index: int,
        record: FormattedRecord,
        examples: list[EncodedExample],
        batch: TokenizedBatch,
    ) -> RecordOutcome:
        """Return the outcome of a record, and count it if it is used."""
        unknown = tuple(example.unknown for example in examples if example.unknown)
        reason = self._refusal(examples, unknown)
        if reason:
            return reason
        outcome = self._fitting(tuple(example.document for example in examples), batch)
        if isinstance(outcome, tuple):
            self._count(index, record, unknown, batch)
            if unknown:
                self._count_tokens(index, outcome, batch)
        return outcome

    def _refusal(self, examples: list[EncodedExample], unknown: tuple[str, ...]) -> str:
        """Return the reason why the tokens of a record cannot be used; empty if they can."""
        for example in examples:
            if example.failure:
                return example.failure
        if unknown and self._recipe.unrendered == "Refuse":
            return unknown[0]
        return ""

    def _count(
        self,
        index: int,
        record: FormattedRecord,
        unknown: tuple[str, ...],
        batch: TokenizedBatch,
    ) -> None:
        batch.by_turn += not self._pairs and len(record.examples) > 1
        batch.ends_unlearned += record.ends_unlearned
        batch.glued += record.glued
        sentences = record.unrendered + unknown
        if sentences:
            batch.unrendered += 1
            batch.unrendered_texts.extend((index, text) for text in sentences)

    def _count_tokens(
        self, index: int, documents: Documents, batch: TokenizedBatch
    ) -> None:
        """Count the tokens of a record that stand for unknown text."""
        token = self._encoder.unknown_token
        number = sum(
            np.count_nonzero(document.tokens == token) for document in documents
        )
        if token is not None and number:
            batch.unknown_tokens.append((index, int(number)))

    def _fitting(self, documents: Documents, batch: TokenizedBatch) -> RecordOutcome:
        """Return the documents that fit, None if they are dropped, or the reason why the record is invalid."""
        usable = self._usable(documents)
        if not usable:
            return "has no token to train on"
        if self._pairs and _are_equal(usable):
            return "chosen and rejected are the same tokens: there is nothing to prefer"
        longest = max(len(document.tokens) for document in usable)
        if longest <= self._recipe.context_length:
            return usable
        return self._shortened(usable, longest, batch)

    def _shortened(
        self, documents: Documents, longest: int, batch: TokenizedBatch
    ) -> RecordOutcome:
        length = self._recipe.context_length
        match self._recipe.too_long:
            case "Drop":
                return None
            case "Split" | None if batch.shape == "text":
                batch.split += 1
                [document] = documents
                return _pieces(document, length)
            case "Split":
                return (
                    f"has {longest} tokens, more than prepare.contextLength ({length}), and only plain text can be "
                    "split: set prepare.tooLong to Truncate or Drop"
                )
            case _:
                return self._truncated(documents, batch)

    def _truncated(self, documents: Documents, batch: TokenizedBatch) -> RecordOutcome:
        length = self._recipe.context_length
        truncated = tuple(
            Document(document.tokens[:length], document.loss_mask[:length])
            for document in documents
        )
        # Without a token to train on, a truncated document would only take up space in a row.
        usable = self._usable(truncated)
        if not usable or (self._pairs and _are_equal(usable)):
            return None
        batch.truncated += 1
        return usable

    def _usable(self, documents: Documents) -> Documents:
        """Return the documents that have a token to train on; of a pair, both documents or none."""
        with_targets = tuple(
            document for document in documents if document.loss_mask.any()
        )
        if self._pairs and len(with_targets) < len(documents):
            return ()
        return with_targets


def _pieces(document: Document, length: int) -> Documents:
    """Return consecutive pieces of a long document.

    A piece begins with the last token of the piece before it, without loss: this token predicts the next token, so that
    each token of the document is a target once.
    """
    tokens, loss_mask = document
    pieces = []
    for start in range(0, len(tokens) - 1, length - 1):
        piece_mask = loss_mask[start : start + length].copy()
        piece_mask[0] = 0
        pieces.append(Document(tokens[start : start + length], piece_mask))
    return tuple(pieces)


def _are_equal(documents: Documents) -> bool:
    """Return whether the two documents of a pair have the same tokens."""
    return np.array_equal(documents[0].tokens, documents[1].tokens)
