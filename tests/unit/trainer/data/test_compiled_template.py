"""A compiled template renders what transformers renders."""

import re
from collections.abc import Callable
from datetime import date
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from finetune_trainer.data.records.compiled_template import (
    CompiledTemplate,
    TemplateInput,
)

MARKED = (
    "{{- bos_token -}}{%- for message in messages -%}{{- message.role ~ ':' -}}"
    "{%- if message.role == 'assistant' -%}"
    "{% generation %}{{- message.content -}}{{- eos_token -}}{% endgeneration %}"
    "{%- else -%}{{- message | tojson -}}{%- endif -%}{%- endfor -%}"
    "{%- if tools -%}{{- tools -}}{%- endif -%}"
    "{%- if add_generation_prompt -%}assistant:{%- endif -%}"
)
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi", "seen": date(2024, 1, 2), "thinking": "Hm."},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "ä"},
    {"role": "assistant", "content": "No."},
]
TOOLS = [{"function": {"name": "add", "since": date(2024, 1, 2)}}]


@pytest.mark.parametrize("length", range(1, 5))
def test_beginning_of_conversation_renders_as_in_transformers(length: int) -> None:
    """Also values that no JSON has, which may not reach the template."""
    template = CompiledTemplate(MARKED, TOKENS)
    source = TemplateInput.of(MESSAGES, TOOLS).before(length)
    messages = MESSAGES[:length]
    expected, marks = render_jinja_template(
        [messages],
        tools=TOOLS,
        chat_template=MARKED,
        return_assistant_tokens_mask=True,
        **TOKENS,
    )
    prompts, _ = render_jinja_template(
        [messages],
        tools=TOOLS,
        chat_template=MARKED,
        add_generation_prompt=True,
        **TOKENS,
    )
    assert template.text_with_marks(source) == (expected[0], marks[0])
    assert template.text(source) == expected[0]
    assert template.text(source, is_prompt=True) == prompts[0]
    assert "<date>" in expected[0]


def test_template_that_fails_between_marks_renders_again() -> None:
    """A failed rendering leaves no marks for the next."""
    text = "{% generation %}{{ messages[0].content }}{{ 1 // messages[0].n }}{% endgeneration %}"
    template = CompiledTemplate(text, {})
    with pytest.raises(ZeroDivisionError):
        template.text_with_marks(TemplateInput([{"content": "a", "n": 0}]))
    rendered = template.text_with_marks(TemplateInput([{"content": "a", "n": 1}]))
    assert rendered == ("a1", [(0, 2)])


@pytest.mark.parametrize(
    "expression",
    [
        *("message.items", "message.items()", "message.role.strip", "message.other"),
        *("message.content.split('i')", "message.content.format", "message.content.upper()"),
        *("'{0.__class__}'.format(message)", "message.__class__", "message.role.__class__"),
        *("message.content.replace('H', message.role)", "message.update({'role': 'x'})"),
        *("message.content.x is defined", "message['items']", "(message | string).strip"),
    ],
)  # fmt: skip
def test_look_up_has_the_result_of_the_sandbox(expression: str) -> None:
    text = f"{{% for message in messages %}}{{{{ {expression} }}}}{{% endfor %}}"
    messages = [{"role": " user", "content": "Hi", "items": "three"}]

    def outcome(render: Callable[[], str]) -> str:
        try:
            return re.sub(r"0x\w+", "", render())
        except Exception as error:  # noqa: BLE001  any error of a template
            return repr(error)

    # Another text is compiled on its own, without the faster look-up.
    expected = outcome(
        lambda: render_jinja_template([messages], chat_template=text + "{# #}")[0][0]
    )
    template = CompiledTemplate(text, {})
    assert outcome(lambda: template.text(TemplateInput(messages))) == expected
