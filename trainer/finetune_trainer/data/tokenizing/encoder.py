"""Format a record's fields as a single text, and tokenize the text with a loss mask.

Prompt and completion are concatenated unchanged and tokenized as one text, as log-likelihood evaluation does.
The split between them therefore never changes the tokens. A token is in the loss if it holds a character of the
completion.

A space between prompt and completion belongs at the start of the completion. At the end of the prompt it would become
part of the completion's first token, and a model that is given the prompt alone never sees that token.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.processors import Sequence

from finetune_trainer.contract import Objective
from finetune_trainer.data.documents import Document
from finetune_trainer.data.records.chat_template import ChatTemplate
from finetune_trainer.data.records.compiled_template import Span
from finetune_trainer.data.records.conversations import Conversation, conversation_of
from finetune_trainer.data.records.records import (
    SHAPES,
    Fields,
    InvalidRecord,
    Shape,
    check_not_blank,
    complete_shapes,
    shortened,
    text_of,
)
from finetune_trainer.data.records.rendering import render
from finetune_trainer.data.records.suggestions import (
    answered,
    needed_columns,
    renamed,
)
from finetune_trainer.data.tokenizing.token_bytes import TokenBytes
from finetune_trainer.data.tokenizing.unknown_text import (
    UnknownText,
    unknown_sentence,
)

Positions = NDArray[np.int64]
_ZERO: Positions = np.zeros(1, dtype=np.int64)
ENDS_OF_WORDS = frozenset(".?!:;,")
_NO_TOKENS = Document(np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.uint8))


@dataclass(frozen=True, slots=True)
class TextExample:
    """A text to train on."""

    text: str
    loss_spans: tuple[Span, ...]
    """Character ranges that are in the loss, in order. The position after the last character stands for EOS."""
    has_special_tokens: bool
    """Whether the text already contains BOS and EOS, because a chat template wrote them."""


class FormattedRecord(NamedTuple):
    """The examples of a record."""

    examples: tuple[TextExample, ...]
    unrendered: tuple[str, ...] = ()
    """A sentence for each text of the record that the examples lack."""
    ends_unlearned: bool = False
    """Whether the last turns of a conversation are out of the loss."""
    glued: bool = False
    """Whether nothing separates the prompt from its completion."""


class EncodedExample(NamedTuple):
    """A text as tokens."""

    document: Document
    unknown: str = ""
    """A sentence about text for which the tokenizer has no token; empty if there is none."""
    failure: str = ""
    """The reason why the tokenizer cannot read the text; empty if it can."""


class RecordFormatter:
    """Formats records as text examples; all records must have the shape of the first."""

    def __init__(self, chat: ChatTemplate, shape: Shape | None = None) -> None:
        self._chat = chat
        self.shape: Shape | None = shape
        """The shape of the records so far."""

    def format(self, fields: Fields) -> FormattedRecord:
        """Return the text examples of a record: several if turns of a conversation have examples of their own.

        Raises InvalidRecord if the fields do not have the data set's shape, or if there is nothing to learn.
        """
        shape = self._shape_of(fields)
        match shape:
            case "messages":
                record = rendered_texts(self._chat, conversation_of(fields))
            case "prompt and completion":
                prompt = text_of(fields, "prompt")
                completion = text_of(fields, "completion")
                check_not_blank(completion, "completion")
                check_has_eos(self._chat)
                record = FormattedRecord(
                    (completed_text(prompt, completion),),
                    glued=is_glued(prompt, completion),
                )
            case "text":
                text = text_of(fields, "text")
                check_not_blank(text, "text")
                record = FormattedRecord((completed_text("", text),))
            case _:
                raise AssertionError(shape)
        self.shape = shape
        return record

    def _shape_of(self, fields: Fields) -> Shape:
        names = {name for name, value in fields.items() if value is not None}
        shapes = complete_shapes(names, "SFT")
        if not shapes:
            raise InvalidRecord(_missing_fields(fields, names, self.shape))
        if len(shapes) > 1:
            # The forms of records ask the user to choose before this.
            raise InvalidRecord(f"has {' and also '.join(shapes)}: choose one of them")
        [shape] = shapes
        if self.shape not in {None, shape}:
            raise InvalidRecord(
                f"has {shape}, but earlier records have {self.shape}: use one shape per data set"
            )
        return shape


def is_glued(prompt: str, completion: str) -> bool:
    """Return whether a word of the completion follows the last word or sentence of the prompt without a space.

    Scripts outside of ASCII may have no spaces, and a prompt may end with a mark such as [/INST].
    """
    last = prompt[-1:]
    first = completion[:1]
    ends_words = last.isalnum() or last in ENDS_OF_WORDS
    return bool(last and ends_words and first.isalnum() and (last + first).isascii())


def completed_text(prompt: str, completion: str) -> TextExample:
    """Return the example of a prompt and its completion, which is in the loss, as is the EOS after it."""
    text = prompt + completion
    completion_span = (len(prompt), len(text) + 1)
    return TextExample(text, (completion_span,), has_special_tokens=False)


def check_has_eos(chat: ChatTemplate) -> None:
    """Raise InvalidRecord if nothing would end a completion, so that the model would not learn to stop."""
    if not chat.eos:
        raise InvalidRecord(
            "the tokenizer has no EOS token, which ends a completion: "
            "set eos_token in the model's tokenizer_config.json"
        )


def rendered_texts(
    chat: ChatTemplate, conversation: Conversation, first: int = 0
) -> FormattedRecord:
    """Return the examples of a conversation; the assistant's turns from message `first` on are in the loss.

    Raise InvalidRecord if the template does not render the conversation.
    """
    rendering = render(chat, conversation, first)
    examples = []
    for example in rendering.examples:
        # Checked again: the arguments of tool calls may hold lone surrogates, and no check of a message sees them.
        text_of({"text": example.text}, "text", "the rendered conversation's ")
        examples.append(
            TextExample(example.text, example.loss_spans, has_special_tokens=True)
        )
    return FormattedRecord(
        tuple(examples), tuple(rendering.unrendered), rendering.ends_unlearned
    )


def _missing_fields(fields: Fields, names: set[str], shape: Shape | None) -> str:
    # The hint about DPO comes first: a record of pairs lacks every field of SFT, and naming a field would mislead.
    if names.issuperset(("chosen", "rejected")):
        missing = SHAPES[shape].required[0] if shape else "completion"
        return f"has chosen and rejected, but no {missing}: set train.objective to DPO"
    if shape is None and "prompt" in names | fields.keys():
        shape = "prompt and completion"
    if names.isdisjoint(fields) and "messages" in fields:
        return "messages is null: write a list of messages, or remove the record"
    required = SHAPES[shape].required if shape else ()
    for name in required:
        if name not in names:
            return missing_field(name, fields)
    return needed_shapes("SFT", fields)


def missing_field(name: str, fields: Fields) -> str:
    """Return the reason why a record without a value in a required field is invalid."""
    if name in fields:
        return f"{name} is null: write a text, or remove the record"
    fix = renamed(name, fields)
    if not fix and name == "completion":
        fix = answered(fields)
    return f"{name} is missing{fix}"


def needed_shapes(objective: Objective, fields: Fields) -> str:
    """Return the reason why a record that has no shape of the objective is invalid."""
    return needed_columns(objective, [str(name) for name in fields])


class Encoder:
    """Tokenizes text examples with a fast tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._backend: Tokenizer = tokenizer.backend_tokenizer
        # A token's leading space may be the end of the prompt. Trimmed offsets would hide that the token spans both.
        _include_spaces_in_offsets(self._backend.post_processor)
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = tokenizer.split_special_tokens
        self._token_bytes = TokenBytes.of(self._backend)
        self._unknown = UnknownText(self._backend)
        self._bos: int | None = tokenizer.bos_token_id
        self._eos: int | None = tokenizer.eos_token_id
        self.boundary_tokens = 0
        """Examples in which a token of the loss also holds characters that are not in the loss."""

    @property
    def unknown_token(self) -> int | None:
        """Id of the token for unknown text; None if the tokenizer has none."""
        return self._unknown.token

    def encode(self, examples: list[TextExample]) -> Iterator[EncodedExample]:
        """Yield each example as tokens; either all of them have special tokens, or none has."""
        try:
            located = self._located(examples)
        except Exception:
            if len(examples) == 1:
                raise
            # Only some of the texts are at fault.
            for example in examples:
                yield self._encoded_alone(example)
            return
        for example, tokens in zip(examples, located, strict=True):
            yield self._encoded(example, tokens)

    def _encoded_alone(self, example: TextExample) -> EncodedExample:
        try:
            [encoded] = self.encode([example])
        except Exception as error:  # noqa: BLE001  the library has no class of its own for its errors
            reason = f"the tokenizer cannot read it: {shortened(str(error), 160)}"
            return EncodedExample(_NO_TOKENS, failure=reason)
        return encoded

    def _located(self, examples: list[TextExample]) -> "Iterable[_Located]":
        texts = [example.text for example in examples]
        adds = not examples[0].has_special_tokens
        if self._token_bytes is None:
            encodings = self._backend.encode_batch(texts, add_special_tokens=adds)
            return map(_with_offsets, encodings, examples)
        # The fast call computes no offsets; the bytes of the tokens replace them.
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=adds)
        return map(partial(self._with_bytes, self._token_bytes), encodings, examples)

    def _encoded(self, example: TextExample, located: "_Located") -> EncodedExample:
        unknown = ""
        if located.counts_characters:
            word = self._unknown.first(
                example.text, located.tokens, located.starts, located.ends
            )
            unknown = unknown_sentence(word) if word else ""
        if not example.has_special_tokens:
            located = self._with_one_eos(located)
        return EncodedExample(self._document(located), unknown)

    def _with_bytes(
        self, token_bytes: TokenBytes, encoding: Any, example: TextExample
    ) -> "_Located":
        """Return the tokens with positions in the text's bytes; if they are not the text, in its characters."""
        tokens = encoding.ids
        text = example.text.encode()
        adds = not example.has_special_tokens
        ends = token_bytes.ends(tokens, text, has_added=adds)
        if ends is None:
            # This text has a token whose bytes are not in the text. Only the tokenizer knows where it belongs.
            encoding = self._backend.encode(example.text, add_special_tokens=adds)
            return _with_offsets(encoding, example)
        spans = example.loss_spans
        if len(text) != len(example.text):
            spans = tuple(_byte_span(example.text, span) for span in spans)
        # A token begins where the token before it ends.
        starts = np.concatenate((_ZERO, ends[:-1])) if len(ends) else ends
        return _Located(tokens, starts, ends, len(text), spans)

    def _with_one_eos(self, located: "_Located") -> "_Located":
        """Remove a second BOS and end with exactly one EOS, whose position is directly after the text."""
        tokens, starts, ends, length, spans, _ = located
        if self._bos is not None and tokens[:2] == [self._bos, self._bos]:
            # The text begins with BOS, and the tokenizer wrote another BOS before it.
            tokens = tokens[1:]
            starts = starts[1:]
            ends = ends[1:]
        if self._eos is not None:
            if tokens[-1:] == [self._eos]:
                # An EOS that the tokenizer wrote has no position in the text, so it is replaced.
                tokens = tokens[:-1]
                starts = starts[:-1]
                ends = ends[:-1]
            tokens = [*tokens, self._eos]
            # np.append takes three times as long.
            starts = np.concatenate((starts, (length,)))
            ends = np.concatenate((ends, (length + 1,)))
        return _Located(tokens, starts, ends, length, spans)

    def _document(self, located: "_Located") -> Document:
        tokens, starts, ends, _, spans, _ = located
        loss_mask = np.zeros(len(tokens), dtype=np.uint8)
        crosses_boundary = False
        for start, end in spans:
            ends_inside = ends > start
            loss_mask |= ends_inside & (starts < end)
            crosses_start = ends_inside & (starts < start)
            crosses_boundary |= bool(crosses_start.any())
        self.boundary_tokens += crosses_boundary
        # No earlier token predicts the first token.
        loss_mask[:1] = 0
        return Document(np.array(tokens, dtype=np.int32), loss_mask)


class _Located(NamedTuple):
    """The tokens of a text and their positions in it. All positions count its characters, or all count its bytes."""

    tokens: list[int]
    starts: Positions
    ends: Positions
    length: int
    """Length of the text."""
    loss_spans: tuple[Span, ...]
    counts_characters: bool = False
    """Whether the positions are the tokenizer's own: then its tokens may not stand for the whole text."""


def _with_offsets(encoding: Any, example: TextExample) -> _Located:
    """Return the tokens with the tokenizer's own offsets, which are in characters."""
    # Reshaped, because a text without tokens gives an empty array of one dimension.
    offsets: Positions = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
    return _Located(
        tokens=encoding.ids,
        starts=offsets[:, 0],
        ends=offsets[:, 1],
        length=len(example.text),
        loss_spans=example.loss_spans,
        counts_characters=True,
    )


def _byte_span(text: str, span: Span) -> Span:
    """Return the range in the text's bytes for a range in its characters."""
    start, end = span
    return _byte_position(text, start), _byte_position(text, end)


def _byte_position(text: str, position: int) -> int:
    # The position behind the text stands for EOS, in characters and in bytes.
    behind_text = max(0, position - len(text))
    return len(text[:position].encode()) + behind_text


def _include_spaces_in_offsets(processor: Any) -> None:
    """Make a byte-level tokenizer count leading spaces in its offsets; the tokens stay the same."""
    parts: Any = processor if isinstance(processor, Sequence) else (processor,)
    for part in parts:
        if hasattr(part, "trim_offsets"):
            part.trim_offsets = False
