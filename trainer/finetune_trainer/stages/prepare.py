"""Read the records, tokenise and pack them once, so that training starts, and starts again, without any of it.

Everything streams: what is in memory is one batch of records and the rows that are being filled.
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
from finetune_trainer.runtime.artifacts import atomic_folder, digest_file, matches_digest, seal
from finetune_trainer.runtime.errors import ConfigInvalid, DataInvalid
from finetune_trainer.runtime.sources import fetch_dataset, fetch_tokenizer
from finetune_trainer.runtime.stage_folder import Context

OUTPUT = "output"
MAX_NAMED_RECORDS = 10
"""Unusable records that are named one by one."""
LONGEST_REASON = 160
"""Characters; ten of them fit into a termination message."""
BATCH_RECORDS = 1000
BATCH_CHARACTERS = 256 * 1024
"""A batch ends with the record that reaches either."""


def run(config: PrepareConfig, context: Context) -> PrepareResult:
    """Make output/ (see `packed`) in the stage's folder.

    Raises ConfigInvalid, SourceNotFound, DataInvalid, or what fetching from the hub raises.
    """
    path = fetch_dataset(config.dataset.uri, config.dataset.revision, context.environment)
    form = format_of(path, config.dataset.format)
    context.progress.update(note="reading the tokenizer", total=count_records(path, form))
    tokenizer = load_tokenizer(config, context.environment)
    tally = RecordStats(path.name, config)
    with atomic_folder(context.folder / OUTPUT) as output:
        with PackedWriter(output, config.recipe.context_length, padding_of(tokenizer)) as writer:
            preparation = RecordPacker(config, tokenizer, tally, writer)
            context.progress.update(note="tokenising and packing")
            for records in preparation.pack(read_records(path, form)):
                context.progress.update(step=records)
        tally.raise_if_unusable(writer)
        digest = seal(output)
    print(f"prepare: {tally.summary(writer, preparation.boundary_tokens)}", flush=True)
    context.progress.update(step=tally.records, total=tally.records, note="")
    return PrepareResult(
        identity=config.identity,
        digest=digest,
        records=tally.records,
        invalid=tally.invalid,
        truncated=tally.truncated,
        dropped=tally.dropped,
        train_rows=writer.rows("train"),
        validation_rows=writer.rows("validation"),
        train_tokens=writer.tokens("train"),
        data_digest=f"sha256:{digest_file(path)}",
        conversations=preparation.reader.shape == "messages",
    )


def is_output_valid(result: StageResult, config: PrepareConfig, environment: Environment) -> bool:
    """Whether the packed rows are there and whole; reads every byte of them."""
    return matches_digest(environment.stage_dir("prepare", config.identity) / OUTPUT, result.digest)


def load_tokenizer(config: PrepareConfig, environment: Environment) -> Any:
    """Raise ConfigInvalid where the model has no tokenizer that tells where in the text its tokens are."""
    folder = fetch_tokenizer(config.model.uri, config.model.revision, environment)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigInvalid(f"{config.model.uri}: its tokenizer cannot be loaded: {error}") from error
    if not tokenizer.is_fast:
        raise ConfigInvalid(f"{config.model.uri}: has no fast tokenizer; add its tokenizer.json to the model's folder")
    return tokenizer


def padding_of(tokenizer: Any) -> int:
    """Give the token that fills up rows; it is never counted, so any will do where there is none."""
    return next((token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if token is not None), 0)


def split_of(seed: int, record: int, validation_fraction: float) -> Split:
    """Choose by the record's number alone, so that the choice is the same in every run and needs no memory."""
    drawn = hashlib.sha256(f"{seed}:{record}".encode()).digest()[:8]
    return "validation" if int.from_bytes(drawn) < validation_fraction * 2**64 else "train"


class RecordStats:
    """What became of the records so far."""

    def __init__(self, file: str, config: PrepareConfig) -> None:
        self.records = self.invalid = self.truncated = self.dropped = 0
        self._file = file
        self._recipe = config.recipe
        self._max_invalid_fraction = config.dataset.max_invalid_fraction
        self._validation_fraction = config.dataset.validation_fraction
        self._named: list[str] = []

    def reject(self, line: int, reason: InvalidRecord) -> None:
        """Count a record that cannot be used, and name it while there are few."""
        self.invalid += 1
        if len(self._named) < MAX_NAMED_RECORDS:
            self._named.append(f"{self._file}:{line}: {reason}"[:LONGEST_REASON])
            print(self._named[-1], flush=True)

    def raise_if_unusable(self, writer: PackedWriter) -> None:
        """Raise DataInvalid where too little is usable, or nothing to train on."""
        if not self.records:
            raise DataInvalid(f"{self._file}: holds no records; put some in, or mend dataset.uri")
        if self.invalid > self._max_invalid_fraction * self.records:
            raise DataInvalid(
                f"{self.invalid} of {self.records} records cannot be used, which is more than "
                f"dataset.maxInvalidFraction ({self._max_invalid_fraction:g}) allows: mend them or raise it.\n"
                + "\n".join(self._named)
            )
        if not writer.rows("train"):
            raise DataInvalid(f"{self._file}: nothing to train on is left: {self._why_nothing(writer)}")

    def _why_nothing(self, writer: PackedWriter) -> str:
        length = self._recipe.context_length
        if writer.rows("validation"):
            return "all usable records were drawn for validation; lower dataset.validationFraction or add records"
        if self.dropped:
            return f"{self.dropped} records are longer than prepare.contextLength ({length}); raise it"
        return "no record is usable:\n" + "\n".join(self._named)

    def _why_no_validation(self) -> str:
        share = self._validation_fraction
        why = f"too few records for a share of {share:g}" if share else "none were asked for"
        return f"no validation rows: {why}"

    def summary(self, writer: PackedWriter, torn: int) -> str:
        """Say in one line what became of the records."""
        length = self._recipe.context_length
        tokens, rows = writer.tokens("train"), writer.rows("train")
        parts = [
            f"{rows} rows of {length} tokens to train on ({tokens / rows / length:.0%} full)",
            f"{writer.rows('validation')} to validate on" if writer.rows("validation") else self._why_no_validation(),
            f"{self.invalid} records unusable" if self.invalid else "",
            f"{self.truncated} cut to {length} tokens" if self.truncated else "",
            f"{self.dropped} left out as too long" if self.dropped else "",
            f"in {torn} one token spans prompt and completion: begin completions with the space" if torn else "",
        ]
        return "; ".join(part for part in parts if part)


class RecordPacker:
    """The way of a record into a row."""

    def __init__(self, config: PrepareConfig, tokenizer: Any, tally: RecordStats, writer: PackedWriter) -> None:
        self._config = config
        self._recipe: PrepareRecipe = config.recipe
        self.reader = RecordFormatter(ChatTemplate(tokenizer))
        self._encoder = Encoder(tokenizer)
        self._stats = tally
        self._writer = writer

    @property
    def boundary_tokens(self) -> int:
        """Records in which a token spans what is learnt and what is not."""
        return self._encoder.boundary_tokens

    def pack(self, found: Iterator[ReadRecord]) -> Iterator[int]:
        """Pack all that is found; give, from time to time, how many records that were."""
        batch: list[tuple[int, int, TextExample]] = []
        characters = 0
        for line, fields in found:
            passage = self._example(line, fields)
            if passage:
                batch.append((self._stats.records, line, passage))
                characters += len(passage.text)
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
            return self.reader.format(fields)
        except InvalidRecord as unusable:
            self._stats.reject(line, unusable)
            return None

    def _pack_batch(self, batch: list[tuple[int, int, TextExample]]) -> None:
        documents = self._encoder.encode([passage for _, _, passage in batch])
        for (record, line, _), document in zip(batch, documents, strict=True):
            if not document.loss_mask.any():
                self._stats.reject(line, InvalidRecord("gives no token that could be learnt"))
            elif fitting := self._fitted(document):
                self._writer.add(split_of(self._config.seed, record, self._config.dataset.validation_fraction), fitting)

    def _fitted(self, document: Document) -> Document | None:
        length = self._recipe.context_length
        if len(document.tokens) <= length:
            return document
        cut = Document(document.tokens[:length], document.loss_mask[:length])
        if self._recipe.too_long == "drop" or not cut.loss_mask.any():
            self._stats.dropped += 1
            return None
        self._stats.truncated += 1
        return cut
