"""Render a conversation to the text that the model sees, and locate the assistant's turns in it."""

import re
from functools import cached_property
from typing import Any

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from finetune_trainer.data.conversations import (
    Conversation,
    Message,
    parts_left_out,
    with_last_arguments,
)
from finetune_trainer.data.records import InvalidRecord

Span = tuple[int, int]
"""Half-open character range: the first character and the one after the last."""

DEFAULT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ ('' if loop.first else '\n\n') + message['role'] + ': ' + message['content'] | trim }}"
    "{%- if message['role'] == 'assistant' -%}{{ eos_token }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '\n\nassistant:' }}{%- endif -%}"
)
"""For tokenizers without a chat template: turns as `role: content`, separated by a blank line. EOS follows every
assistant turn."""

_FROZEN_CLOCK = (
    "{%- macro strftime_now(format) -%}"
    "{{ format | replace('%d', '26') | replace('%b', 'Jul') | replace('%B', 'July') | replace('%m', '07')"
    " | replace('%Y', '2024') | replace('%y', '24') | replace('%A', 'Friday') | replace('%H', '12')"
    " | replace('%M', '00') | replace('%S', '00') }}"
    "{%- endmacro -%}"
)
"""Some templates put today's date into the text, but the same data must give the same tokens on any day.

The date is therefore fixed at 26 July 2024, which Llama 3's own template uses when `strftime_now` is undefined."""

_PLACEHOLDER = "\ue000answer\ue001"
"""Two private-use characters make it distinct from any real content."""


def template_of(tokenizer: Any) -> str:
    """Return the tokenizer's chat template, or the default template, which writes BOS if the tokenizer would."""
    if tokenizer.chat_template:
        return str(tokenizer.get_chat_template())
    return ("{{- bos_token -}}" if writes_bos(tokenizer) else "") + DEFAULT_TEMPLATE


def writes_bos(tokenizer: Any) -> bool:
    """Return whether the tokenizer itself puts BOS before every text."""
    return tokenizer.bos_token_id is not None and tokenizer("").input_ids[:1] == [
        tokenizer.bos_token_id
    ]


def dated_template_of(tokenizer: Any) -> str:
    """Return the template of `template_of` with the date fixed, as training renders it on any day."""
    return _FROZEN_CLOCK + template_of(tokenizer)


def end_tokens(tokenizer: Any, *, conversations: bool) -> tuple[int, ...]:
    """Return the ids of the tokens at which an answer ends in the training data, EOS included.

    In a conversation that is the special token with which the template ends a turn, such as <|im_end|>. A turn that
    ends with other text has none.
    """
    ends = (turn_end(tokenizer) if conversations else None, tokenizer.eos_token_id)
    return tuple(dict.fromkeys(token for token in ends if token is not None))


def turn_end(tokenizer: Any) -> int | None:
    """Return the special token directly after the assistant's content, or None if other text follows it."""
    try:
        # The tokenizer may have an added token for a blank line, which also occurs within answers.
        ending = ChatTemplate(tokenizer).turn_ending.lstrip()
    except InvalidRecord:
        return None
    tokens = tokenizer(ending, add_special_tokens=False).input_ids
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    return tokens[0] if tokens and tokens[0] in special else None


class ChatTemplate:
    """A tokenizer's chat template with a fixed date."""

    def __init__(self, tokenizer: Any, template: str | None = None) -> None:
        variants = tokenizer.chat_template
        has_tool_use = template is None and isinstance(variants, dict) and "tool_use" in variants
        self._for_tools = ChatTemplate(tokenizer, variants["tool_use"]) if has_tool_use else None
        template = template or template_of(tokenizer)
        self._template = _FROZEN_CLOCK + template
        self._has_generation_tag = re.search(r"{%-?\s*generation\s*-?%}", template) is not None
        self._special_tokens = dict(tokenizer.special_tokens_map)

    def render(self, conversation: Conversation, first: int = 0) -> tuple[str, tuple[Span, ...]]:
        """Return the text and the spans of the assistant's turns, those from message `first` on, with what ends them.

        The template's {% generation %} tags decide where there are any. Otherwise a turn is the text that a model
        would have to generate: from the end of the generation prompt to the end of the turn. Raises InvalidRecord,
        also for a part of the conversation that the template ignores.
        """
        if conversation.tools and self._for_tools:
            return self._for_tools.render(conversation, first)
        text, spans = self._render(
            conversation, return_assistant_tokens_mask=self._has_generation_tag
        )
        self._check_nothing_is_ignored(text, conversation)
        if self._has_generation_tag:
            return text, tuple(spans[self._tagged_turns(conversation.before(first)) :])
        turns = [
            index
            for index, message in enumerate(conversation.messages)
            if message["role"] == "assistant"
        ]
        return text, tuple(
            self._turn_span(text, conversation, index) for index in turns if index >= first
        )

    def _tagged_turns(self, conversation: Conversation) -> int:
        """Return the number of spans that the template's tags mark in a conversation."""
        if all(message["role"] != "assistant" for message in conversation.messages):
            return 0
        return len(self._render(conversation, return_assistant_tokens_mask=True)[1])

    def _check_nothing_is_ignored(self, text: str, conversation: Conversation) -> None:
        """Raise InvalidRecord if the text is the same without tools, without a tool call or without a tool's answer."""
        for name, rest in parts_left_out(conversation):
            if self._text_of(rest) == text:
                raise InvalidRecord(
                    f"{name}: the chat template does not render it: "
                    "use a model whose template supports it, or remove it from the record"
                )
        for index, message in enumerate(conversation.messages):
            if message.get("reasoning_content", "").strip() and not self._renders_reasoning:
                raise InvalidRecord(
                    f"messages[{index}].reasoning_content: the chat template never renders it: "
                    "put it into content, or remove it from the record"
                )

    def _turn_span(self, text: str, conversation: Conversation, index: int) -> Span:
        """Locate a turn by the text around it, found by rendering a placeholder in its place.

        Searching for the content itself would fail: templates trim it and drop the reasoning of earlier turns.
        """
        message = conversation.messages[index]
        before, after = self._surroundings(conversation, index)
        start = self._turn_start(text, conversation.before(index), before)
        end = (
            self._calls_end(text, conversation, index)
            if "tool_calls" in message
            else self._content_end(text, after)
        )
        # Text beside tool calls must be in the turn: some templates put it behind the answers of the tools.
        is_outside = end is not None and message["content"].strip() and end < len(before)
        if start is None or end is None or end < start or is_outside:
            raise InvalidRecord(
                f"messages[{index}]: cannot be located in the rendered chat template; "
                "wrap the assistant's content in {% generation %} in the template"
            )
        return start, end

    def _turn_start(self, text: str, earlier: Conversation, before: str) -> int | None:
        """Return the end of the generation prompt if the text begins with it, else the start of the content."""
        prompt = self._text_of(earlier, add_generation_prompt=True) if earlier.messages else None
        return next(
            (len(prefix) for prefix in (prompt, before) if prefix and text.startswith(prefix)), None
        )

    def _content_end(self, text: str, after: str) -> int | None:
        """Return the end of a turn without tool calls; `after` is the text behind its content."""
        if not text.endswith(after):
            return None
        return (
            len(text)
            - len(after)
            + next(len(ending) for ending in self._turn_endings if after.startswith(ending))
        )

    def _calls_end(self, text: str, conversation: Conversation, index: int) -> int | None:
        """Return the end of a turn with tool calls, or None if it cannot be found.

        The placeholder is the last call's argument. What follows it in a conversation that ends here closes the call
        and the turn. What follows that in the whole conversation does not depend on the argument.
        """
        marked = conversation.with_message(
            index, with_last_arguments(conversation.messages[index], _PLACEHOLDER)
        )
        after = (self._text_of(marked) or "").partition(_PLACEHOLDER)[2]
        ending = (self._text_of(marked.before(index + 1)) or "").partition(_PLACEHOLDER)[2].rstrip()
        for closing in self._with_and_without_eos(ending):
            if closing and after.startswith(closing) and text.endswith(after[len(closing) :]):
                return len(text) - len(after) + len(closing)
        return None

    def _surroundings(self, conversation: Conversation, index: int) -> tuple[str, str]:
        """Return the rendered text before and after one turn's content. Tool calls of the turn stay."""
        kept = {
            key: value for key, value in conversation.messages[index].items() if key == "tool_calls"
        }
        placeholder: Message = {"role": "assistant", "content": _PLACEHOLDER} | kept
        marked = conversation.with_message(index, placeholder)
        # A template may refuse text beside tool calls, which the record itself does not have.
        text = (self._text_of(marked) or "") if kept else self._render(marked)[0]
        before, found, after = text.partition(_PLACEHOLDER)
        if not found and not kept:
            raise InvalidRecord(f"messages[{index}]: the chat template drops this turn")
        return (before, after) if found else ("", "")

    @cached_property
    def turn_ending(self) -> str:
        """The text that follows the assistant's content, up to the end of its turn, without trailing whitespace."""
        exchange: list[Message] = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "!"},
        ]
        with_system: list[Message] = [{"role": "system", "content": "."}, *exchange]
        try:
            return self._surroundings(Conversation(exchange), 1)[1].rstrip()
        except InvalidRecord:  # some templates need a system message
            return self._surroundings(Conversation(with_system), 2)[1].rstrip()

    @cached_property
    def _turn_endings(self) -> tuple[str, ...]:
        """The texts that may follow the assistant's content, longest first, without trailing whitespace."""
        return *self._with_and_without_eos(self.turn_ending), ""

    def _with_and_without_eos(self, ending: str) -> tuple[str, str]:
        """Return the end of the last turn, and of an earlier one: some templates write EOS only after the last."""
        return ending, ending.removesuffix(self._special_tokens.get("eos_token", "")).rstrip()

    @cached_property
    def _renders_reasoning(self) -> bool:
        """Whether any last turn shows its reasoning. Templates drop that of earlier turns on purpose."""
        call = {
            "id": "000000000",
            "type": "function",
            "function": {"name": "ask", "arguments": {"value": "?"}},
        }
        return any(
            _PLACEHOLDER
            in (self._text_of(Conversation([{"role": "user", "content": "?"}, answer])) or "")
            for answer in (
                {"role": "assistant", "content": "!", "reasoning_content": _PLACEHOLDER},
                {
                    "role": "assistant",
                    "content": "",
                    "reasoning_content": _PLACEHOLDER,
                    "tool_calls": [call],
                },
            )
        )

    def _text_of(self, conversation: Conversation, **options: bool) -> str | None:
        """Return the rendered text, or None if the template rejects the conversation."""
        try:
            return self._render(conversation, **options)[0]
        except InvalidRecord:
            return None

    def _render(self, conversation: Conversation, **options: bool) -> tuple[str, list[Span]]:
        try:
            texts, spans = render_jinja_template(
                [conversation.messages],
                tools=conversation.tools,
                chat_template=self._template,
                **self._special_tokens,
                **options,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise InvalidRecord(f"the chat template rejected the conversation: {error}") from None
        return texts[0], spans[0] if spans else []
