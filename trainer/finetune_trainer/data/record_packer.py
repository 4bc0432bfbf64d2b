"""Format, tokenize and pack records in batches, and count what becomes of them."""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from finetune_trainer.contract import PrepareConfig
from finetune_trainer.data.chat import ChatTemplate
from finetune_trainer.data.datasets import Dataset, NumberedRecord
from finetune_trainer.data.encoding import Encoder, RecordFormatter, TextExample
from finetune_trainer.data.packing import Document, PackedWriter
from finetune_trainer.data.parts import Counts
from finetune_trainer.data.records import InvalidRecord
from finetune_trainer.data.row_format import Split
from finetune_trainer.runtime.errors import DataInvalid

MAX_NAMED_RECORDS = 10
"""Number of invalid records that are reported one by one."""
MAX_REASON_CHARACTERS = 160
"""Limit of one reason; ten of them fit into a termination message."""
BATCH_RECORDS = 1000
BATCH_CHARACTERS = 256 * 1024
"""A batch ends with the record that reaches one of the two limits."""
PART_TOKENS = 2**23
PART_ROWS = 1000
"""A part ends with the batch that brings it to so many tokens and to the tokens of so many rows."""


def split_of(seed: int, record: int, validation_fraction: float) -> Split:
    """Return the split of a record, which depends only on the seed and the record's number in its data set.

    So a record stays in its split when other records are appended, and no state is needed.
    """
    return "validation" if _is_drawn(f"{seed}:{record}", validation_fraction) else "train"


def uses_of(seed: int, record: int, weight: float) -> int:
    """Return how often a record is used: the weight, rounded up for a random part of the records, else rounded down.

    Which ones depends only on the seed and the record's number in its data set. A larger weight never uses a record
    less often.
    """
    whole = math.floor(weight)
    return whole + (weight > whole and _is_drawn(f"{seed}:{record}:weight", weight - whole))


def _is_drawn(text: str, fraction: float) -> bool:
    """Return whether a text is among the fraction of all texts whose digests are the lowest."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) < fraction * 2**64


class _Example(NamedTuple):
    """A record in a batch."""

    record: NumberedRecord
    split: Split
    uses: int
    text: TextExample


class RecordPacker:
    """Packs records into the rows of a writer.

    `counts` covers the records of the parts that the writer has already.
    """

    def __init__(
        self,
        config: PrepareConfig,
        tokenizer: Any,
        datasets: Sequence[Dataset],
        writer: PackedWriter,
        counts: Counts,
    ) -> None:
        self.counts = counts
        self.writer = writer
        self._config, self._recipe, self._datasets = config, config.recipe, datasets
        self._formatter = RecordFormatter(ChatTemplate(tokenizer), counts.shape)
        self._encoder = Encoder(tokenizer)
        self._part_tokens = max(PART_TOKENS, PART_ROWS * config.recipe.context_length)

    def pack(self, records: Iterator[NumberedRecord], end_part: Callable[[], None]) -> Iterator[int]:
        """Pack all further records; yield the tokens of each batch. Call `end_part` where a part ends.

        A part ends at the end of a batch, and the next batch begins there. So the batches and the rows are the same
        in a process that begins with this part.
        """
        batch: list[_Example] = []
        characters = 0
        for record in records:
            example = self._example(record)
            if example:
                batch.append(example)
                characters += len(example.text.text)
            self.counts.records += 1
            if len(batch) == BATCH_RECORDS or characters >= BATCH_CHARACTERS:
                yield self._pack_batch(batch)
                batch, characters = [], 0
                if self.writer.part_tokens >= self._part_tokens:
                    end_part()
        if batch:
            yield self._pack_batch(batch)

    def _example(self, record: NumberedRecord) -> _Example | None:
        """Return the example of a record, or None if the record is not used or invalid."""
        dataset, seed = self._datasets[record.dataset], self._config.seed
        uses = uses_of(seed, record.number, dataset.weight)
        if not uses:
            self.counts.unused += 1
            return None
        if record.dataset != self.counts.dataset:
            self.counts.dataset, self.counts.shape, self._formatter.shape = record.dataset, None, None
        try:
            if isinstance(record.fields, InvalidRecord):
                raise record.fields
            text = self._formatter.format(record.fields)
        except InvalidRecord as error:
            self._reject(record, error)
            return None
        self.counts.shape = self._formatter.shape
        self.counts.conversations |= self.counts.shape == "messages"
        split = split_of(seed, record.number, dataset.validation_fraction)
        return _Example(record, split, uses if split == "train" else 1, text)

    def _reject(self, record: NumberedRecord, reason: InvalidRecord) -> None:
        """Count an invalid record; report it if it is among the first MAX_NAMED_RECORDS."""
        self.counts.invalid += 1
        if len(self.counts.reasons) < MAX_NAMED_RECORDS:
            self.counts.reasons.append(f"{record.file}:{record.line}: {reason}"[:MAX_REASON_CHARACTERS])
            print(self.counts.reasons[-1], flush=True)

    def _pack_batch(self, batch: list[_Example]) -> int:
        """Tokenize a batch and add it to the rows; return the number of tokens.

        Records that are used again follow all records of the batch, so that a row seldom holds a record twice.
        """
        before = self.writer.part_tokens
        fitting = list(self._fitting(batch))
        for use in range(max((example.uses for example, _ in fitting), default=0)):
            for example, document in fitting:
                if use < example.uses:
                    self.writer.add(example.split, document)
        return self.writer.part_tokens - before

    def _fitting(self, batch: list[_Example]) -> Iterator[tuple[_Example, Document]]:
        """Yield the examples that can be trained on, as tokens."""
        crossing = self._encoder.boundary_tokens
        for example, document in self._encoded(batch):
            if not document.loss_mask.any():
                self._reject(example.record, InvalidRecord("has no token to train on"))
            elif fitting := self._fit(document):
                yield example, fitting
        self.counts.boundary_tokens += self._encoder.boundary_tokens - crossing

    def _encoded(self, batch: list[_Example]) -> Iterator[tuple[_Example, Document]]:
        """Yield the examples as tokens. Neighbours that have special tokens, or have none, are tokenized together."""
        for _, group in groupby(batch, key=lambda example: example.text.has_special_tokens):
            examples = list(group)
            yield from zip(examples, self._encoder.encode([example.text for example in examples]), strict=True)

    def _fit(self, document: Document) -> Document | None:
        """Return the document, truncated to the context length if necessary, or None if it is dropped."""
        length = self._recipe.context_length
        if len(document.tokens) <= length:
            return document
        truncated = Document(document.tokens[:length], document.loss_mask[:length])
        # Without a token to train on, the truncated document would only take up space in a row.
        if self._recipe.too_long == "Drop" or not truncated.loss_mask.any():
            self.counts.dropped += 1
            return None
        self.counts.truncated += 1
        return truncated


class Summary:
    """Sentences about the records and rows when all of them have been read."""

    def __init__(self, config: PrepareConfig, data: str, writer: PackedWriter, counts: Counts) -> None:
        self._config, self._data, self._writer, self._counts = config, data, writer, counts
        self._length = config.recipe.context_length

    def raise_if_unusable(self) -> None:
        """Raise DataInvalid if too many records are invalid, or if there are no rows for training."""
        counts, allowed = self._counts, self._config.recipe.max_invalid_fraction
        used = counts.records - counts.unused
        if counts.invalid > allowed * used:
            raise DataInvalid(
                f"{counts.invalid} of {used} records are invalid, more than prepare.maxInvalidFraction "
                f"({allowed:g}) allows; correct the records or raise the fraction:\n" + "\n".join(counts.reasons)
            )
        if not self._writer.rows("train"):
            raise DataInvalid(f"{self._data}: no training rows: {self._no_training_rows_reason()}")

    def _no_training_rows_reason(self) -> str:
        counts = self._counts
        if self._writer.rows("validation") and not self._config.validation.uri:
            return "all valid records are in the validation split; lower validation.fraction or add records"
        if counts.dropped:
            return f"{counts.dropped} records are longer than prepare.contextLength ({self._length}); raise it"
        if counts.unused and not counts.invalid:
            return f"the weights leave out all {counts.unused} records; raise the weights in datasets"
        return "all records are invalid:\n" + "\n".join(self._counts.reasons)

    def _no_validation_rows_message(self) -> str:
        validation = self._config.validation
        if validation.uri:
            return "no validation rows: no record of validation.uri can be used"
        if not validation.fraction:
            return "no validation rows: validation.fraction is 0"
        return f"no validation rows: too few records for validation.fraction {validation.fraction:g}"

    def text(self, tokens_per_second: float) -> str:
        """Return one line with the counts of rows and records."""
        counts, length = self._counts, self._length
        tokens, rows = self._writer.tokens("train"), self._writer.rows("train")
        validation_rows = self._writer.rows("validation")
        parts = [
            f"{rows} training rows of {length} tokens ({tokens / rows / length:.0%} full)",
            f"{validation_rows} validation rows" if validation_rows else self._no_validation_rows_message(),
            f"{counts.invalid} records invalid" if counts.invalid else "",
            f"{counts.truncated} truncated to {length} tokens" if counts.truncated else "",
            f"{counts.dropped} dropped as too long" if counts.dropped else "",
            f"{counts.unused} left out by weight" if counts.unused else "",
            f"in {counts.boundary_tokens} records a token spans prompt and completion: start completions with the space"
            if counts.boundary_tokens
            else "",
            f"{tokens_per_second:,.0f} tokens/s" if tokens_per_second else "",
        ]
        return "; ".join(part for part in parts if part)
