"""Chat templates are checked before they are rendered, and arguments are defaults of their variables."""

import sys
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from finetune_trainer.template_syntax import (
    TemplateInvalid,
    read_template,
    unread_arguments,
    variables_of,
    with_defaults,
)

EXCHANGE = [
    {"role": "user", "content": "2+3?"},
    {"role": "assistant", "content": "5"},
]
VALUES: dict[str, Any] = {
    "yes": True,
    "no": False,
    "count": -3,
    "small": 1.5e-7,
    "large": 10**15,
    "empty": "",
    "text": "q\"'\\ \n %} {{ yes }} {% endif %} {# c #} \u2028 \U0001f600 é",
}


def rendered(template: str, **variables: Any) -> str:
    texts, _ = render_jinja_template([EXCHANGE], chat_template=template, **variables)
    return str(texts[0])


@pytest.mark.parametrize(
    "template",
    [
        "{{ yes ~ no ~ count ~ small ~ large ~ empty ~ text }}",
        "  {{ text }}  \n",
        "\n\n{% if yes %}a{% endif %}\n b",
        "  {% if yes %}a{% endif %}\n b",
        "{%- if no %}a{% else %}b{% endif -%}\n",
        "{% macro shown() %}[{{ text }}]{% endmacro %}{% for m in messages %}{{ shown() }}{% endfor %}",
        "{% for m in messages %}{% set seen = text %}{{ seen }}{% endfor %}",
    ],
)
def test_defaults_render_as_arguments_of_the_caller(template: str) -> None:
    assert rendered(with_defaults(template, VALUES)) == rendered(template, **VALUES)


def test_caller_overrides_the_default() -> None:
    template = with_defaults("{{ thinking }}", {"thinking": False})
    assert rendered(template) == "False"
    assert rendered(template, thinking=True) == "True"


def test_server_still_sees_the_variable_as_an_argument() -> None:
    """A server passes only the arguments that the template reads."""
    assert variables_of(with_defaults("{{ a }}", {"b": 1})) == {"a", "b"}


def test_marks_of_generation_see_the_default() -> None:
    template = (
        "{% for m in messages %}{{ m.role }}:"
        "{% if m.role == 'assistant' %}{% generation %}{{ effort }}{{ m.content }}{% endgeneration %}{% endif %}"
        "{% endfor %}"
    )
    texts, spans = render_jinja_template(
        [EXCHANGE],
        chat_template=with_defaults(template, {"effort": "low"}),
        return_assistant_tokens_mask=True,
    )
    assert texts == ["user:assistant:low5"]
    assert [texts[0][start:end] for start, end in spans[0]] == ["low5"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("a\n{{ x", "line 2: unexpected end of template"),
        ("a\n\n{% for m in messages %}", "line 3: Unexpected end of template"),
        ("{% endif %}", "line 1: Encountered unknown tag 'endif'"),
        ("\n{{ x | upercase }}", "line 2: No filter named 'upercase'"),
        ("{{ x is fine }}", "line 1: No test named 'fine'"),
        ("{% import os %}", "line 1: expected token 'as'"),
        ("\n{% include 'other' %}", "line 2: reads another template"),
        ("{% from 'other' import x %}", "line 1: reads another template"),
        ("{% extends 'other' %}", "line 1: reads another template"),
        ("\n{{ messages.__class__ }}", "line 2: reads __class__"),
        ("{{ cycler.__init__.__globals__ }}", "line 1: reads __"),
        ("{{" + "(" * 5000 + "}}", "nested too deeply"),
        ("\n{{ messages | random }}", "line 2: the filter random writes another"),
        ("{% filter random %}ab{% endfilter %}", "line 1: the filter random"),
        ("{{ ['ab', 'cd'] | map('random') | join }}", "line 1: the filter random"),
        ("{{ lipsum(1, false) }}", "line 1: lipsum() writes another text each time"),
    ],
)
def test_unusable_template_is_refused_with_its_line(
    template: str, message: str
) -> None:
    with pytest.raises(TemplateInvalid) as refusal:
        variables_of(template)
    assert message in str(refusal.value)


def test_deep_template_is_refused_whatever_the_recursion_limit() -> None:
    """PyTorch's compiler raises the limit, and then the stack overflows before Python notices."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1_000_000)
    try:
        with pytest.raises(TemplateInvalid, match="nested too deeply"):
            variables_of("{{" + "(" * 200_000 + "}}")
    finally:
        sys.setrecursionlimit(before)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "neither {{ nor {%"),
        (b"# How to answer\n", "neither {{ nor {%"),
        (b'{"chat_template": "{{ messages }}"}', "is JSON"),
        (b"{{ '\xff' }}", "is not UTF-8"),
        (b"{{ x }}" * 200_000, "1,400,000 bytes"),
    ],
)
def test_file_that_is_no_template_is_refused(
    tmp_path: Path, content: bytes, message: str
) -> None:
    file = tmp_path / "template.jinja"
    file.write_bytes(content)
    with pytest.raises(TemplateInvalid) as refusal:
        read_template(file)
    assert message in str(refusal.value)


def test_byte_order_mark_is_no_text_of_a_template(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_bytes(b"\xef\xbb\xbf{{ x }}")
    assert read_template(file) == "{{ x }}"


def test_folder_is_no_template(tmp_path: Path) -> None:
    with pytest.raises(TemplateInvalid, match="is not a file"):
        read_template(tmp_path)


def test_unread_argument_names_those_that_are_read() -> None:
    variables = variables_of("{{ bos_token }}{{ messages }}{{ enable_thinking }}")
    [(name, message)] = unread_arguments(["enable_thinkin"], variables)
    assert name == "enable_thinkin"
    assert message.endswith("it reads enable_thinking")
