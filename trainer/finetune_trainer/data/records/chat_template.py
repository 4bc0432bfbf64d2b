"""Render a conversation to the text that the model sees."""

import re
from functools import cached_property
from typing import Any, NamedTuple

from jinja2 import TemplateError

from finetune_trainer.data.records.compiled_template import (
    CompiledTemplate,
    InOrder,
    Span,
    TemplateInput,
)
from finetune_trainer.data.records.conversations import Conversation, Message
from finetune_trainer.data.records.records import InvalidRecord
from finetune_trainer.data.records.template_forms import MARK, TemplateForms
from finetune_trainer.runtime.errors import short_reason

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
    # A line break, which Jinja drops, and no minus sign: the white space that a template begins with stays.
    "{%- endmacro %}\n"
)
"""Some templates put today's date into the text, but the same data must give the same tokens on any day.

The date is therefore fixed at 26 July 2024, which Llama 3's own template uses when `strftime_now` is undefined."""


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
    """Return the special token directly after the assistant's content, or None if other text follows it.

    If the template writes nothing there, it is EOS, which the rows have behind each turn.
    """
    chat = ChatTemplate(tokenizer)
    if not chat.writes_turn_end:
        end: int | None = tokenizer.eos_token_id
        return end
    # Without the leading space: the tokenizer may have an added token for a blank line, which answers contain, too.
    ending = (chat.turn_ending or "").lstrip()
    tokens = tokenizer(ending, add_special_tokens=False).input_ids
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    if tokens and tokens[0] in special:
        first: int = tokens[0]
        return first
    return None


class RenderedChat(NamedTuple):
    """A conversation as text."""

    text: str
    marks: list[Span]
    """The spans that the template's {% generation %} tags mark."""


class ChatTemplate:
    """A tokenizer's chat template with a fixed date."""

    def __init__(self, tokenizer: Any, template: str | None = None) -> None:
        self._for_tools: ChatTemplate | None = None
        variants = tokenizer.chat_template
        if template is None and isinstance(variants, dict) and "tool_use" in variants:
            # transformers chooses the template `tool_use` for conversations with tools, too.
            self._for_tools = ChatTemplate(tokenizer, variants["tool_use"])
        template = template or template_of(tokenizer)
        self.has_marks = re.search(r"{%-?\s*generation\s*-?%}", template) is not None
        """Whether the template has {% generation %} tags, which mark what is in the loss."""
        special_tokens = dict(tokenizer.special_tokens_map)
        self._template = CompiledTemplate(_FROZEN_CLOCK + template, special_tokens)
        self.eos: str = special_tokens.get("eos_token") or ""
        """The text of EOS; empty if the tokenizer has none."""
        self.forms = TemplateForms(self._unchanged_text_of)
        self._prompt_endings: list[str | None] = []
        """What the template writes behind the last message of a prompt without tools, when it is known."""
        self.shown_places: dict[object, frozenset[str] | None] = {}
        """The places that the template renders, for each shape of a conversation; None if it cannot be decided."""

    def variant_for(self, conversation: Conversation) -> "ChatTemplate":
        """Return the template that renders a conversation: there may be another template for tools."""
        return self._for_tools if conversation.tools and self._for_tools else self

    def source(self, conversation: Conversation) -> TemplateInput:
        """Return a conversation in the forms that the template reads; raise InvalidRecord if it is too deep."""
        messages = self.forms.messages(conversation.messages)
        try:
            return TemplateInput.of(messages, conversation.tools)
        except RecursionError as error:
            raise _rejection(error) from None

    def rendered(self, source: TemplateInput) -> RenderedChat:
        """Return the rendered text; raise InvalidRecord if the template rejects the conversation."""
        try:
            if self.has_marks:
                return RenderedChat(*self._template.text_with_marks(source))
            return RenderedChat(self._template.text(source), [])
        except Exception as error:  # noqa: BLE001  a template is a program, and may fail in any way
            raise _rejection(error) from None

    def prompt(self, source: TemplateInput) -> str | None:
        """Return the prompt that a server sends behind these messages; None if the template rejects them."""
        try:
            return self._template.text(source, is_prompt=True)
        except Exception:  # noqa: BLE001
            return None

    def in_order(self, source: TemplateInput) -> InOrder | None:
        """Return the text with the positions of its messages; None if the template does not render them in order."""
        return self._template.in_order(source)

    def prompt_ending(self, source: TemplateInput) -> str | None:
        """Return what a template that renders messages in order writes behind the last of them, for a server's prompt.

        It is None if that depends on the messages, or if the template rejects the prompt.
        """
        if source.tools is not None:
            return self._prompt_ending(source)
        if not self._prompt_endings:
            self._prompt_endings.append(self._prompt_ending(source))
        return self._prompt_endings[0]

    def _prompt_ending(self, source: TemplateInput) -> str | None:
        rendered = self._template.in_order(source.before(1), is_prompt=True)
        return rendered and rendered.text[rendered.starts[-1] :]

    def text_or_none(self, conversation: Conversation) -> str | None:
        """Return the rendered text, or None if the template rejects the conversation."""
        messages = self.forms.messages(conversation.messages)
        return self._text_of(messages, conversation.tools)

    @cached_property
    def turn_ending(self) -> str | None:
        """The text that follows the assistant's content, up to the end of its turn, without trailing whitespace.

        It is None if the template drops the content.
        """
        exchange: list[Message] = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": MARK},
        ]
        with_system: list[Message] = [{"role": "system", "content": "."}, *exchange]
        # Some templates need a system message, and others reject it.
        for messages in (exchange, with_system):
            text = self.text_or_none(Conversation(messages)) or ""
            if MARK in text:
                return text.partition(MARK)[2].rstrip()
        return None

    @property
    def writes_turn_end(self) -> bool:
        """Whether the template writes anything behind the content of a turn. If not, EOS ends every turn."""
        return self.turn_ending != ""

    @cached_property
    def earlier_ending(self) -> str:
        """The end of a turn that other turns follow: some templates write EOS only after the last turn."""
        return (self.turn_ending or "").removesuffix(self.eos).rstrip()

    def _unchanged_text_of(self, conversation: Conversation) -> str | None:
        return self._text_of(conversation.messages, conversation.tools)

    def _text_of(self, messages: list[Message], tools: list[Any] | None) -> str | None:
        try:
            return self._template.text(TemplateInput.of(messages, tools))
        except Exception:  # noqa: BLE001
            return None


def _rejection(error: Exception) -> InvalidRecord:
    """Return the error of a record for which the template raised an error."""
    reason = str(error) if isinstance(error, TemplateError) else short_reason(error)
    return InvalidRecord(
        f"the chat template rejected the conversation: {reason}: correct its messages, or set prepare.chatTemplate"
    )
