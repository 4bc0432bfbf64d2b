"""From a record's fields to one text, and from that to tokens of which some are counted.

The rule at the boundary between prompt and completion: both are put together as they are and tokenised as one
text, just as a log-likelihood evaluation does, so the split never changes the tokens. A token is counted if
it holds at least one character of the completion. A space between the two therefore belongs to the
beginning of the completion: at the end of the prompt it would be part of the completion's first token, which
a model that is given the prompt alone never sees.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers.processors import Sequence

from finetune_trainer.data.chat import ChatTemplate, Message, Span
from finetune_trainer.data.packing import Document
from finetune_trainer.data.records import SHAPES, WANTED, Fields, InvalidRecord, Shape, complete_shapes, kind_of


@dataclass(frozen=True, slots=True)
class TextExample:
    """One text to learn from."""

    text: str
    loss_spans: tuple[Span, ...]
    """Which characters are to be learnt, in order; the one behind the last stands for EOS."""
    has_special_tokens: bool
    """Whether BOS and EOS stand in the text already, where they belong (a chat template wrote them)."""


class RecordFormatter:
    """Makes passages of records, all of which must have the shape of the first."""

    def __init__(self, chat: ChatTemplate) -> None:
        self._chat = chat
        self.shape: Shape | None = None
        """Of the records so far."""

    def format(self, fields: Fields) -> TextExample:
        """Raise Unusable where the fields are not those of the data set's shape, or hold nothing to learn."""
        shape = self._shape_of(fields)
        match shape:
            case "messages":
                passage = TextExample(*self._chat.render(_messages(fields["messages"])), has_special_tokens=True)
            case "prompt and completion":
                prompt, completion = _text(fields, "prompt"), _text(fields, "completion")
                _not_blank(completion, "completion")
                passage = TextExample(
                    prompt + completion, ((len(prompt), len(prompt + completion) + 1),), has_special_tokens=False
                )
            case "text":
                text = _text(fields, "text")
                _not_blank(text, "text")
                passage = TextExample(text, ((0, len(text) + 1),), has_special_tokens=False)
        self.shape = shape
        return passage

    def _shape_of(self, fields: Fields) -> Shape:
        names = {name for name, value in fields.items() if value is not None}
        found = complete_shapes(names)
        if self.shape in found and len(found) == 1:
            return self.shape
        match found:
            case [shape] if self.shape is None:
                return shape
            case [shape]:
                raise InvalidRecord(f"has {shape} where the records before have {self.shape}: one file holds one shape")
            case []:
                raise InvalidRecord(_what_is_missing(fields, names, self.shape))
            case _:
                raise InvalidRecord(f"has {' and also '.join(found)}: leave only one of them in the file")


def _what_is_missing(fields: Fields, names: set[str], shape: Shape | None) -> str:
    if shape is None and "prompt" in names | fields.keys():
        shape = "prompt and completion"
    for name in SHAPES[shape] if shape else ():
        if name not in names:
            return f"{name} is {'null' if name in fields else 'missing'}"
    return f"needs {WANTED}; it has {', '.join(sorted(map(str, fields)))[:80] or 'nothing'}"


def _text(fields: Fields, name: str, where: str = "") -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise InvalidRecord(f"{where}{name} must be a string, it is {kind_of(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRecord(
            f"{where}{name}: character {error.start + 1} is {_what_it_was(value[error.start])}: save the file as UTF-8"
        ) from None
    return value


def _what_it_was(surrogate: str) -> str:
    escaped_bytes = range(0xDC80, 0xDD00)
    code = ord(surrogate)
    return f"byte 0x{code - 0xDC00:02x}, not UTF-8" if code in escaped_bytes else f"half a character (\\u{code:04x})"


def _not_blank(text: str, name: str) -> None:
    if not text.strip():
        raise InvalidRecord(f"{name} is empty: there is nothing to learn")


def _messages(value: object) -> list[Message]:
    if not isinstance(value, list):
        raise InvalidRecord(f"messages must be a list of {{role, content}}, it is {kind_of(value)}")
    messages = [_message(message, f"messages[{at}]") for at, message in enumerate(value)]
    roles = list(dict.fromkeys(message["role"] for message in messages))
    if "assistant" not in roles:
        raise InvalidRecord(f"no message has the role assistant (roles: {', '.join(roles)[:60] or 'none'})")
    return messages


def _message(value: object, where: str) -> Message:
    if not isinstance(value, dict):
        raise InvalidRecord(f"{where} must be an object with role and content, it is {kind_of(value)}")
    for name in ("role", "content"):
        if value.get(name) is None:
            raise InvalidRecord(f"{where}.{name} is missing")
    message = {"role": _text(value, "role", f"{where}."), "content": _text(value, "content", f"{where}.")}
    if message["role"] == "assistant":
        _not_blank(message["content"], f"{where}.content")
    return message


class Encoder:
    """Makes documents of passages with a fast tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        _keep_spaces(tokenizer.backend_tokenizer.post_processor)
        self._bos: int | None = tokenizer.bos_token_id
        self._eos: int | None = tokenizer.eos_token_id
        self.boundary_tokens = 0
        """Passages in which a counted token also holds characters that are not to be learnt."""

    def encode(self, passages: list[TextExample]) -> Iterator[Document]:
        """Give one document for each passage; all must be framed, or none."""
        encoded = self._tokenizer(
            [passage.text for passage in passages],
            add_special_tokens=not passages[0].has_special_tokens,
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        for passage, tokens, offsets in zip(passages, encoded["input_ids"], encoded["offset_mapping"], strict=True):
            if not passage.has_special_tokens:
                self._frame(tokens, offsets, len(passage.text))
            yield self._document(passage, tokens, np.array(offsets, dtype=np.int64).reshape(-1, 2))

    def _frame(self, tokens: list[int], offsets: list[Span], length: int) -> None:
        """Have BOS once, if the tokenizer writes it, and EOS once, standing for the end of the text."""
        if self._bos is not None and tokens[:2] == [self._bos, self._bos]:
            del tokens[0], offsets[0]
        if self._eos is not None:
            if tokens[-1:] == [self._eos]:
                del tokens[-1], offsets[-1]
            tokens.append(self._eos)
            offsets.append((length, length + 1))

    def _document(self, passage: TextExample, tokens: list[int], offsets: np.ndarray[Any, Any]) -> Document:
        starts, ends = offsets[:, 0], offsets[:, 1]
        counted = np.zeros(len(tokens), dtype=np.uint8)
        torn = False
        for first, behind in passage.loss_spans:
            counted |= (ends > first) & (starts < behind)
            torn |= bool(((starts < first) & (ends > first)).any())
        self.boundary_tokens += torn
        counted[:1] = 0
        return Document(np.array(tokens, dtype=np.int32), counted)


def _keep_spaces(processor: Any) -> None:
    """Have a byte-level tokenizer tell where its tokens are with the spaces in them; changes no token."""
    parts: Any = processor if isinstance(processor, Sequence) else (processor,)
    for part in parts:
        if hasattr(part, "trim_offsets"):
            part.trim_offsets = False
