"""Render a conversation to the text that the model sees, and locate the assistant's turns in it."""

import re
from functools import cached_property
from typing import Any

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from finetune_trainer.data.records import InvalidRecord

Message = dict[str, str]
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
    writes_bos = tokenizer.bos_token_id is not None and tokenizer("").input_ids[:1] == [tokenizer.bos_token_id]
    return ("{{- bos_token -}}" if writes_bos else "") + DEFAULT_TEMPLATE


def end_tokens(tokenizer: Any, *, conversations: bool) -> tuple[int, ...]:
    """Return the ids of the tokens at which an answer ends in the training data, EOS included.

    In a conversation that is the first special token after the assistant's content, such as <|im_end|>.
    """
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    ending = tokenizer(ChatTemplate(tokenizer).turn_ending, add_special_tokens=False).input_ids if conversations else []
    first = next((token for token in ending if token in special), None)
    return tuple(dict.fromkeys(token for token in (first, tokenizer.eos_token_id) if token is not None))


class ChatTemplate:
    """A tokenizer's chat template with a fixed date."""

    def __init__(self, tokenizer: Any) -> None:
        template = template_of(tokenizer)
        self._template = _FROZEN_CLOCK + template
        self._has_generation_tag = re.search(r"{%-?\s*generation\s*-?%}", template) is not None
        self._special_tokens = dict(tokenizer.special_tokens_map)

    def render(self, messages: list[Message]) -> tuple[str, tuple[Span, ...]]:
        """Return the text and the spans of the assistant's turns, each with the tokens that end the turn.

        The template's {% generation %} tags decide where there are any. Otherwise a turn is the text that a model
        would have to generate: from the end of the generation prompt to the end of the turn. Raises InvalidRecord.
        """
        if self._has_generation_tag:
            text, spans = self._render(messages, return_assistant_tokens_mask=True)
            return text, tuple(spans)
        text, _ = self._render(messages)
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        return text, tuple(self._turn_span(text, messages, index) for index in turns)

    def _turn_span(self, text: str, messages: list[Message], index: int) -> Span:
        """Locate a turn by the text around it, found by rendering a placeholder in its place.

        Searching for the content itself would fail: templates trim it and drop the reasoning of earlier turns.
        """
        before, after = self._surroundings(messages, index)
        prompt = self._generation_prompt(messages[:index])
        start = next((len(prefix) for prefix in (prompt, before) if prefix and text.startswith(prefix)), None)
        end = len(text) - len(after)
        if start is None or end < start or not text.endswith(after):
            raise InvalidRecord(
                f"messages[{index}]: cannot be located in the rendered chat template; "
                "wrap the assistant's content in {% generation %} in the template"
            )
        return start, end + next(len(ending) for ending in self._turn_endings if after.startswith(ending))

    def _surroundings(self, messages: list[Message], index: int) -> tuple[str, str]:
        """Return the rendered text before and after one turn's content."""
        placeholder = {"role": "assistant", "content": _PLACEHOLDER}
        text, _ = self._render([*messages[:index], placeholder, *messages[index + 1 :]])
        before, found, after = text.partition(_PLACEHOLDER)
        if not found:
            raise InvalidRecord(f"messages[{index}]: the chat template drops this turn")
        return before, after

    def _generation_prompt(self, messages: list[Message]) -> str | None:
        """Return the prompt for the next turn, or None if the template cannot render these messages."""
        try:
            return self._render(messages, add_generation_prompt=True)[0] if messages else None
        except InvalidRecord:
            return None

    @cached_property
    def turn_ending(self) -> str:
        """The text that follows the assistant's content, up to the end of its turn, without trailing whitespace."""
        exchange = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
        return self._surroundings(exchange, 1)[1].rstrip()

    @cached_property
    def _turn_endings(self) -> tuple[str, ...]:
        """The texts that may follow the assistant's content, longest first, without trailing whitespace."""
        last = self.turn_ending
        # Some templates write EOS once after the last turn, not after every turn.
        return last, last.removesuffix(self._special_tokens.get("eos_token", "")).rstrip(), ""

    def _render(self, messages: list[Message], **options: bool) -> tuple[str, list[Span]]:
        try:
            texts, spans = render_jinja_template(
                [messages], chat_template=self._template, **self._special_tokens, **options
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise InvalidRecord(f"the chat template rejected the conversation: {error}") from None
        return texts[0], spans[0] if spans else []
