"""Stage prepare: reads, tokenizes and packs the records once, so that every start of training can skip this work.

The data is streamed: memory holds one batch of records and the rows that are being filled.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

from transformers import AutoTokenizer

from finetune_trainer.contract import Environment, PrepareConfig, PrepareRecipe, PrepareResult, StageResult
from finetune_trainer.data.chat import ChatTemplate
from finetune_trainer.data.encoding import Encoder, RecordFormatter, TextExample
from finetune_trainer.data.packing import Document, PackedWriter, Split
from finetune_trainer.data.records import InvalidRecord, ReadRecord, count_records, format_of, read_records
from finetune_trainer.models.base_model import BaseModel, open_base_model
from finetune_trainer.runtime.artifacts import atomic_folder, digest_file, matches_digest, seal
from finetune_trainer.runtime.errors import ConfigInvalid, DataInvalid
from finetune_trainer.runtime.sources import fetch_dataset
from finetune_trainer.runtime.stage_folder import Context

OUTPUT = "output"
MAX_NAMED_RECORDS = 10
"""Number of invalid records that are reported one by one."""
MAX_REASON_CHARACTERS = 160
"""Limit of one reason; ten of them fit into a termination message."""
BATCH_RECORDS = 1000
BATCH_CHARACTERS = 256 * 1024
"""A batch ends with the record that reaches one of the two limits."""


def run(config: PrepareConfig, context: Context) -> PrepareResult:
    """Write the packed rows to output/ in the stage's folder; `data.packing` describes the files.

    Raise ConfigInvalid, SourceNotFound, DataInvalid, CredentialsRejected or ServiceUnavailable.
    """
    path = fetch_dataset(config.dataset.uri, config.dataset.revision, context.environment)
    file_format = format_of(path, config.dataset.format)
    context.progress.update(note="reading the base model", total=count_records(path, file_format))
    base = open_base_model(config.model, context.environment)
    tokenizer = load_tokenizer(base)
    stats = RecordStats(path.name, config)
    with atomic_folder(context.folder / OUTPUT) as output:
        with PackedWriter(output, config.recipe.context_length, padding_token(tokenizer)) as writer:
            packer = RecordPacker(config, tokenizer, stats, writer)
            context.progress.update(note="tokenizing and packing")
            for records in packer.pack(read_records(path, file_format)):
                context.progress.update(step=records)
        stats.raise_if_unusable(writer)
        digest = seal(output)
    print(f"prepare: {stats.summary(writer, packer.boundary_tokens)}", flush=True)
    context.progress.update(step=stats.records, total=stats.records, note="")
    return PrepareResult(
        identity=config.identity,
        digest=digest,
        records=stats.records,
        invalid=stats.invalid,
        truncated=stats.truncated,
        dropped=stats.dropped,
        train_rows=writer.rows("train"),
        validation_rows=writer.rows("validation"),
        train_tokens=writer.tokens("train"),
        data_digest=f"sha256:{digest_file(path)}",
        conversations=packer.formatter.shape == "messages",
        model_digest=base.digest,
    )


def is_output_valid(result: StageResult, config: PrepareConfig, environment: Environment) -> bool:
    """Return whether the packed rows are intact; read every byte of them."""
    return matches_digest(environment.stage_dir("prepare", config.identity) / OUTPUT, result.digest)


def load_tokenizer(base: BaseModel) -> Any:
    """Load the model's tokenizer; raise ConfigInvalid if it has no fast one, which alone returns token offsets."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(base.folder, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigInvalid(f"{base.uri}: its tokenizer cannot be loaded: {error}") from error
    if not tokenizer.is_fast:
        raise ConfigInvalid(f"{base.uri} has no fast tokenizer; add tokenizer.json to the model's folder")
    return tokenizer


def padding_token(tokenizer: Any) -> int:
    """Return the id of the token that pads rows. Its loss mask is 0, so any id works if the tokenizer defines none."""
    return next((token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if token is not None), 0)


def split_of(seed: int, record: int, validation_fraction: float) -> Split:
    """Return the split of a record, which depends only on the seed and the record's number.

    So a record stays in its split when other records are appended, and no state is needed.
    """
    digest = hashlib.sha256(f"{seed}:{record}".encode()).digest()[:8]
    return "validation" if int.from_bytes(digest) < validation_fraction * 2**64 else "train"


class RecordStats:
    """Counts of the records read so far, and the first invalid ones by name."""

    def __init__(self, file: str, config: PrepareConfig) -> None:
        self.records = self.invalid = self.truncated = self.dropped = 0
        self._file = file
        self._recipe = config.recipe
        self._max_invalid_fraction = config.dataset.max_invalid_fraction
        self._validation_fraction = config.dataset.validation_fraction
        self._reasons: list[str] = []

    def reject(self, line: int, reason: InvalidRecord) -> None:
        """Count an invalid record; report it if it is among the first MAX_NAMED_RECORDS."""
        self.invalid += 1
        if len(self._reasons) < MAX_NAMED_RECORDS:
            self._reasons.append(f"{self._file}:{line}: {reason}"[:MAX_REASON_CHARACTERS])
            print(self._reasons[-1], flush=True)

    def raise_if_unusable(self, writer: PackedWriter) -> None:
        """Raise DataInvalid if too many records are invalid, or if there are no rows for training."""
        if not self.records:
            raise DataInvalid(f"{self._file} has no records; add records or correct dataset.uri")
        if self.invalid > self._max_invalid_fraction * self.records:
            raise DataInvalid(
                f"{self.invalid} of {self.records} records are invalid, more than dataset.maxInvalidFraction "
                f"({self._max_invalid_fraction:g}) allows; correct the records or raise the fraction:\n"
                + "\n".join(self._reasons)
            )
        if not writer.rows("train"):
            raise DataInvalid(f"{self._file}: no training rows: {self._no_training_rows_reason(writer)}")

    def _no_training_rows_reason(self, writer: PackedWriter) -> str:
        length = self._recipe.context_length
        if writer.rows("validation"):
            return "all valid records are in the validation split; lower dataset.validationFraction or add records"
        if self.dropped:
            return f"{self.dropped} records are longer than prepare.contextLength ({length}); raise it"
        return "all records are invalid:\n" + "\n".join(self._reasons)

    def _no_validation_rows_message(self) -> str:
        fraction = self._validation_fraction
        if not fraction:
            return "no validation rows: dataset.validationFraction is 0"
        return f"no validation rows: too few records for dataset.validationFraction {fraction:g}"

    def summary(self, writer: PackedWriter, boundary_tokens: int) -> str:
        """Return one line with the counts of rows and records."""
        length = self._recipe.context_length
        tokens, rows, validation_rows = writer.tokens("train"), writer.rows("train"), writer.rows("validation")
        parts = [
            f"{rows} training rows of {length} tokens ({tokens / rows / length:.0%} full)",
            f"{validation_rows} validation rows" if validation_rows else self._no_validation_rows_message(),
            f"{self.invalid} records invalid" if self.invalid else "",
            f"{self.truncated} truncated to {length} tokens" if self.truncated else "",
            f"{self.dropped} dropped as too long" if self.dropped else "",
            f"in {boundary_tokens} records a token spans prompt and completion: start completions with the space"
            if boundary_tokens
            else "",
        ]
        return "; ".join(part for part in parts if part)


class RecordPacker:
    """Formats, encodes and packs records in batches."""

    def __init__(self, config: PrepareConfig, tokenizer: Any, stats: RecordStats, writer: PackedWriter) -> None:
        self._config = config
        self._recipe: PrepareRecipe = config.recipe
        self.formatter = RecordFormatter(ChatTemplate(tokenizer))
        self._encoder = Encoder(tokenizer)
        self._stats = stats
        self._writer = writer

    @property
    def boundary_tokens(self) -> int:
        """Number of records in which one token spans text with loss and text without."""
        return self._encoder.boundary_tokens

    def pack(self, records: Iterator[ReadRecord]) -> Iterator[int]:
        """Pack all records; yield the number of records read so far after each full batch."""
        batch: list[tuple[int, int, TextExample]] = []
        characters = 0
        for line, fields in records:
            example = self._example(line, fields)
            if example:
                batch.append((self._stats.records, line, example))
                characters += len(example.text)
            self._stats.records += 1
            if len(batch) == BATCH_RECORDS or characters >= BATCH_CHARACTERS:
                self._pack_batch(batch)
                batch, characters = [], 0
                yield self._stats.records
        if batch:
            self._pack_batch(batch)

    def _example(self, line: int, fields: Any) -> TextExample | None:
        try:
            if isinstance(fields, InvalidRecord):
                raise fields
            return self.formatter.format(fields)
        except InvalidRecord as error:
            self._stats.reject(line, error)
            return None

    def _pack_batch(self, batch: list[tuple[int, int, TextExample]]) -> None:
        documents = self._encoder.encode([example for _, _, example in batch])
        for (record, line, _), document in zip(batch, documents, strict=True):
            if not document.loss_mask.any():
                self._stats.reject(line, InvalidRecord("has no token to train on"))
            elif fitting := self._fit(document):
                self._writer.add(split_of(self._config.seed, record, self._config.dataset.validation_fraction), fitting)

    def _fit(self, document: Document) -> Document | None:
        """Return the document, truncated to the context length if necessary, or None if it is dropped."""
        length = self._recipe.context_length
        if len(document.tokens) <= length:
            return document
        truncated = Document(document.tokens[:length], document.loss_mask[:length])
        # Without a token to train on, the truncated document would only take up space in a row.
        if self._recipe.too_long == "drop" or not truncated.loss_mask.any():
            self._stats.dropped += 1
            return None
        self._stats.truncated += 1
        return truncated
