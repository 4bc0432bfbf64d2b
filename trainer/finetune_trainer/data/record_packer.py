"""Tokenize and pack records in batches, and count what becomes of them."""

import re
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

from finetune_trainer.contract import PrepareConfig
from finetune_trainer.data.documents import Counts, SpecialTexts
from finetune_trainer.data.packing.writer import PackedWriter
from finetune_trainer.data.reading.datasets import NumberedRecord, OpenDataset
from finetune_trainer.data.reading.record_batches import (
    Position,
    RecordBatch,
    UsedRecord,
    batches_of,
)
from finetune_trainer.data.reasons import add_reason, reasons_text
from finetune_trainer.data.records.records import CONVERSATIONS, fields_for
from finetune_trainer.data.tokenizing.batch_tokenizer import BatchTokenizer
from finetune_trainer.data.tokenizing.record_tokenizer import Documents, TokenizedBatch
from finetune_trainer.runtime.errors import DataInvalid

MAX_NAMED_PLACES = 10
"""Number of places whose text is not in the rows that are reported."""
MAX_SPECIAL = 5
"""Number of special tokens in texts of records that are named."""
# Each part ends with rows that no later record fills. With so many rows they cost 0.5 % of the space (ADR 12).
PART_TOKENS = 2**23
"""A part ends with the batch that brings it to so many tokens, and to the tokens of PART_ROWS rows."""
PART_ROWS = 1000


class RecordPacker:
    """Packs records into the rows of a writer.

    `counts` covers the records of the parts that the writer has already.
    """

    def __init__(
        self,
        config: PrepareConfig,
        tokenizer: Any,
        datasets: Sequence[OpenDataset],
        writer: PackedWriter,
        counts: Counts,
    ) -> None:
        self.counts = counts
        self.writer = writer
        self._seed = config.seed
        self._datasets = datasets
        self._names = fields_for(config.objective)
        self._tokenizer = BatchTokenizer(tokenizer, config, counts)
        self._part_tokens = max(PART_TOKENS, PART_ROWS * config.recipe.context_length)

    def pack(
        self,
        records: Iterator[NumberedRecord],
        position: Callable[[], Position],
        end_part: Callable[[Position], None],
    ) -> Generator[int, None, None]:
        """Pack all further records; yield the number of tokens of each batch. Call `end_part` at the end of a part.

        A part ends at the end of a batch, and the next batch begins there. So the batches and the rows are the same
        in a process that begins with this part. Batches are read ahead: `position` is called when the last record of
        a batch has been read, and `end_part` receives the position at the end of the part.
        """
        try:
            batches = batches_of(
                records, self._datasets, self._seed, self._names, position
            )
            for batch, tokenized in self._tokenized(batches):
                yield self._pack_batch(batch, tokenized)
                if batch.position and self.writer.part_tokens >= self._part_tokens:
                    end_part(batch.position)
        finally:
            # Also if the caller stops early: the other processes must not outlive this generator.
            self._tokenizer.close()

    def _tokenized(
        self, batches: Iterator[RecordBatch]
    ) -> Iterator[tuple[RecordBatch, TokenizedBatch]]:
        """Yield all batches in order. An error of reading is raised after the batches before it."""
        pending: deque[tuple[RecordBatch, Callable[[], TokenizedBatch]]] = deque()
        failure: Exception | None = None
        is_reading = True
        while is_reading or pending:
            batch = None
            if is_reading:
                try:
                    batch = next(batches, None)
                except Exception as error:  # noqa: BLE001  raised again below
                    # Without other processes, the batches before the error would have been packed already.
                    failure = error
                is_reading = batch is not None
            if batch is not None:
                pending.append((batch, self._tokenizer.submit(batch)))
            allowed_ahead = self._tokenizer.ahead if is_reading else 0
            while len(pending) > allowed_ahead:
                first, result = pending.popleft()
                yield first, result()
        if failure is not None:
            raise failure

    def _pack_batch(self, batch: RecordBatch, tokenized: TokenizedBatch) -> int:
        """Add a batch to the counts and to the rows; return the number of tokens."""
        before = self.writer.part_tokens
        self._count(batch, tokenized)
        usable = list(self._usable_records(batch, tokenized))
        most_uses = max((record.uses for record, _ in usable), default=0)
        # A record's second use comes after all records of the batch, so that a row seldom holds a record twice.
        for use in range(most_uses):
            for record, documents in usable:
                if use < record.uses:
                    self._add(record, documents)
        return self.writer.part_tokens - before

    def _add(self, record: UsedRecord, documents: Documents) -> None:
        for document in documents:
            self.writer.add(record.split, document)

    def _count(self, batch: RecordBatch, tokenized: TokenizedBatch) -> None:
        counts = self.counts
        counts.records += batch.count
        counts.unused += batch.count - len(batch.records)
        counts.truncated += tokenized.truncated
        counts.split += tokenized.split
        counts.unrendered += tokenized.unrendered
        counts.by_turn += tokenized.by_turn
        for index, text in tokenized.unrendered_texts:
            self._report(batch.records[index], text)
        counts.boundary_tokens += tokenized.boundary_tokens
        counts.ends_unlearned += tokenized.ends_unlearned
        counts.glued += tokenized.glued
        for index, token in tokenized.special_texts:
            self._count_special(batch.records[index], token)
        for index, number in tokenized.unknown_tokens:
            counts.unknown_tokens += number * batch.records[index].uses
        # A batch without used records says nothing about the shape of its data set.
        if batch.records:
            counts.dataset = batch.dataset
            counts.shape = tokenized.shape
            counts.conversations |= tokenized.shape in CONVERSATIONS

    def _count_special(self, record: UsedRecord, token: str) -> None:
        special = self.counts.special
        special.records += 1
        special.first = special.first or f"{record.file}:{record.line}"
        if token not in special.tokens and len(special.tokens) < MAX_SPECIAL:
            special.tokens.append(token)

    def _usable_records(
        self, batch: RecordBatch, tokenized: TokenizedBatch
    ) -> Iterator[tuple[UsedRecord, Documents]]:
        """Yield the records that can be trained on, as tokens."""
        counted = {index for index, _ in tokenized.unrendered_texts}
        outcomes = zip(batch.records, tokenized.outcomes, strict=True)
        for index, (record, outcome) in enumerate(outcomes):
            if isinstance(outcome, str):
                self._reject(record, outcome)
            elif outcome is None:
                self.counts.dropped += 1
            else:
                if record.is_partly_read and index not in counted:
                    self.counts.unrendered += 1
                yield record, outcome

    def _reject(self, record: UsedRecord, reason: str) -> None:
        """Count an invalid record; print its reason if no earlier record has the same."""
        self.counts.invalid += 1
        place = f"{record.file}:{record.line}"
        if add_reason(self.counts.reasons, place, reason):
            print(self.counts.reasons[-1].text(), flush=True)

    def _report(self, record: UsedRecord, text: str) -> None:
        """Report a text that is not in the rows, if it is the first of its kind of place."""
        place = re.sub(r"\[\d+\]", "[]", text.partition(": ")[0])
        places = self.counts.unrendered_places
        if place not in places and len(places) < MAX_NAMED_PLACES:
            places.append(place)
            # The manifest allows it already.
            shown = text.removesuffix(", or allow it with prepare.unrendered: Warn")
            print(f"{record.file}:{record.line}: {shown}", flush=True)


def unknown_fraction(counts: Counts, writer: PackedWriter) -> float:
    """Return the fraction of the tokens in all rows for text that the tokenizer does not have."""
    tokens = writer.tokens("train") + writer.tokens("validation")
    # A dropped record is counted and is in no row.
    return min(1.0, counts.unknown_tokens / max(1, tokens))


def _special_text(special: SpecialTexts) -> str:
    """Return the sentence about texts of records that the tokenizer reads as special tokens."""
    records = (
        "1 record has" if special.records == 1 else f"{special.records:,} records have"
    )
    tokens = ", ".join(special.tokens)
    return (
        f"{records} the text of a special token ({tokens}; first {special.first}): the model reads the token itself "
        "there, such as the end of a turn: remove it, unless you mean it"
    )


class Summary:
    """Sentences about the records and rows when all of them have been read."""

    def __init__(
        self, config: PrepareConfig, data: str, writer: PackedWriter, counts: Counts
    ) -> None:
        self._config = config
        self._data = data
        self._writer = writer
        self._counts = counts
        self._length = config.recipe.context_length

    def raise_if_unusable(self) -> None:
        """Raise DataInvalid if too many records are invalid, or if there are no rows for training."""
        counts = self._counts
        allowed = self._config.recipe.max_invalid_fraction
        # A record that its weight leaves out is never looked at, so it is neither valid nor invalid.
        used = counts.records - counts.unused
        if counts.invalid > allowed * used:
            raise DataInvalid(
                f"{counts.invalid} of {used} records are invalid, more than prepare.maxInvalidFraction "
                f"({allowed:g}) allows; correct the records or raise the fraction:\n"
                + reasons_text(counts.reasons)
            )
        if not self._writer.rows("train"):
            raise DataInvalid(
                f"{self._data}: no training rows: {self._no_training_rows_reason()}"
            )

    def _no_training_rows_reason(self) -> str:
        counts = self._counts
        if self._writer.rows("validation") and not self._config.validation.uri:
            return "all valid records are in the validation split; lower validation.fraction or add records"
        if counts.dropped:
            return f"{counts.dropped} records are longer than prepare.contextLength ({self._length}); raise it"
        if counts.unused and not counts.invalid:
            return f"the weights leave out all {counts.unused} records; raise the weights in datasets"
        return "all records are invalid:\n" + reasons_text(self._counts.reasons)

    def no_validation_rows(self) -> str:
        """Return the reason why there are no validation rows."""
        validation = self._config.validation
        if validation.uri:
            return "no record of validation.uri can be used"
        if not validation.fraction:
            return "validation.fraction is 0"
        return f"too few records for validation.fraction {validation.fraction:g}"

    def unused_texts(self) -> Iterator[str]:
        """Yield a sentence for each kind of text that the rows have, and of which nothing is learned."""
        counts = self._counts
        if counts.ends_unlearned:
            yield (
                f"{counts.ends_unlearned} conversations end with turns that weight 0 or train false takes out of the "
                "loss: nothing learns from what is behind their last learned turn"
            )
        if counts.glued:
            yield (
                f"in {counts.glued} records a word of the completion follows the prompt without a space: "
                "if you mean a blank or a line break between them, write it into one of them"
            )
        if counts.special.records:
            yield _special_text(counts.special)
        if counts.unknown_tokens:
            tokens = self._writer.tokens("train") + self._writer.tokens("validation")
            yield (
                f"{counts.unknown_tokens} of {tokens} tokens ({counts.unknown_tokens / tokens:.2%}) stand for text "
                "that the tokenizer does not have"
            )

    def text(self, tokens_per_second: float) -> str:
        """Return a line with the counts of rows and records."""
        parts = [
            self._training_rows(),
            self._validation_rows(),
            *self._unusual_records(),
        ]
        if tokens_per_second:
            parts.append(f"{tokens_per_second:,.0f} tokens/s")
        return "; ".join(parts)

    def _training_rows(self) -> str:
        tokens = self._writer.tokens("train")
        rows = self._writer.rows("train")
        counted = self._counted(rows, "training")
        fullness = tokens / rows / self._length
        return f"{counted} of {self._length} tokens ({fullness:.0%} full)"

    def _validation_rows(self) -> str:
        rows = self._writer.rows("validation")
        if not rows:
            return f"no validation rows: {self.no_validation_rows()}"
        return self._counted(rows, "validation")

    def _counted(self, rows: int, split: str) -> str:
        if self._writer.pairs:
            return f"{rows // 2} {split} pairs of rows"
        return f"{rows} {split} rows"

    def _unusual_records(self) -> Iterator[str]:
        counts = self._counts
        if counts.invalid:
            yield f"{counts.invalid} records invalid"
        if counts.truncated:
            yield f"{counts.truncated} truncated to {self._length} tokens"
        if counts.dropped:
            yield f"{counts.dropped} dropped as too long"
        if counts.split:
            yield f"{counts.split} split into pieces of {self._length} tokens"
        if counts.unrendered:
            yield f"{counts.unrendered} with a text that the rows do not hold"
        if counts.by_turn:
            yield f"{counts.by_turn} conversations with an example for each turn"
        if counts.unused:
            yield f"{counts.unused} left out by weight"
        if counts.boundary_tokens:
            yield (
                f"in {counts.boundary_tokens} examples a token spans prompt and completion: "
                "start completions with the space"
            )
