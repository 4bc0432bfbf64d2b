"""From a conversation to the text that the model sees, and which parts of it the assistant said."""

import re
from functools import cached_property
from typing import Any

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from finetune_trainer.data.records import InvalidRecord

Message = dict[str, str]
Span = tuple[int, int]
"""First character and the one behind the last."""

DEFAULT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ ('' if loop.first else '\n\n') + message['role'] + ': ' + message['content'] | trim }}"
    "{%- if message['role'] == 'assistant' -%}{{ eos_token }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '\n\nassistant:' }}{%- endif -%}"
)
"""For tokenizers without a chat template: turns as `role: content`, a blank line between two of them, and the
end-of-text token behind every turn of the assistant."""

_FROZEN_CLOCK = (
    "{%- macro strftime_now(format) -%}"
    "{{ format | replace('%d', '26') | replace('%b', 'Jul') | replace('%B', 'July') | replace('%m', '07')"
    " | replace('%Y', '2024') | replace('%y', '24') | replace('%A', 'Friday') | replace('%H', '12')"
    " | replace('%M', '00') | replace('%S', '00') }}"
    "{%- endmacro -%}"
)
"""Some templates put today's date into the text. The same data must give the same tokens on every day, so
the calendar stands still on 26 July 2024, where Llama 3's own template puts it when there is no clock."""

_PLACEHOLDER = "\ue000answer\ue001"
"""Two characters of private use keep it apart from any words."""


def template_of(tokenizer: Any) -> str:
    """Give the tokenizer's chat template, or the default one, which writes BOS where the tokenizer would."""
    if tokenizer.chat_template:
        return str(tokenizer.get_chat_template())
    writes_bos = tokenizer.bos_token_id is not None and tokenizer("").input_ids[:1] == [tokenizer.bos_token_id]
    return ("{{- bos_token -}}" if writes_bos else "") + DEFAULT_TEMPLATE


class ChatTemplate:
    """A tokenizer's way to write a conversation."""

    def __init__(self, tokenizer: Any) -> None:
        template = template_of(tokenizer)
        self._template = _FROZEN_CLOCK + template
        self._has_marks = re.search(r"{%-?\s*generation\s*-?%}", template) is not None
        self._special_tokens = dict(tokenizer.special_tokens_map)

    def render(self, messages: list[Message]) -> tuple[str, tuple[Span, ...]]:
        """Give the text and where in it the assistant speaks, with what ends its turn; raise Unusable.

        Where the template marks the assistant's words with {% generation %}, the marks decide. Elsewhere a turn is
        what a model that is asked for it would have to write: from the end of the prompt to the end of the turn.
        """
        if self._has_marks:
            text, spans = self._rendered(messages, return_assistant_tokens_mask=True)
            return text, tuple(spans)
        text, _ = self._rendered(messages)
        turns = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        return text, tuple(self._turn(text, messages, at) for at in turns)

    def _turn(self, text: str, messages: list[Message], at: int) -> Span:
        """Find a turn by what stands around it when other words are put in its place.

        Looking for the words themselves would fail: templates trim them, and drop the reasoning of earlier turns.
        """
        before, after = self._around(messages, at)
        prompt = self._prompt(messages[:at])
        start = next((len(lead) for lead in (prompt, before) if lead and text.startswith(lead)), None)
        end = len(text) - len(after)
        if start is None or end < start or not text.endswith(after):
            raise InvalidRecord(
                f"messages[{at}]: cannot be found in what the chat template makes of it; "
                "mark the assistant's words with {% generation %} in the template"
            )
        return start, end + next(len(ending) for ending in self._endings if after.startswith(ending))

    def _around(self, messages: list[Message], at: int) -> tuple[str, str]:
        other = {"role": "assistant", "content": _PLACEHOLDER}
        text, _ = self._rendered([*messages[:at], other, *messages[at + 1 :]])
        before, found, after = text.partition(_PLACEHOLDER)
        if not found:
            raise InvalidRecord(f"messages[{at}]: the chat template leaves it out")
        return before, after

    def _prompt(self, messages: list[Message]) -> str | None:
        """Give what a model is shown when it is asked for the next turn, or None where the template cannot say."""
        try:
            return self._rendered(messages, add_generation_prompt=True)[0] if messages else None
        except InvalidRecord:
            return None

    @cached_property
    def _endings(self) -> tuple[str, ...]:
        """What may stand behind the assistant's words, without the space at its end; the longest first."""
        exchange = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
        last = self._around(exchange, 1)[1].rstrip()
        # Some templates write EOS once, behind everything, and not behind every turn.
        return last, last.removesuffix(self._special_tokens.get("eos_token", "")).rstrip(), ""

    def _rendered(self, messages: list[Message], **options: bool) -> tuple[str, list[Span]]:
        try:
            texts, spans = render_jinja_template(
                [messages], chat_template=self._template, **self._special_tokens, **options
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise InvalidRecord(f"the chat template refuses it: {error}") from None
        return texts[0], spans[0] if spans else []
