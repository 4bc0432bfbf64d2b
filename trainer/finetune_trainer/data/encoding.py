"""Format a record's fields as one text, and tokenize the text with a loss mask.

Prompt and completion are concatenated unchanged and tokenized as one text, as log-likelihood evaluation does.
The split between them therefore never changes the tokens. A token is in the loss if it holds at least one
character of the completion.

A space between the two belongs at the start of the completion. At the end of the prompt it would become part of
the completion's first token, and a model that is given the prompt alone never sees that token.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.processors import Sequence

from finetune_trainer.data.chat import ChatTemplate, Span
from finetune_trainer.data.conversations import conversation_of
from finetune_trainer.data.documents import Document
from finetune_trainer.data.records import (
    SHAPES,
    SUPPORTED_SHAPES,
    Fields,
    InvalidRecord,
    Shape,
    check_not_blank,
    complete_shapes,
    text_of,
)
from finetune_trainer.data.token_bytes import TokenBytes

Positions = NDArray[np.int64]
_ZERO: Positions = np.zeros(1, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class TextExample:
    """One text to train on."""

    text: str
    loss_spans: tuple[Span, ...]
    """Character ranges that are in the loss, in order. The position after the last character stands for EOS."""
    has_special_tokens: bool
    """Whether the text already contains BOS and EOS, because a chat template wrote them."""


class RecordFormatter:
    """Formats records as text examples; all records must have the shape of the first."""

    def __init__(self, chat: ChatTemplate, shape: Shape | None = None) -> None:
        self._chat = chat
        self.shape: Shape | None = shape
        """The shape of the records so far."""

    def format(self, fields: Fields) -> tuple[TextExample]:
        """Return the text example of one record.

        Raises InvalidRecord if the fields do not have the data set's shape, or if there is nothing to learn.
        """
        shape = self._shape_of(fields)
        match shape:
            case "messages":
                example = self._conversation(fields)
            case "prompt and completion":
                prompt, completion = text_of(fields, "prompt"), text_of(fields, "completion")
                check_not_blank(completion, "completion")
                example = TextExample(
                    prompt + completion,
                    ((len(prompt), len(prompt + completion) + 1),),
                    has_special_tokens=False,
                )
            case "text":
                text = text_of(fields, "text")
                check_not_blank(text, "text")
                example = TextExample(text, ((0, len(text) + 1),), has_special_tokens=False)
            case _:
                raise AssertionError(shape)
        self.shape = shape
        return (example,)

    def _conversation(self, fields: Fields) -> TextExample:
        text, spans = self._chat.render(conversation_of(fields))
        text_of(
            {"text": text}, "text", "the rendered conversation's "
        )  # arguments may hold lone surrogates, too
        return TextExample(text, spans, has_special_tokens=True)

    def _shape_of(self, fields: Fields) -> Shape:
        names = {name for name, value in fields.items() if value is not None}
        found = complete_shapes(names, "SFT")
        if self.shape in found and len(found) == 1:
            return self.shape
        match found:
            case [shape] if self.shape is None:
                return shape
            case [shape]:
                raise InvalidRecord(
                    f"has {shape} where earlier records have {self.shape}: use one shape per data set"
                )
            case []:
                raise InvalidRecord(_missing_fields(fields, names, self.shape))
            case _:
                raise InvalidRecord(
                    f"has {' and also '.join(found)}: keep only one of them in the file"
                )


def _missing_fields(fields: Fields, names: set[str], shape: Shape | None) -> str:
    if names.issuperset(("chosen", "rejected")):
        missing = SHAPES[shape][0] if shape else "completion"
        return f"has chosen and rejected, but no {missing}: set train.objective to DPO"
    if shape is None and "prompt" in names | fields.keys():
        shape = "prompt and completion"
    for name in SHAPES[shape] if shape else ():
        if name not in names:
            return f"{name} is {'null' if name in fields else 'missing'}"
    return f"needs {SUPPORTED_SHAPES['SFT']}; it has {', '.join(sorted(map(str, fields)))[:80] or 'nothing'}"


class Encoder:
    """Tokenizes text examples with a fast tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._backend: Tokenizer = tokenizer.backend_tokenizer
        _include_spaces_in_offsets(self._backend.post_processor)
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = tokenizer.split_special_tokens
        self._token_bytes = TokenBytes.of(self._backend)
        self._bos: int | None = tokenizer.bos_token_id
        self._eos: int | None = tokenizer.eos_token_id
        self.boundary_tokens = 0
        """Examples in which a token of the loss also holds characters that are not in the loss."""

    def encode(self, examples: list[TextExample]) -> Iterator[Document]:
        """Yield one document for each example; either all of them have special tokens, or none has."""
        texts, adds = [example.text for example in examples], not examples[0].has_special_tokens
        if self._token_bytes is None:
            encodings = self._backend.encode_batch(texts, add_special_tokens=adds)
            located = map(_with_offsets, encodings, examples)
        else:
            encodings = self._backend.encode_batch_fast(texts, add_special_tokens=adds)
            located = map(self._with_bytes, encodings, examples)
        for example, tokens in zip(examples, located, strict=True):
            yield self._document(
                tokens if example.has_special_tokens else self._with_one_eos(tokens)
            )

    def _with_bytes(self, encoding: Any, example: TextExample) -> "_Located":
        """Return the tokens with positions in the text's bytes, or where they are not the text, in its characters."""
        tokens, text, adds = encoding.ids, example.text.encode(), not example.has_special_tokens
        ends = self._token_bytes.ends(tokens, text, has_added=adds) if self._token_bytes else None
        if ends is None:
            return _with_offsets(
                self._backend.encode(example.text, add_special_tokens=adds), example
            )
        spans = example.loss_spans
        if len(text) != len(example.text):
            spans = tuple(_byte_span(example.text, span) for span in spans)
        starts = np.concatenate((_ZERO, ends[:-1])) if len(ends) else ends
        return _Located(tokens, starts, ends, len(text), spans)

    def _with_one_eos(self, located: "_Located") -> "_Located":
        """Remove a second BOS and end with exactly one EOS, whose position is the one after the text."""
        tokens, starts, ends, length, spans = located
        if self._bos is not None and tokens[:2] == [self._bos, self._bos]:
            tokens, starts, ends = tokens[1:], starts[1:], ends[1:]
        if self._eos is not None:
            kept = len(tokens) - (tokens[-1:] == [self._eos])
            tokens = [*tokens[:kept], self._eos]
            starts, ends = np.append(starts[:kept], length), np.append(ends[:kept], length + 1)
        return _Located(tokens, starts, ends, length, spans)

    def _document(self, located: "_Located") -> Document:
        tokens, starts, ends, _, spans = located
        loss_mask = np.zeros(len(tokens), dtype=np.uint8)
        crosses_boundary = False
        for start, end in spans:
            loss_mask |= (ends > start) & (starts < end)
            crosses_boundary |= bool(((starts < start) & (ends > start)).any())
        self.boundary_tokens += crosses_boundary
        loss_mask[:1] = 0  # no earlier token predicts the first one
        return Document(np.array(tokens, dtype=np.int32), loss_mask)


class _Located(NamedTuple):
    """The tokens of one text, and where they are in it: all positions count its characters, or all its bytes."""

    tokens: list[int]
    starts: Positions
    ends: Positions
    length: int
    """Length of the text."""
    loss_spans: tuple[Span, ...]


def _with_offsets(encoding: Any, example: TextExample) -> _Located:
    """Return the tokens with the tokenizer's own offsets, which are in characters."""
    offsets: Positions = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
    return _Located(
        encoding.ids, offsets[:, 0], offsets[:, 1], len(example.text), example.loss_spans
    )


def _byte_span(text: str, span: Span) -> Span:
    """Return the range in the text's bytes for one in its characters. The position behind the text stands for EOS."""
    start, end = (len(text[:position].encode()) + max(0, position - len(text)) for position in span)
    return start, end


def _include_spaces_in_offsets(processor: Any) -> None:
    """Make a byte-level tokenizer count leading spaces in its offsets; the tokens stay the same."""
    parts: Any = processor if isinstance(processor, Sequence) else (processor,)
    for part in parts:
        if hasattr(part, "trim_offsets"):
            part.trim_offsets = False
