"""Format a preference record: two texts that share a prompt, of which one completion was chosen and one rejected.

The records are those that TRL accepts. Completions are texts or lists of messages. The prompt is a field of the same
kind, or it is what both completions begin with.
"""

import re
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from finetune_trainer.data.chat import ChatTemplate
from finetune_trainer.data.conversations import (
    Conversation,
    Message,
    check_has_assistant,
    messages_of,
    tools_of,
)
from finetune_trainer.data.encoding import TextExample
from finetune_trainer.data.records import (
    SUPPORTED_SHAPES,
    Fields,
    InvalidRecord,
    Shape,
    check_not_blank,
    kind_of,
    text_of,
)

COMPLETIONS = ("chosen", "rejected")


class PreferenceFormatter:
    """Formats preference records as two text examples; all records must have the shape of the first."""

    def __init__(self, chat: ChatTemplate, shape: Shape | None = None) -> None:
        self._chat = chat
        self.shape: Shape | None = shape
        """The shape of the records so far."""

    def format(self, fields: Fields) -> tuple[TextExample, TextExample]:
        """Return the text examples of the chosen and the rejected completion.

        Raises InvalidRecord if the fields do not have the data set's shape, or if there is nothing to prefer.
        """
        shape = self._shape_of(fields)
        is_text = shape == "chosen and rejected texts"
        examples = _text_examples(fields) if is_text else self._conversations(fields)
        self.shape = shape
        return examples

    def _shape_of(self, fields: Fields) -> Shape:
        for name in COMPLETIONS:
            if fields.get(name) is None:
                raise InvalidRecord(_missing(name, fields))
        chosen, rejected = (fields[name] for name in COMPLETIONS)
        if isinstance(chosen, list) != isinstance(rejected, list):
            raise InvalidRecord(
                f"chosen is {kind_of(chosen)} and rejected is {kind_of(rejected)}: write both as text or as messages"
            )
        shape: Shape = (
            "chosen and rejected messages"
            if isinstance(chosen, list)
            else "chosen and rejected texts"
        )
        if self.shape not in {None, shape}:
            raise InvalidRecord(
                f"has {shape} where earlier records have {self.shape}: use one shape per data set"
            )
        return shape

    def _conversations(self, fields: Fields) -> tuple[TextExample, TextExample]:
        prompt, chosen, rejected = _messages(fields)
        tools = tools_of(fields)
        return (
            self._conversation("chosen", prompt, chosen, tools),
            self._conversation("rejected", prompt, rejected, tools),
        )

    def _conversation(
        self, name: str, prompt: list[Message], completion: list[Message], tools: list[Any] | None
    ) -> TextExample:
        try:
            text, spans = self._chat.render(Conversation(prompt + completion, tools), len(prompt))
            text_of(
                {"text": text}, "text", "the rendered conversation's "
            )  # arguments may hold lone surrogates, too
        except InvalidRecord as error:
            raise InvalidRecord(f"prompt and {name}: {error}") from None
        return TextExample(text, spans, has_special_tokens=True)


def _missing(name: str, fields: Fields) -> str:
    if not {*COMPLETIONS} & fields.keys():
        return f"needs {SUPPORTED_SHAPES['DPO']}; it has {', '.join(sorted(map(str, fields)))[:80] or 'nothing'}"
    return f"{name} is {'null' if name in fields else 'missing'}"


def _text_examples(fields: Fields) -> tuple[TextExample, TextExample]:
    prompt, chosen, rejected = _texts(fields)
    return _text_example(prompt, chosen), _text_example(prompt, rejected)


def _texts(fields: Fields) -> tuple[str, str, str]:
    """Return prompt and completions of a record of texts; a prompt that it lacks is what both completions begin with.

    A common beginning is cut before its last space, so that no token spans prompt and completion.
    """
    chosen, rejected = (text_of(fields, name) for name in COMPLETIONS)
    for name, text in zip(COMPLETIONS, (chosen, rejected), strict=True):
        check_not_blank(text, name)
    _check_different(chosen, rejected)
    if fields.get("prompt") is not None:
        return text_of(fields, "prompt"), chosen, rejected
    cut = re.match(r".*(?=\s)", chosen[: _common(chosen, rejected)], re.DOTALL)
    prompt = cut.group() if cut else ""
    return prompt, chosen[len(prompt) :], rejected[len(prompt) :]


def _text_example(prompt: str, completion: str) -> TextExample:
    text = prompt + completion
    return TextExample(text, ((len(prompt), len(text) + 1),), has_special_tokens=False)


def _messages(fields: Fields) -> tuple[list[Message], list[Message], list[Message]]:
    """Return the messages of the prompt and of both completions."""
    chosen, rejected = (messages_of(fields[name], name) for name in COMPLETIONS)
    _check_different(chosen, rejected)
    prompt = fields.get("prompt")
    if isinstance(prompt, list):
        first = messages_of(prompt, "prompt")
    else:
        first = chosen[: _common(chosen, rejected)]
        _check_is_last_of(prompt, first)
        chosen, rejected = chosen[len(first) :], rejected[len(first) :]
    for name, messages in zip(COMPLETIONS, (chosen, rejected), strict=True):
        check_has_assistant(messages, f"no message of {name} behind the prompt")
    return first, chosen, rejected


def _common(chosen: Sequence[object], rejected: Sequence[object]) -> int:
    """Return the number of characters or messages with which both completions begin."""
    return sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))
    )


def _check_is_last_of(prompt: object, messages: list[Message]) -> None:
    """Raise InvalidRecord if there is a prompt beside messages, and it is not the last one of their common prompt."""
    if prompt is not None and (not messages or messages[-1]["content"] != prompt):
        raise InvalidRecord(
            f"prompt is {kind_of(prompt)} beside messages, and not the last message that chosen and rejected share: "
            "write it as a list of messages"
        )


def _check_different(chosen: object, rejected: object) -> None:
    if chosen == rejected:
        raise InvalidRecord("chosen and rejected are equal: there is nothing to prefer")
