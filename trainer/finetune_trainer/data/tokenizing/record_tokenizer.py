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
    Encoder,
    RecordFormatter,
    TextExample,
)
from finetune_trainer.data.tokenizing.preferences import PreferenceFormatter

Formatter = RecordFormatter | PreferenceFormatter
FORMATTERS: dict[Objective, type[Formatter]] = {
    "SFT": RecordFormatter,
    "DPO": PreferenceFormatter,
}
"""The formatter of records for each objective."""
Documents = tuple[Document, ...]
"""The documents of a record: a single document, or the chosen and the rejected document of a pair."""
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
    boundary_tokens: int = 0
    """Records in which a token spans text with loss and text without loss."""


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
        self._encoder = Encoder(tokenizer)

    def tokenize(
        self, records: Sequence[Fields | InvalidRecord], shape: Shape | None
    ) -> TokenizedBatch:
        """Return the outcomes of records of one data set; `shape` is the shape of its earlier records, if known."""
        formatter = self._formatter(self._chat, shape)
        formatted = [_formatted(formatter, record) for record in records]
        batch = TokenizedBatch(formatter.shape)
        boundary_tokens_before = self._encoder.boundary_tokens
        # All texts in one call: the tokenizer's library spreads them over the processors.
        texts = [
            text for result in formatted if isinstance(result, tuple) for text in result
        ]
        documents = iter(self._encoder.encode(texts) if texts else ())
        for result in formatted:
            if isinstance(result, str):
                batch.outcomes.append(result)
                continue
            of_record = tuple(next(documents) for _ in result)
            batch.outcomes.append(self._fitting(of_record, batch))
        batch.boundary_tokens = self._encoder.boundary_tokens - boundary_tokens_before
        return batch

    def _fitting(self, documents: Documents, batch: TokenizedBatch) -> RecordOutcome:
        """Return the documents, truncated to the context length if necessary, or None if they are dropped."""
        if not all(document.loss_mask.any() for document in documents):
            return "has no token to train on"
        if _are_equal(documents):
            return "chosen and rejected are the same tokens: there is nothing to prefer"
        length = self._recipe.context_length
        if all(len(document.tokens) <= length for document in documents):
            return documents
        if self._recipe.too_long == "Drop":
            return None
        truncated = tuple(
            Document(document.tokens[:length], document.loss_mask[:length])
            for document in documents
        )
        # Without a token to train on, a truncated document would only take up space in a row.
        has_targets = all(document.loss_mask.any() for document in truncated)
        if not has_targets or _are_equal(truncated):
            return None
        batch.truncated += 1
        return truncated


def _are_equal(documents: Documents) -> bool:
    """Return whether the two documents of a pair have the same tokens."""
    return len(documents) > 1 and np.array_equal(
        documents[0].tokens, documents[1].tokens
    )


def _formatted(
    formatter: Formatter, record: Fields | InvalidRecord
) -> tuple[TextExample, ...] | str:
    """Return the texts of a record, or the reason why it is invalid."""
    if isinstance(record, InvalidRecord):
        return str(record)
    try:
        return formatter.format(record)
    except InvalidRecord as error:
        return str(error)
