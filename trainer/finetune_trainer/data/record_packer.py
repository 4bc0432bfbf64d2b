"""Format, tokenize and pack records in batches, and count what becomes of them."""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

from finetune_trainer.contract import PrepareConfig
from finetune_trainer.data.chat import ChatTemplate
from finetune_trainer.data.encoding import Encoder, RecordFormatter, TextExample
from finetune_trainer.data.packing import Document, PackedWriter
from finetune_trainer.data.parts import Counts
from finetune_trainer.data.records import InvalidRecord, ReadRecord
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
    """Return the split of a record, which depends only on the seed and the record's number.

    So a record stays in its split when other records are appended, and no state is needed.
    """
    digest = hashlib.sha256(f"{seed}:{record}".encode()).digest()[:8]
    return "validation" if int.from_bytes(digest) < validation_fraction * 2**64 else "train"


class RecordPacker:
    """Packs records into the rows of a writer.

    `counts` covers the records of the parts that the writer has already.
    """

    def __init__(self, config: PrepareConfig, tokenizer: Any, file: str, writer: PackedWriter, counts: Counts) -> None:
        self.counts = counts
        self.writer = writer
        self._config, self._recipe, self._file = config, config.recipe, file
        self._formatter = RecordFormatter(ChatTemplate(tokenizer), counts.shape)
        self._encoder = Encoder(tokenizer)
        self._part_tokens = max(PART_TOKENS, PART_ROWS * config.recipe.context_length)

    def pack(self, records: Iterator[ReadRecord], end_part: Callable[[], None]) -> Iterator[int]:
        """Pack all further records; yield the tokens of each batch. Call `end_part` where a part ends.

        A part ends at the end of a batch, and the next batch begins there. So the batches and the rows are the same
        in a process that begins with this part.
        """
        batch: list[tuple[int, int, TextExample]] = []
        characters = 0
        for line, fields in records:
            example = self._example(line, fields)
            if example:
                batch.append((self.counts.records, line, example))
                characters += len(example.text)
            self.counts.records += 1
            if len(batch) == BATCH_RECORDS or characters >= BATCH_CHARACTERS:
                yield self._pack_batch(batch)
                batch, characters = [], 0
                if self.writer.part_tokens >= self._part_tokens:
                    end_part()
        if batch:
            yield self._pack_batch(batch)

    def _example(self, line: int, fields: Any) -> TextExample | None:
        try:
            if isinstance(fields, InvalidRecord):
                raise fields
            example = self._formatter.format(fields)
        except InvalidRecord as error:
            self._reject(line, error)
            return None
        self.counts.shape = self._formatter.shape
        return example

    def _reject(self, line: int, reason: InvalidRecord) -> None:
        """Count an invalid record; report it if it is among the first MAX_NAMED_RECORDS."""
        self.counts.invalid += 1
        if len(self.counts.reasons) < MAX_NAMED_RECORDS:
            self.counts.reasons.append(f"{self._file}:{line}: {reason}"[:MAX_REASON_CHARACTERS])
            print(self.counts.reasons[-1], flush=True)

    def _pack_batch(self, batch: list[tuple[int, int, TextExample]]) -> int:
        """Tokenize a batch and add it to the rows; return the number of tokens."""
        before = self.writer.part_tokens
        crossing = self._encoder.boundary_tokens
        documents = self._encoder.encode([example for _, _, example in batch])
        for (record, line, _), document in zip(batch, documents, strict=True):
            if not document.loss_mask.any():
                self._reject(line, InvalidRecord("has no token to train on"))
            elif fitting := self._fit(document):
                split = split_of(self._config.seed, record, self._config.dataset.validation_fraction)
                self.writer.add(split, fitting)
        self.counts.boundary_tokens += self._encoder.boundary_tokens - crossing
        return self.writer.part_tokens - before

    def _fit(self, document: Document) -> Document | None:
        """Return the document, truncated to the context length if necessary, or None if it is dropped."""
        length = self._recipe.context_length
        if len(document.tokens) <= length:
            return document
        truncated = Document(document.tokens[:length], document.loss_mask[:length])
        # Without a token to train on, the truncated document would only take up space in a row.
        if self._recipe.too_long == "drop" or not truncated.loss_mask.any():
            self.counts.dropped += 1
            return None
        self.counts.truncated += 1
        return truncated


class Summary:
    """Sentences about the records and rows when all of them have been read."""

    def __init__(self, config: PrepareConfig, file: str, writer: PackedWriter, counts: Counts) -> None:
        self._config, self._file, self._writer, self._counts = config, file, writer, counts
        self._length = config.recipe.context_length

    def raise_if_unusable(self) -> None:
        """Raise DataInvalid if too many records are invalid, or if there are no rows for training."""
        counts, allowed = self._counts, self._config.dataset.max_invalid_fraction
        if not counts.records:
            raise DataInvalid(f"{self._file} has no records; add records or correct dataset.uri")
        if counts.invalid > allowed * counts.records:
            raise DataInvalid(
                f"{counts.invalid} of {counts.records} records are invalid, more than dataset.maxInvalidFraction "
                f"({allowed:g}) allows; correct the records or raise the fraction:\n" + "\n".join(counts.reasons)
            )
        if not self._writer.rows("train"):
            raise DataInvalid(f"{self._file}: no training rows: {self._no_training_rows_reason()}")

    def _no_training_rows_reason(self) -> str:
        if self._writer.rows("validation"):
            return "all valid records are in the validation split; lower dataset.validationFraction or add records"
        if self._counts.dropped:
            return f"{self._counts.dropped} records are longer than prepare.contextLength ({self._length}); raise it"
        return "all records are invalid:\n" + "\n".join(self._counts.reasons)

    def _no_validation_rows_message(self) -> str:
        fraction = self._config.dataset.validation_fraction
        if not fraction:
            return "no validation rows: dataset.validationFraction is 0"
        return f"no validation rows: too few records for dataset.validationFraction {fraction:g}"

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
            f"in {counts.boundary_tokens} records a token spans prompt and completion: start completions with the space"
            if counts.boundary_tokens
            else "",
            f"{tokens_per_second:,.0f} tokens/s" if tokens_per_second else "",
        ]
        return "; ".join(part for part in parts if part)
