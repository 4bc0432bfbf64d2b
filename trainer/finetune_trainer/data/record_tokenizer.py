"""Format and tokenize a batch of records. A batch depends on no other one, so several processes may share the work."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from finetune_trainer.contract import Objective, PrepareRecipe
from finetune_trainer.data.chat import ChatTemplate, template_of
from finetune_trainer.data.documents import Document
from finetune_trainer.data.encoding import Encoder, RecordFormatter, TextExample
from finetune_trainer.data.preferences import PreferenceFormatter
from finetune_trainer.data.records import Fields, InvalidRecord, Shape

Formatter = RecordFormatter | PreferenceFormatter
FORMATTERS: dict[Objective, type[Formatter]] = {"SFT": RecordFormatter, "DPO": PreferenceFormatter}
"""What makes texts of a record, by the objective."""
Documents = tuple[Document, ...]
"""The documents of one record: one, or of a pair the chosen and the rejected one."""
Outcome = Documents | str | None
"""A record as tokens, or why it is invalid, or None if it is dropped as too long."""


@dataclass
class TokenizedBatch:
    """What became of a batch."""

    shape: Shape | None
    """The shape of the valid records so far."""
    outcomes: list[Outcome] = field(default_factory=list)
    """One for each record, in order."""
    truncated: int = 0
    boundary_tokens: int = 0
    """Records in which one token spans text with loss and text without."""


@dataclass(frozen=True)
class TokenizerSettings:
    """All that formatting and tokenizing needs of a tokenizer: it can be sent to another process."""

    backend: str
    """JSON of the fast tokenizer."""
    chat_template: dict[str, str]
    """The template for all conversations, and perhaps one for those with tools."""
    special_tokens_map: dict[str, str]
    split_special_tokens: bool
    bos_token_id: int | None
    eos_token_id: int | None

    @classmethod
    def of(cls, tokenizer: Any) -> "TokenizerSettings":
        """Return the settings of a tokenizer of transformers."""
        variants = tokenizer.chat_template
        with_tools = (
            {"tool_use": variants["tool_use"]}
            if isinstance(variants, dict) and "tool_use" in variants
            else {}
        )
        return cls(
            backend=tokenizer.backend_tokenizer.to_str(),
            chat_template={"default": template_of(tokenizer), **with_tools},
            special_tokens_map=dict(tokenizer.special_tokens_map),
            split_special_tokens=tokenizer.split_special_tokens,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )


class LoadedTokenizer:
    """A tokenizer made from its settings, with the attributes of one of transformers."""

    def __init__(self, settings: TokenizerSettings) -> None:
        self.backend_tokenizer = Tokenizer.from_str(settings.backend)
        self.chat_template = settings.chat_template
        self.special_tokens_map = settings.special_tokens_map
        self.split_special_tokens = settings.split_special_tokens
        self.bos_token_id, self.eos_token_id = settings.bos_token_id, settings.eos_token_id

    def get_chat_template(self) -> str:
        """Return the template for conversations without tools."""
        return self.chat_template["default"]


class RecordTokenizer:
    """Formats records, tokenizes them, and truncates or drops those that are too long."""

    def __init__(self, tokenizer: Any, recipe: PrepareRecipe, objective: Objective = "SFT") -> None:
        self._chat, self._recipe = ChatTemplate(tokenizer), recipe
        self._formatter = FORMATTERS[objective]
        self._encoder = Encoder(tokenizer)

    def tokenize(
        self, records: Sequence[Fields | InvalidRecord], shape: Shape | None
    ) -> TokenizedBatch:
        """Return what becomes of records of one data set; `shape` is that of its earlier records."""
        formatter = self._formatter(self._chat, shape)
        formatted = [_formatted(formatter, record) for record in records]
        batch = TokenizedBatch(formatter.shape)
        texts = [text for one in formatted if not isinstance(one, str) for text in one]
        crossing = self._encoder.boundary_tokens
        documents = iter(self._encoder.encode(texts) if texts else ())
        for one in formatted:
            batch.outcomes.append(
                one
                if isinstance(one, str)
                else self._fitting(tuple(next(documents) for _ in one), batch)
            )
        batch.boundary_tokens = self._encoder.boundary_tokens - crossing
        return batch

    def _fitting(self, documents: Documents, batch: TokenizedBatch) -> Outcome:
        """Return the documents, truncated to the context length if necessary, or None if they are dropped."""
        if not all(document.loss_mask.any() for document in documents):
            return "has no token to train on"
        if _are_equal(documents):
            return "chosen and rejected are the same tokens: there is nothing to prefer"
        length = self._recipe.context_length
        if all(len(document.tokens) <= length for document in documents):
            return documents
        truncated = tuple(
            Document(each.tokens[:length], each.loss_mask[:length]) for each in documents
        )
        # Without a token to train on, a truncated document would only take up space in a row.
        has_targets = all(document.loss_mask.any() for document in truncated)
        if self._recipe.too_long == "Drop" or not has_targets or _are_equal(truncated):
            return None
        batch.truncated += 1
        return truncated


def _are_equal(documents: Documents) -> bool:
    """Return whether the two documents of a pair have the same tokens."""
    return len(documents) > 1 and np.array_equal(documents[0].tokens, documents[1].tokens)


def _formatted(
    formatter: Formatter, record: Fields | InvalidRecord
) -> tuple[TextExample, ...] | str:
    """Return the texts of a record, or why it is invalid."""
    if isinstance(record, InvalidRecord):
        return str(record)
    try:
        return formatter.format(record)
    except InvalidRecord as error:
        return str(error)
