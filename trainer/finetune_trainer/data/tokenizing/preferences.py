"""Format a preference record: a prompt with a chosen and a rejected completion, as two texts.

The records have the forms that TRL accepts. Completions are texts or lists of messages. The prompt is a field of the
same kind, or the common beginning of both completions.
"""

import re
from collections.abc import Sequence
from typing import Any

from finetune_trainer.data.records.chat_template import ChatTemplate
from finetune_trainer.data.records.conversations import (
    Conversation,
    Message,
    check_can_be_learned,
    messages_of,
    tools_of,
)
from finetune_trainer.data.records.records import (
    Fields,
    InvalidRecord,
    Shape,
    check_not_blank,
    kind_of,
    text_of,
)
from finetune_trainer.data.tokenizing.encoder import (
    FormattedRecord,
    TextExample,
    check_has_eos,
    completed_text,
    is_glued,
    missing_field,
    needed_shapes,
    rendered_texts,
)

COMPLETIONS = ("chosen", "rejected")
ANSWERS = frozenset({"assistant", "tool"})
"""Roles with which a completion may begin. The result of a call may be the first difference of two courses of calls."""


class PreferenceFormatter:
    """Formats preference records as two text examples; all records must have the shape of the first."""

    def __init__(self, chat: ChatTemplate, shape: Shape | None = None) -> None:
        self._chat = chat
        self.shape: Shape | None = shape
        """The shape of the records so far."""

    def format(self, fields: Fields) -> FormattedRecord:
        """Return the text examples of the chosen and the rejected completion.

        Raises InvalidRecord if the fields do not have the data set's shape, or if there is nothing to prefer.
        """
        shape = self._shape_of(fields)
        if shape == "chosen and rejected texts":
            check_has_eos(self._chat)
            prompt, *completions = _texts(fields)
            examples = _text_examples(fields, prompt, completions)
            glued = any(is_glued(prompt, completion) for completion in completions)
            record = FormattedRecord(examples, glued=glued)
        else:
            record = self._conversations(fields)
        # Only now: an invalid record does not determine the shape of the data set.
        self.shape = shape
        return record

    def _shape_of(self, fields: Fields) -> Shape:
        for name in COMPLETIONS:
            if fields.get(name) is None:
                raise InvalidRecord(_missing(name, fields))
        chosen = fields["chosen"]
        rejected = fields["rejected"]
        if isinstance(chosen, list) != isinstance(rejected, list):
            raise InvalidRecord(
                f"chosen is {kind_of(chosen)} and rejected is {kind_of(rejected)}: write both as text or as messages"
            )
        shape: Shape = "chosen and rejected texts"
        if isinstance(chosen, list):
            shape = "chosen and rejected messages"
        if self.shape not in {None, shape}:
            raise InvalidRecord(
                f"has {shape}, but earlier records have {self.shape}: use one shape per data set"
            )
        return shape

    def _conversations(self, fields: Fields) -> FormattedRecord:
        prompt, chosen, rejected = _messages(fields)
        tools = tools_of(fields)
        halves = (
            self._conversation("chosen", prompt, chosen, tools),
            self._conversation("rejected", prompt, rejected, tools),
        )
        return FormattedRecord(
            tuple(example for half in halves for example in half.examples),
            tuple(text for half in halves for text in half.unrendered),
            any(half.ends_unlearned for half in halves),
        )

    def _conversation(
        self,
        name: str,
        prompt: list[Message],
        completion: list[Message],
        tools: list[Any] | None,
    ) -> FormattedRecord:
        conversation = Conversation(prompt + completion, tools)
        try:
            half = rendered_texts(self._chat, conversation, first=len(prompt))
        except InvalidRecord as error:
            raise InvalidRecord(f"prompt and {name}: {error}") from None
        # The loss compares two texts, so a completion cannot have an example for each of its turns.
        if len(half.examples) > 1:
            raise InvalidRecord(
                f"{name} has several turns, and the chat template renders an earlier turn otherwise than the last: "
                "put all turns but the last into the prompt"
            )
        return half._replace(
            unrendered=tuple(f"prompt and {name}: {text}" for text in half.unrendered)
        )


def _missing(name: str, fields: Fields) -> str:
    has_a_completion = not fields.keys().isdisjoint(COMPLETIONS)
    if has_a_completion:
        return missing_field(name, fields)
    return needed_shapes("DPO", fields)


def _text_examples(
    fields: Fields, prompt: str, completions: list[str]
) -> tuple[TextExample, ...]:
    if fields.get("tools"):
        raise InvalidRecord(
            "tools beside completions that are no lists of messages: nothing renders them"
        )
    return tuple(completed_text(prompt, completion) for completion in completions)


def _texts(fields: Fields) -> tuple[str, str, str]:
    """Return prompt and completions of a record of texts.

    Without a field `prompt`, the prompt is the common beginning of both completions.
    """
    chosen = text_of(fields, "chosen")
    rejected = text_of(fields, "rejected")
    check_not_blank(chosen, "chosen")
    check_not_blank(rejected, "rejected")
    _check_different(chosen, rejected)
    if fields.get("prompt") is not None:
        return text_of(fields, "prompt"), chosen, rejected
    beginning = chosen[: _common(chosen, rejected)]
    # Cut before its last space, so that no token spans prompt and completion.
    cut = re.match(r".*(?=\s)", beginning, re.DOTALL)
    prompt = cut.group() if cut else ""
    return prompt, chosen[len(prompt) :], rejected[len(prompt) :]


def _messages(fields: Fields) -> tuple[list[Message], list[Message], list[Message]]:
    """Return the messages of the prompt and of both completions."""
    chosen = messages_of(fields["chosen"], "chosen")
    rejected = messages_of(fields["rejected"], "rejected")
    _check_different(chosen, rejected)
    prompt = fields.get("prompt")
    if isinstance(prompt, list):
        prompt_messages = messages_of(prompt, "prompt")
    else:
        prompt_messages = chosen[: _common(chosen, rejected)]
        # Some data sets repeat the last message of the common prompt as text.
        _check_is_last_of(prompt, prompt_messages)
        chosen = chosen[len(prompt_messages) :]
        rejected = rejected[len(prompt_messages) :]
    for name, completion in (("chosen", chosen), ("rejected", rejected)):
        check_can_be_learned(completion, f"no message of {name} behind the prompt")
        _check_answers(name, completion)
    return prompt_messages, chosen, rejected


def _check_answers(name: str, completion: list[Message]) -> None:
    """Raise InvalidRecord if a completion begins with a question: then chosen and rejected answer other questions."""
    role = completion[0]["role"]
    if role not in ANSWERS:
        raise InvalidRecord(
            f"{name} begins with the role {role} behind the prompt that both share: "
            "chosen and rejected must answer the same messages"
        )


def _common(chosen: Sequence[object], rejected: Sequence[object]) -> int:
    """Return the number of characters or messages with which both completions begin."""
    count = 0
    for in_chosen, in_rejected in zip(chosen, rejected, strict=False):
        if in_chosen != in_rejected:
            break
        count += 1
    return count


def _check_is_last_of(prompt: object, messages: list[Message]) -> None:
    """Raise InvalidRecord if there is a prompt as text, and it is not the last message of the common prompt."""
    if prompt is None:
        return
    if not messages or messages[-1]["content"] != prompt:
        raise InvalidRecord(
            f"prompt is {kind_of(prompt)} beside messages, and not the last message that chosen and rejected share: "
            "write it as a list of messages"
        )


def _check_different(chosen: object, rejected: object) -> None:
    if chosen == rejected:
        raise InvalidRecord("chosen and rejected are equal: there is nothing to prefer")
