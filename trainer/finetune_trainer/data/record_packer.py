"""Tokenize and pack records in batches, and count what becomes of them."""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

from finetune_trainer.contract import PrepareConfig
from finetune_trainer.data.batch_tokenizer import BatchTokenizer
from finetune_trainer.data.datasets import Dataset, NumberedRecord
from finetune_trainer.data.documents import Counts
from finetune_trainer.data.packing_writer import PackedWriter
from finetune_trainer.data.record_batches import Batch, Position, UsedRecord, batches_of
from finetune_trainer.data.record_tokenizer import Documents, TokenizedBatch
from finetune_trainer.data.records import CONVERSATIONS, fields_for
from finetune_trainer.runtime.errors import DataInvalid

MAX_NAMED_RECORDS = 10
"""Number of invalid records that are reported one by one."""
MAX_REASON_CHARACTERS = 160
"""Limit of one reason; ten of them fit into a termination message."""
PART_TOKENS = 2**23
PART_ROWS = 1000
"""A part ends with the batch that brings it to so many tokens and to the tokens of so many rows."""


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
        self._seed, self._datasets = config.seed, datasets
        self._names = fields_for(config.objective)
        self._tokenizer = BatchTokenizer(tokenizer, config, counts)
        self._part_tokens = max(PART_TOKENS, PART_ROWS * config.recipe.context_length)

    def pack(
        self,
        records: Iterator[NumberedRecord],
        position: Callable[[], Position],
        end_part: Callable[[Position], None],
    ) -> Generator[int, None, None]:
        """Pack all further records; yield the tokens of each batch. Call `end_part` where a part ends.

        A part ends at the end of a batch, and the next batch begins there. So the batches and the rows are the same
        in a process that begins with this part. Batches are read ahead: `position` is called when the last record of
        a batch has been read, and `end_part` receives what it was at the end of the part.
        """
        try:
            batches = batches_of(records, self._datasets, self._seed, self._names, position)
            for batch, tokenized in self._tokenized(batches):
                yield self._pack_batch(batch, tokenized)
                if batch.position and self.writer.part_tokens >= self._part_tokens:
                    end_part(batch.position)
        finally:
            self._tokenizer.close()

    def _tokenized(self, batches: Iterator[Batch]) -> Iterator[tuple[Batch, TokenizedBatch]]:
        """Yield all batches in order. An error of reading is raised behind the batches before it, as without others."""
        pending: deque[tuple[Batch, Callable[[], TokenizedBatch]]] = deque()
        failure: Exception | None = None
        is_reading = True
        while is_reading or pending:
            batch = None
            if is_reading:
                try:
                    batch = next(batches, None)
                except Exception as error:  # noqa: BLE001  raised again below
                    failure = error
                is_reading = batch is not None
            if batch is not None:
                pending.append((batch, self._tokenizer.submit(batch)))
            while len(pending) > (self._tokenizer.ahead if is_reading else 0):
                first, result = pending.popleft()
                yield first, result()
        if failure is not None:
            raise failure

    def _pack_batch(self, batch: Batch, tokenized: TokenizedBatch) -> int:
        """Add a batch to the counts and to the rows; return the number of tokens.

        Records that are used again follow all records of the batch, so that a row seldom holds a record twice.
        """
        before = self.writer.part_tokens
        self._count(batch, tokenized)
        fitting = list(self._fitting(batch, tokenized))
        for use in range(max((record.uses for record, _ in fitting), default=0)):
            for record, documents in fitting:
                for document in documents if use < record.uses else ():
                    self.writer.add(record.split, document)
        return self.writer.part_tokens - before

    def _count(self, batch: Batch, tokenized: TokenizedBatch) -> None:
        counts = self.counts
        counts.records += batch.count
        counts.unused += batch.count - len(batch.records)
        counts.truncated += tokenized.truncated
        counts.boundary_tokens += tokenized.boundary_tokens
        if batch.records:
            counts.dataset, counts.shape = batch.dataset, tokenized.shape
            counts.conversations |= tokenized.shape in CONVERSATIONS

    def _fitting(
        self, batch: Batch, tokenized: TokenizedBatch
    ) -> Iterator[tuple[UsedRecord, Documents]]:
        """Yield the records that can be trained on, as tokens."""
        for record, outcome in zip(batch.records, tokenized.outcomes, strict=True):
            if isinstance(outcome, str):
                self._reject(record, outcome)
            elif outcome is None:
                self.counts.dropped += 1
            else:
                yield record, outcome

    def _reject(self, record: UsedRecord, reason: str) -> None:
        """Count an invalid record; report it if it is among the first MAX_NAMED_RECORDS."""
        self.counts.invalid += 1
        if len(self.counts.reasons) < MAX_NAMED_RECORDS:
            self.counts.reasons.append(
                f"{record.file}:{record.line}: {reason}"[:MAX_REASON_CHARACTERS]
            )
            print(self.counts.reasons[-1], flush=True)


class Summary:
    """Sentences about the records and rows when all of them have been read."""

    def __init__(
        self, config: PrepareConfig, data: str, writer: PackedWriter, counts: Counts
    ) -> None:
        self._config, self._data, self._writer, self._counts = config, data, writer, counts
        self._length = config.recipe.context_length

    def raise_if_unusable(self) -> None:
        """Raise DataInvalid if too many records are invalid, or if there are no rows for training."""
        counts, allowed = self._counts, self._config.recipe.max_invalid_fraction
        used = counts.records - counts.unused
        if counts.invalid > allowed * used:
            raise DataInvalid(
                f"{counts.invalid} of {used} records are invalid, more than prepare.maxInvalidFraction "
                f"({allowed:g}) allows; correct the records or raise the fraction:\n"
                + "\n".join(counts.reasons)
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
            return (
                f"the weights leave out all {counts.unused} records; raise the weights in datasets"
            )
        return "all records are invalid:\n" + "\n".join(self._counts.reasons)

    def _no_validation_rows_message(self) -> str:
        validation = self._config.validation
        if validation.uri:
            return "no validation rows: no record of validation.uri can be used"
        if not validation.fraction:
            return "no validation rows: validation.fraction is 0"
        return (
            f"no validation rows: too few records for validation.fraction {validation.fraction:g}"
        )

    def text(self, tokens_per_second: float) -> str:
        """Return one line with the counts of rows and records."""
        counts, length = self._counts, self._length
        tokens, rows = self._writer.tokens("train"), self._writer.rows("train")
        validation_rows = self._writer.rows("validation")
        of, each = (2, "pairs of rows") if self._writer.pairs else (1, "rows")
        parts = [
            f"{rows // of} training {each} of {length} tokens ({tokens / rows / length:.0%} full)",
            f"{validation_rows // of} validation {each}"
            if validation_rows
            else self._no_validation_rows_message(),
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
