"""Read the records as `prepare` does, count what becomes of them, and show the first ones as the model sees them."""

import tempfile
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path

from finetune_trainer.contract import Environment, PrepareConfig
from finetune_trainer.contract.preview import (
    PreviewCounts,
    PreviewReport,
    PreviewRequest,
)
from finetune_trainer.data.documents import Counts
from finetune_trainer.data.packing.writer import PackedWriter
from finetune_trainer.data.reading.datasets import NumberedRecord, RecordReader
from finetune_trainer.data.reading.record_batches import Position
from finetune_trainer.data.record_packer import (
    RecordPacker,
    Summary,
    unknown_fraction,
)
from finetune_trainer.preview.examples import examples_of
from finetune_trainer.preview.sources import Sources
from finetune_trainer.runtime.errors import ConfigInvalid, StageError
from finetune_trainer.runtime.progress.progress import log_line
from finetune_trainer.stages.prepare import (
    log_unused,
    warn_about_default,
    warn_about_turns,
)
from finetune_trainer.training.memory_estimate import estimate_memory
from finetune_trainer.training.requirements import Embeddings, check_validation

SAMPLE = 1000
"""Records that are read of a data set in a store."""


def preview(request: PreviewRequest, environment: Environment) -> PreviewReport:
    """Return what prepare would make of the data, and the reasons why it would fail."""
    config = request.config
    sources = Sources()
    if not request.records:
        sources.open_model(config, environment)
        return _with_memory(PreviewReport(), request, sources)
    sources.open_all(config, environment)
    counts = Counts()
    report = PreviewReport(is_sample=sources.is_sample)
    try:
        reader = _reader(sources, config)
        if sources.embeddings is not None and reader is not None:
            report = _read(request, sources, sources.embeddings, counts, reader)
    except ConfigInvalid as error:
        # A token that occurs has no embedding.
        sources.add("model.uri", config.model.uri, error)
    except StageError as error:
        sources.add_data_error(error)
    report = report.model_copy(
        update={
            "problems": tuple(sources.problems),
            "not_looked_at": tuple(sources.not_looked_at),
            "notes": tuple(sources.notes),
            "invalid_records": tuple(reason.text() for reason in counts.reasons),
        }
    )
    return _with_memory(report, request, sources)


def _with_memory(
    report: PreviewReport, request: PreviewRequest, sources: Sources
) -> PreviewReport:
    """Return the report with the memory of the training, or the reason why it is not known."""
    recipe = request.config.training
    if not request.memory or recipe is None or sources.base is None:
        return report
    length = request.config.recipe.context_length
    try:
        memory = estimate_memory(sources.base, recipe, length)
    except ConfigInvalid as error:
        return report.model_copy(update={"memory_unknown": str(error)})
    return report.model_copy(update={"memory": memory})


def _reader(sources: Sources, config: PrepareConfig) -> RecordReader | None:
    """Return the reader of the data sets; None with a problem if their files or columns cannot be read."""
    if not sources.datasets:
        return None
    try:
        return RecordReader(
            sources.datasets, config.objective, config.recipe.unrendered, log_line
        )
    except StageError as error:
        sources.add_data_error(error)
        return None


def _read(
    request: PreviewRequest,
    sources: Sources,
    embeddings: Embeddings,
    counts: Counts,
    reader: RecordReader,
) -> PreviewReport:
    """Return the report about all records, or about the first SAMPLE; raise StageError as prepare would."""
    config = request.config
    tokenizer = sources.tokenizer
    examples = examples_of(reader, tokenizer, config, request.examples)
    with tempfile.TemporaryDirectory() as folder:
        writer = PackedWriter(
            Path(folder),
            config.recipe.context_length,
            embeddings.padding_token(),
            packing=config.recipe.packing,
            pairs=config.objective == "DPO",
        )
        packer = RecordPacker(config, tokenizer, sources.datasets, writer, counts)
        records: Iterator[NumberedRecord] = reader.read()
        if sources.is_sample:
            records = islice(records, SAMPLE)
        _pack(packer, records, reader, embeddings)
        if sources.is_sample:
            reader.log_final_notes()
        if counts.records:
            warn_about_turns(counts, tokenizer)
        if counts.conversations and sources.templates:
            sources.templates.check_conversations()
            warn_about_default(sources.templates.origin, config.model.uri)
    try:
        summary = Summary(config, reader.name, writer, counts)
        log_unused(summary, tokenizer)
        summary.raise_if_unusable()
        if not writer.rows("validation") and not sources.is_sample:
            check_validation(
                config.training,
                summary.no_validation_rows(),
                held_out=config.held_out,
            )
    except StageError as error:
        sources.add_data_error(error)
    return PreviewReport(
        counts=_counts(counts, writer, reader.unread_words),
        is_sample=sources.is_sample,
        examples=examples,
    )


def _pack(
    packer: RecordPacker,
    records: Iterator[NumberedRecord],
    reader: RecordReader,
    embeddings: Embeddings,
) -> None:
    """Pack all records; a part's rows are deleted by the caller, so that its end needs no record of it."""

    def position() -> Position:
        return Position(reader.bytes_read, "")

    def end_part(_end: Position) -> None:
        packer.writer.end_part()

    with packer.writer, closing(packer.pack(records, position, end_part)) as batches:
        for _ in batches:
            embeddings.check(packer.writer)


def _counts(counts: Counts, writer: PackedWriter, unread_words: int) -> PreviewCounts:
    return PreviewCounts(
        records=counts.records,
        invalid=counts.invalid,
        truncated=counts.truncated,
        dropped=counts.dropped,
        split=counts.split,
        unrendered=counts.unrendered,
        unread_words=unread_words,
        unused=counts.unused,
        train_rows=writer.rows("train"),
        validation_rows=writer.rows("validation"),
        train_tokens=writer.tokens("train"),
        train_targets=writer.targets("train"),
        unknown_fraction=unknown_fraction(counts, writer),
    )
