"""Stage prepare: reads, tokenizes and packs the records once, so that every start of training can skip this work.

The data is streamed: memory holds one batch of records and the rows that are being filled. Rows are written in parts,
and a process that is started again goes on behind the last complete part.
"""

import hashlib
import shutil
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

from finetune_trainer import data
from finetune_trainer.contract import (
    Environment,
    PrepareConfig,
    PrepareResult,
    StageResult,
)
from finetune_trainer.contract.chat_template import ChatTemplateOrigin
from finetune_trainer.data.chat_templates import ChatTemplates, choose_chat_templates
from finetune_trainer.data.documents import Counts
from finetune_trainer.data.packing.parts import PartFolder, PartState
from finetune_trainer.data.packing.writer import PackedWriter
from finetune_trainer.data.reading.datasets import (
    NumberedRecord,
    RecordReader,
    fetch_datasets,
)
from finetune_trainer.data.reading.record_batches import Position
from finetune_trainer.data.record_packer import (
    RecordPacker,
    Summary,
    unknown_fraction,
)
from finetune_trainer.data.records.chat_template import ChatTemplate, turn_end
from finetune_trainer.data.tokenizing.unknown_text import replaced_characters
from finetune_trainer.files import sync_folder
from finetune_trainer.models.base_model import BaseModel, open_base_model
from finetune_trainer.models.start_adapter import open_start_adapter
from finetune_trainer.models.tokenizer import load_tokenizer
from finetune_trainer.runtime.artifacts import (
    canonical_json,
    digest_file,
    matches_digest,
    seal,
)
from finetune_trainer.runtime.errors import DataInvalid
from finetune_trainer.runtime.progress.progress import ProgressReporter, log_line
from finetune_trainer.runtime.stage_folder import Context
from finetune_trainer.training.requirements import (
    Embeddings,
    check_model_for,
    check_validation,
)

OUTPUT = "output"
PARTIAL = "partial"
MAX_REPLACED = 5
"""Number of replaced characters that are shown."""


def run(config: PrepareConfig, context: Context) -> PrepareResult:
    """Write the packed rows to output/ in the stage's folder; `data.row_format` describes the files.

    Raise ConfigInvalid, SourceNotFound, DataInvalid, CredentialsRejected or ServiceUnavailable.
    """
    datasets = fetch_datasets(config, context.environment)
    reader = RecordReader(
        datasets, config.objective, config.recipe.unrendered, log_line
    )
    context.progress.update(note="reading the base model", total=reader.known_count())
    base = open_base_model(config.model, context.environment)
    check_model_for(base, config)
    tokenizer = load_tokenizer(base.uri, base.folder)
    templates = choose_chat_templates(
        config.recipe, tokenizer, base, context.environment
    )
    templates.set_in(tokenizer)
    templates.log_date()
    embeddings = Embeddings(base, tokenizer)
    embeddings.log_unused()
    start = open_start_adapter(config.start_from, context.environment)
    if start:
        start.require_base(base)
    folder = PartFolder(
        context.folder / PARTIAL,
        config.recipe.context_length,
        digest_of_inputs(config, base, templates),
    )
    records, parts = resume(reader, folder, context)
    writer = new_writer(config, embeddings.padding_token(), folder, parts)
    packer = RecordPacker(config, tokenizer, datasets, writer, counts_of(parts))
    meter = Meter(context.progress, reader, packer.counts)
    pack(
        packer,
        records,
        folder,
        reader,
        meter,
        embeddings=embeddings,
        templates=templates,
    )
    summary = Summary(config, reader.name, writer, packer.counts)
    check_rows(summary, config, writer, folder)
    counts = packer.counts
    origin = templates.write(folder.rows, conversations=counts.conversations)
    digest = publish(folder, writer, context)
    print(f"prepare: {summary.text(meter.tokens_per_second)}", flush=True)
    log_unused(summary, tokenizer)
    warn_about_turns(counts, tokenizer)
    warn_about_default(origin, base.uri)
    context.progress.update(step=counts.records, total=counts.records, note="")
    return PrepareResult(
        identity=config.identity,
        digest=digest,
        records=counts.records,
        invalid=counts.invalid,
        truncated=counts.truncated,
        dropped=counts.dropped,
        split=counts.split,
        unrendered=counts.unrendered,
        unread_words=reader.unread_words,
        unused=counts.unused,
        train_rows=writer.rows("train"),
        validation_rows=writer.rows("validation"),
        train_tokens=writer.tokens("train"),
        train_targets=writer.targets("train"),
        unknown_fraction=unknown_fraction(counts, writer),
        data_digest=f"sha256:{reader.digest()}",
        data_pins=tuple(dataset.pin for dataset in datasets),
        conversations=counts.conversations,
        chat_template=origin,
        model_digest=base.digest,
        model_pin=base.pin,
        start_digest=start.digest if start else None,
        start_pin=start.pin if start else None,
    )


def check_rows(
    summary: Summary, config: PrepareConfig, writer: PackedWriter, folder: PartFolder
) -> None:
    """Raise DataInvalid for rows that cannot be trained on, and delete their parts."""
    try:
        summary.raise_if_unusable()
        if not writer.rows("validation"):
            check_validation(
                config.training,
                summary.no_validation_rows(),
                held_out=config.held_out,
            )
    except DataInvalid:
        folder.delete()
        raise


def log_unused(summary: Summary, tokenizer: Any) -> None:
    """Log the kinds of text of which nothing is learned, and the characters that the tokenizer replaces."""
    for text in summary.unused_texts():
        log_line(f"prepare: {text}")
    replaced = replaced_characters(tokenizer.backend_tokenizer)
    if replaced:
        shown = ", ".join(replaced[:MAX_REPLACED])
        log_line(
            f"prepare: the tokenizer replaces characters of every text: {shown}; the model never sees the difference"
        )


def warn_about_turns(counts: Counts, tokenizer: Any) -> None:
    """Log a warning if servers will not know where a turn of the chat template or a text ends."""
    if tokenizer.eos_token_id is None:
        log_line(
            "prepare: the tokenizer has no EOS token, so that no plain text ends with it: "
            "set eos_token in the model's tokenizer_config.json"
        )
    if counts.conversations and not ChatTemplate(tokenizer).writes_turn_end:
        log_line(
            "prepare: the chat template writes nothing behind a turn, so that EOS was added to each: "
            "use a template that ends turns with a special token"
        )
    if counts.conversations and turn_end(tokenizer) is None:
        log_line(
            "prepare: the chat template ends a turn with text that is no special token, so that servers will not "
            "stop there: use a template that ends turns with a special token"
        )


def warn_about_default(origin: ChatTemplateOrigin | None, model: str) -> None:
    """Log that conversations have the default template. `model` is the URI of the base model."""
    if origin == "Default":
        log_line(
            f"prepare: the base model {model} has no chat template: `role: content`, with a blank line between "
            "turns, is used and published; set prepare.chatTemplate for another"
        )


def resume(
    reader: RecordReader, folder: PartFolder, context: Context
) -> tuple[Iterator[NumberedRecord], list[PartState]]:
    """Return the records that no complete part has, and the complete parts.

    The records of these parts are read again, but neither formatted nor tokenized. Without parts, or if the data
    has changed, these are all records and no parts.
    """
    records = reader.read()
    parts = folder.load(context.folder / OUTPUT)
    if not parts:
        return records, []
    last = parts[-1]
    context.progress.update(
        note=f"reading the {last.counts.records} records of {len(parts)} complete parts"
    )
    deque(islice(records, last.counts.records), maxlen=0)
    if (reader.bytes_read, reader.digest()) == (last.source_bytes, last.source_digest):
        log_line(
            f"prepare: continuing after record {last.counts.records}, with {len(parts)} complete parts"
        )
        return records, parts
    log_line(
        f"prepare: {reader.name} has changed since an earlier attempt wrote {len(parts)} parts; beginning anew"
    )
    folder.clear()
    return reader.read(), []


def new_writer(
    config: PrepareConfig, padding: int, folder: PartFolder, parts: list[PartState]
) -> PackedWriter:
    """Return a writer that goes on behind the complete parts."""
    recipe = config.recipe
    return PackedWriter(
        folder.rows,
        recipe.context_length,
        padding,
        packing=recipe.packing,
        pairs=config.objective == "DPO",
        parts=[part.rows for part in parts],
    )


def counts_of(parts: list[PartState]) -> Counts:
    """Return the counts at the end of the last part."""
    return parts[-1].counts if parts else Counts()


def pack(
    packer: RecordPacker,
    records: Iterator[NumberedRecord],
    folder: PartFolder,
    reader: RecordReader,
    meter: "Meter",
    *,
    embeddings: Embeddings,
    templates: ChatTemplates,
) -> None:
    """Pack all records, saving each part when it is complete, and write the index of the rows.

    Raise ConfigInvalid at the first token without an embedding, and at the first conversation without a template.
    """
    writer = packer.writer

    def position() -> Position:
        return Position(reader.bytes_read, reader.digest())

    def end_part(end: Position) -> None:
        rows = dict(writer.end_part())
        state = PartState(
            inputs=folder.inputs,
            counts=packer.counts,
            source_bytes=end.source_bytes,
            source_digest=end.source_digest,
            rows=rows,
        )
        folder.save(len(writer.parts) - 1, state)
        meter.part_saved()

    with writer, closing(packer.pack(records, position, end_part)) as batches:
        for tokens in batches:
            embeddings.check(writer)
            if packer.counts.conversations:
                templates.check_conversations()
            meter.add(tokens)


def publish(folder: PartFolder, writer: PackedWriter, context: Context) -> str:
    """Seal the rows, make them the stage's output, and return their digest."""
    output = context.folder / OUTPUT
    digest = seal(folder.rows, known_digests=writer.digests())
    # An output from before has no result, or it is corrupt.
    shutil.rmtree(output, ignore_errors=True)
    # The last moment at which a replaced attempt can be kept from publishing.
    context.fence.check()
    folder.rows.rename(output)
    sync_folder(context.folder)
    folder.delete()
    return digest


class Meter:
    """Reports records, their total if it can be estimated, and tokens per second of this process as progress."""

    def __init__(
        self, progress: ProgressReporter, reader: RecordReader, counts: Counts
    ) -> None:
        self.tokens_per_second = 0.0
        self._progress = progress
        self._reader = reader
        self._counts = counts
        self._tokens = 0
        self._started = time.monotonic()
        self._total = progress.now.total
        self._total_is_known = self._total is not None
        progress.update(step=counts.records, note="tokenizing and packing")

    def add(self, tokens: int) -> None:
        """Report the tokens of a batch."""
        self._tokens += tokens
        self.tokens_per_second = self._tokens / max(
            time.monotonic() - self._started, 1e-9
        )
        if not self._total_is_known:
            self._total = (
                self._reader.estimated_total(self._counts.records) or self._total
            )
        self._progress.update(
            step=self._counts.records,
            total=self._total,
            tokens_per_second=self.tokens_per_second,
        )

    def part_saved(self) -> None:
        """Report that the records so far need not be tokenized again."""
        self._progress.update(
            step=self._counts.records, saved_step=self._counts.records
        )


def digest_of_inputs(
    config: PrepareConfig, base: BaseModel, templates: ChatTemplates
) -> str:
    """Return a digest of all that determines the rows besides the records: config, tokenizer, libraries and code."""
    libraries = [version(name) for name in ("tokenizers", "transformers", "jinja2")]
    folder = Path(data.__file__).parent
    code = {
        path.relative_to(folder).as_posix(): digest_file(path)
        for path in sorted(folder.rglob("*.py"))
    }
    inputs = {
        "config": config.model_dump(
            mode="json", exclude={"start_from", "training", "held_out"}
        ),
        "model": base.digest,
        # The manifest may name a file, which may have changed since an earlier attempt.
        "templates": dict(templates.by_name),
        "libraries": libraries,
        "code": code,
    }
    return hashlib.sha256(canonical_json(inputs)).hexdigest()


def is_output_valid(
    result: StageResult, config: PrepareConfig, environment: Environment
) -> bool:
    """Return whether the packed rows are intact; read every byte of them."""
    return matches_digest(
        environment.stage_dir("prepare", config.identity) / OUTPUT, result.digest
    )
