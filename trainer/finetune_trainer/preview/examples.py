"""Show records as the model sees them: the text of their tokens, and which of these tokens are learned."""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from finetune_trainer.contract import PrepareConfig
from finetune_trainer.contract.preview import PreviewedExample, Segment
from finetune_trainer.data.documents import Document
from finetune_trainer.data.reading.datasets import NumberedRecord, RecordReader
from finetune_trainer.data.records.records import Shape
from finetune_trainer.data.tokenizing.record_tokenizer import RecordTokenizer


def examples_of(
    reader: RecordReader, tokenizer: Any, config: PrepareConfig, number: int
) -> tuple[PreviewedExample, ...]:
    """Return the examples of the first `number` records that prepare would use."""
    examples: list[PreviewedExample] = []
    if not number:
        return ()
    record_tokenizer = RecordTokenizer(tokenizer, config.recipe, config.objective)
    used = 0
    dataset = 0
    shape: Shape | None = None
    for record in reader.read():
        if record.dataset != dataset:
            # Each data set has a shape of its own.
            dataset = record.dataset
            shape = None
        batch = record_tokenizer.tokenize([record.fields], shape)
        shape = batch.shape
        [outcome] = batch.outcomes
        if not isinstance(outcome, tuple):
            continue
        examples += [
            _example(record, document, tokenizer, truncated=bool(batch.truncated))
            for document in outcome
        ]
        used += 1
        if used == number:
            break
    return tuple(examples)


def _example(
    record: NumberedRecord, document: Document, tokenizer: Any, *, truncated: bool
) -> PreviewedExample:
    return PreviewedExample(
        file=record.file,
        line=record.line,
        segments=tuple(_segments(document, tokenizer)),
        tokens=len(document.tokens),
        learned_tokens=int(document.loss_mask.sum()),
        truncated=truncated,
    )


def _segments(document: Document, tokenizer: Any) -> Iterator[Segment]:
    """Yield the text of consecutive tokens that are all learned, or all not learned, in their order."""
    tokens = document.tokens.tolist()
    flags = document.loss_mask.tolist()
    shown = ""
    end = 0
    for learned, group in groupby(flags):
        end += len(list(group))
        # Decoded from the start: a tokenizer may drop the space of the first token that it decodes.
        text = _decoded(tokens[:end], tokenizer)
        yield Segment(text=text[len(shown) :], learned=bool(learned))
        shown = text


def _decoded(tokens: list[int], tokenizer: Any) -> str:
    text: str = tokenizer.backend_tokenizer.decode(tokens, skip_special_tokens=False)
    return text
