"""Render a conversation to the text that the model sees, and locate the assistant's turns in it."""

import re
from functools import cached_property
from typing import Any

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from finetune_trainer.data.records.conversations import (
    Conversation,
    Message,
    parts_left_out,
    with_last_arguments,
)
from finetune_trainer.data.records.records import InvalidRecord

Span = tuple[int, int]
"""Half-open character range: position of the first character, and position after the last character."""

DEFAULT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ ('' if loop.first else '\n\n') + message['role'] + ': ' + message['content'] | trim }}"
    "{%- if message['role'] == 'assistant' -%}{{ eos_token }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '\n\nassistant:' }}{%- endif -%}"
)
"""Template for tokenizers that have none: turns as `role: content`, separated by a blank line. EOS follows every
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
    # A rendered text is tokenized without special tokens, so the template must write BOS.
    if writes_bos(tokenizer):
        return "{{- bos_token -}}" + DEFAULT_TEMPLATE
    return DEFAULT_TEMPLATE


def writes_bos(tokenizer: Any) -> bool:
    """Return whether the tokenizer itself puts BOS before every text."""
    if tokenizer.bos_token_id is None:
        return False
    first_tokens: list[int] = tokenizer("").input_ids[:1]
    return first_tokens == [tokenizer.bos_token_id]


def dated_template_of(tokenizer: Any) -> str:
    """Return the template of `template_of` with the date fixed, as training renders it on any day."""
    return _FROZEN_CLOCK + template_of(tokenizer)


def end_tokens(tokenizer: Any, *, conversations: bool) -> tuple[int, ...]:
    """Return the ids of the tokens at which an answer ends in the training data, EOS included.

    In a conversation, the answer also ends with the special token with which the template ends a turn, such as
    <|im_end|>. A turn that ends with other text has no such token.
    """
    ends = [tokenizer.eos_token_id]
    if conversations:
        ends.insert(0, turn_end(tokenizer))
    # A dict drops the second of two equal tokens and keeps the order.
    return tuple(dict.fromkeys(token for token in ends if token is not None))


def turn_end(tokenizer: Any) -> int | None:
    """Return the special token directly after the assistant's content, or None if other text follows it."""
    try:
        # Without the leading space: the tokenizer may have an added token for a blank line, which answers contain, too.
        ending = ChatTemplate(tokenizer).turn_ending.lstrip()
    except InvalidRecord:
        return None
    tokens = tokenizer(ending, add_special_tokens=False).input_ids
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    if tokens and tokens[0] in special:
        first: int = tokens[0]
        return first
    return None


class ChatTemplate:
    """A tokenizer's chat template with a fixed date."""

    def __init__(self, tokenizer: Any, template: str | None = None) -> None:
        self._for_tools: ChatTemplate | None = None
        variants = tokenizer.chat_template
        if template is None and isinstance(variants, dict) and "tool_use" in variants:
            # transformers chooses the template `tool_use` for conversations with tools, too.
            self._for_tools = ChatTemplate(tokenizer, variants["tool_use"])
        template = template or template_of(tokenizer)
        self._template = _FROZEN_CLOCK + template
        self._has_generation_tag = (
            re.search(r"{%-?\s*generation\s*-?%}", template) is not None
        )
        self._special_tokens = dict(tokenizer.special_tokens_map)

    def render(
        self, conversation: Conversation, first: int = 0
    ) -> tuple[str, tuple[Span, ...]]:
        """Return the text, and the spans of the assistant's turns from message `first` on.

        If the template has {% generation %} tags, they mark the spans. Otherwise a span is the text that a model would
        have to generate: from the end of the generation prompt to the end of the turn. Raises InvalidRecord, also if
        the template ignores a part of the conversation.
        """
        if conversation.tools and self._for_tools:
            return self._for_tools.render(conversation, first)
        text, spans = self._render(
            conversation, return_assistant_tokens_mask=self._has_generation_tag
        )
        self._check_nothing_is_ignored(text, conversation)
        if self._has_generation_tag:
            return text, tuple(spans[self._tagged_turns(conversation.before(first)) :])
        turns = []
        for index, message in enumerate(conversation.messages):
            if index >= first and message["role"] == "assistant":
                turns.append(self._turn_span(text, conversation, index))
        return text, tuple(turns)

    def _tagged_turns(self, conversation: Conversation) -> int:
        """Return the number of spans that the template's tags mark in a conversation."""
        if all(message["role"] != "assistant" for message in conversation.messages):
            return 0
        _, spans = self._render(conversation, return_assistant_tokens_mask=True)
        return len(spans)

    def _check_nothing_is_ignored(self, text: str, conversation: Conversation) -> None:
        """Raise InvalidRecord if the text is the same without the tools, a tool call or a tool's answer."""
        for name, rest in parts_left_out(conversation):
            if self._text_of(rest) == text:
                raise InvalidRecord(
                    f"{name}: the chat template does not render it: "
                    "use a model whose template supports it, or remove it from the record"
                )
        for index, message in enumerate(conversation.messages):
            if (
                message.get("reasoning_content", "").strip()
                and not self._renders_reasoning
            ):
                raise InvalidRecord(
                    f"messages[{index}].reasoning_content: the chat template never renders it: "
                    "put it into content, or remove it from the record"
                )

    def _turn_span(self, text: str, conversation: Conversation, index: int) -> Span:
        """Locate a turn by the text around it: render the conversation with a placeholder in place of its content.

        Searching for the content itself would fail: templates trim it and drop the reasoning of earlier turns.
        """
        message = conversation.messages[index]
        before, after = self._surroundings(conversation, index)
        start = self._turn_start(text, conversation.before(index), before)
        has_calls = "tool_calls" in message
        end = (
            self._calls_end(text, conversation, index)
            if has_calls
            else self._content_end(text, after)
        )
        if start is not None and end is not None and start <= end:
            # Text beside tool calls must be in the turn: some templates put it behind the answers of the tools.
            has_text = bool(message["content"].strip())
            if not has_text or end >= len(before):
                return start, end
        raise InvalidRecord(
            f"messages[{index}]: cannot be located in the rendered chat template; "
            "wrap the assistant's content in {% generation %} in the template"
        )

    def _turn_start(self, text: str, earlier: Conversation, before: str) -> int | None:
        """Return the end of the generation prompt if the text begins with it, else the start of the content."""
        prompt = (
            self._text_of(earlier, add_generation_prompt=True)
            if earlier.messages
            else None
        )
        for prefix in (prompt, before):
            if prefix and text.startswith(prefix):
                return len(prefix)
        return None

    def _content_end(self, text: str, after: str) -> int | None:
        """Return the end of a turn without tool calls; `after` is the text behind its content."""
        if not text.endswith(after):
            return None
        content_end = len(text) - len(after)
        # The last ending is the empty text, so one of them always matches.
        ending = next(
            ending for ending in self._turn_endings if after.startswith(ending)
        )
        return content_end + len(ending)

    def _calls_end(
        self, text: str, conversation: Conversation, index: int
    ) -> int | None:
        """Return the end of a turn with tool calls, or None if it cannot be found.

        The placeholder is the last call's argument. In a conversation that ends here, the text after it closes the
        call and the turn. In the whole conversation, the text after this ending does not depend on the argument.
        """
        marked_message = with_last_arguments(conversation.messages[index], _PLACEHOLDER)
        marked = conversation.with_message(index, marked_message)
        after = self._after_placeholder(marked)
        ending = self._after_placeholder(marked.before(index + 1)).rstrip()
        for closing in self._with_and_without_eos(ending):
            if not closing or not after.startswith(closing):
                continue
            rest = after[len(closing) :]
            if text.endswith(rest):
                return len(text) - len(rest)
        return None

    def _after_placeholder(self, conversation: Conversation) -> str:
        """Return the rendered text after the placeholder; empty if the template rejects or drops it."""
        text = self._text_of(conversation) or ""
        return text.partition(_PLACEHOLDER)[2]

    def _surroundings(self, conversation: Conversation, index: int) -> tuple[str, str]:
        """Return the rendered text before and after a turn's content. Tool calls of the turn stay."""
        message = conversation.messages[index]
        placeholder: Message = {"role": "assistant", "content": _PLACEHOLDER}
        if "tool_calls" in message:
            placeholder["tool_calls"] = message["tool_calls"]
            # A template may refuse text beside tool calls, which the record itself does not have.
            text = self._text_of(conversation.with_message(index, placeholder)) or ""
            if _PLACEHOLDER not in text:
                return "", ""
        else:
            text, _ = self._render(conversation.with_message(index, placeholder))
            if _PLACEHOLDER not in text:
                raise InvalidRecord(
                    f"messages[{index}]: the chat template drops this turn"
                )
        before, _, after = text.partition(_PLACEHOLDER)
        return before, after

    @cached_property
    def turn_ending(self) -> str:
        """The text that follows the assistant's content, up to the end of its turn, without trailing whitespace."""
        exchange: list[Message] = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "!"},
        ]
        with_system: list[Message] = [{"role": "system", "content": "."}, *exchange]
        try:
            _, after = self._surroundings(Conversation(exchange), 1)
        except InvalidRecord:
            # Some templates need a system message, and others reject it.
            _, after = self._surroundings(Conversation(with_system), 2)
        return after.rstrip()

    @cached_property
    def _turn_endings(self) -> tuple[str, ...]:
        """The texts that may follow the assistant's content, longest first, without trailing whitespace."""
        return *self._with_and_without_eos(self.turn_ending), ""

    def _with_and_without_eos(self, ending: str) -> tuple[str, str]:
        """Return the end of the last turn, and of an earlier turn: some templates write EOS only after the last."""
        eos = self._special_tokens.get("eos_token", "")
        return ending, ending.removesuffix(eos).rstrip()

    @cached_property
    def _renders_reasoning(self) -> bool:
        """Whether any last turn shows its reasoning. Templates drop the reasoning of earlier turns on purpose."""
        call = {
            "id": "000000000",
            "type": "function",
            "function": {"name": "ask", "arguments": {"value": "?"}},
        }
        question: Message = {"role": "user", "content": "?"}
        answer: Message = {
            "role": "assistant",
            "content": "!",
            "reasoning_content": _PLACEHOLDER,
        }
        # Some templates show the reasoning only beside tool calls.
        answer_with_call = answer | {"content": "", "tool_calls": [call]}
        for last in (answer, answer_with_call):
            text = self._text_of(Conversation([question, last])) or ""
            if _PLACEHOLDER in text:
                return True
        return False

    def _text_of(self, conversation: Conversation, **options: bool) -> str | None:
        """Return the rendered text, or None if the template rejects the conversation."""
        try:
            text, _ = self._render(conversation, **options)
        except InvalidRecord:
            return None
        return text

    def _render(
        self, conversation: Conversation, **options: bool
    ) -> tuple[str, list[Span]]:
        try:
            texts, spans = render_jinja_template(
                [conversation.messages],
                tools=conversation.tools,
                chat_template=self._template,
                **self._special_tokens,
                **options,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise InvalidRecord(
                f"the chat template rejected the conversation: {error}"
            ) from None
        return texts[0], spans[0] if spans else []
