"""Format a record's fields as one text, and tokenize the text with a loss mask.

Prompt and completion are concatenated unchanged and tokenized as one text, as log-likelihood evaluation does.
The split between them therefore never changes the tokens. A token is in the loss if it holds at least one
character of the completion.

A space between the two belongs at the start of the completion. At the end of the prompt it would become part of
the completion's first token, and a model that is given the prompt alone never sees that token.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers.processors import Sequence

from finetune_trainer.data.chat import ChatTemplate, Span
from finetune_trainer.data.conversations import conversation_of
from finetune_trainer.data.packing import Document
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

    def format(self, fields: Fields) -> TextExample:
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
                    prompt + completion, ((len(prompt), len(prompt + completion) + 1),), has_special_tokens=False
                )
            case "text":
                text = text_of(fields, "text")
                check_not_blank(text, "text")
                example = TextExample(text, ((0, len(text) + 1),), has_special_tokens=False)
        self.shape = shape
        return example

    def _conversation(self, fields: Fields) -> TextExample:
        text, spans = self._chat.render(conversation_of(fields))
        text_of({"text": text}, "text", "the rendered conversation's ")  # arguments may hold lone surrogates, too
        return TextExample(text, spans, has_special_tokens=True)

    def _shape_of(self, fields: Fields) -> Shape:
        names = {name for name, value in fields.items() if value is not None}
        found = complete_shapes(names)
        if self.shape in found and len(found) == 1:
            return self.shape
        match found:
            case [shape] if self.shape is None:
                return shape
            case [shape]:
                raise InvalidRecord(f"has {shape} where earlier records have {self.shape}: use one shape per data set")
            case []:
                raise InvalidRecord(_missing_fields(fields, names, self.shape))
            case _:
                raise InvalidRecord(f"has {' and also '.join(found)}: keep only one of them in the file")


def _missing_fields(fields: Fields, names: set[str], shape: Shape | None) -> str:
    if shape is None and "prompt" in names | fields.keys():
        shape = "prompt and completion"
    for name in SHAPES[shape] if shape else ():
        if name not in names:
            return f"{name} is {'null' if name in fields else 'missing'}"
    return f"needs {SUPPORTED_SHAPES}; it has {', '.join(sorted(map(str, fields)))[:80] or 'nothing'}"


class Encoder:
    """Tokenizes text examples with a fast tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        _include_spaces_in_offsets(tokenizer.backend_tokenizer.post_processor)
        self._bos: int | None = tokenizer.bos_token_id
        self._eos: int | None = tokenizer.eos_token_id
        self.boundary_tokens = 0
        """Examples in which a token of the loss also holds characters that are not in the loss."""

    def encode(self, examples: list[TextExample]) -> Iterator[Document]:
        """Yield one document for each example; either all of them have special tokens, or none has."""
        encoded = self._tokenizer(
            [example.text for example in examples],
            add_special_tokens=not examples[0].has_special_tokens,
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        for example, tokens, offsets in zip(examples, encoded["input_ids"], encoded["offset_mapping"], strict=True):
            if not example.has_special_tokens:
                self._normalize_special_tokens(tokens, offsets, len(example.text))
            yield self._document(example, tokens, np.array(offsets, dtype=np.int64).reshape(-1, 2))

    def _normalize_special_tokens(self, tokens: list[int], offsets: list[Span], length: int) -> None:
        """Remove a second BOS and end with exactly one EOS, whose offset is the position after the text."""
        if self._bos is not None and tokens[:2] == [self._bos, self._bos]:
            del tokens[0], offsets[0]
        if self._eos is not None:
            if tokens[-1:] == [self._eos]:
                del tokens[-1], offsets[-1]
            tokens.append(self._eos)
            offsets.append((length, length + 1))

    def _document(self, example: TextExample, tokens: list[int], offsets: np.ndarray[Any, Any]) -> Document:
        starts, ends = offsets[:, 0], offsets[:, 1]
        loss_mask = np.zeros(len(tokens), dtype=np.uint8)
        crosses_boundary = False
        for start, end in example.loss_spans:
            loss_mask |= (ends > start) & (starts < end)
            crosses_boundary |= bool(((starts < start) & (ends > start)).any())
        self.boundary_tokens += crosses_boundary
        loss_mask[:1] = 0  # no earlier token predicts the first one
        return Document(np.array(tokens, dtype=np.int32), loss_mask)


def _include_spaces_in_offsets(processor: Any) -> None:
    """Make a byte-level tokenizer count leading spaces in its offsets; the tokens stay the same."""
    parts: Any = processor if isinstance(processor, Sequence) else (processor,)
    for part in parts:
        if hasattr(part, "trim_offsets"):
            part.trim_offsets = False
