"""A conversation that is rendered once has the texts that a rendering of each of its beginnings has."""

from typing import Any

import pytest
from support.trainer.renderings import TEMPLATES, TokenizerWithTemplate

from finetune_trainer.data.records.beginnings import Beginnings
from finetune_trainer.data.records.chat_template import DEFAULT_TEMPLATE, ChatTemplate
from finetune_trainer.data.records.conversations import Conversation, conversation_of
from finetune_trainer.data.records.records import InvalidRecord

ROLES = ("system", "user", "assistant", "user", "assistant", "user", "assistant")
TURNS = [{"role": role, "content": f"{role} {at}"} for at, role in enumerate(ROLES)]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
CALLS = [
    {"role": "user", "content": "Add."},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "Two.", "thinking": "One and one."},
]
RECORDS: list[dict[str, Any]] = [
    {"messages": TURNS},
    {"messages": TURNS[1:]},
    {"messages": TURNS[1:5], "tools": [TOOL]},
    {"messages": CALLS, "tools": [TOOL]},
    {"messages": [TURNS[2], *TURNS[1:3]]},
]
MESSAGE = "{{ message.role }}: {{ message.content }}\n"
LOOP = "{% for message in messages %}" + MESSAGE + "{% endfor %}"
PROMPT = "{% if add_generation_prompt %}assistant: {% endif %}"
IN_ORDER = {
    "plain": LOOP + PROMPT,
    "default": DEFAULT_TEMPLATE,
    "text behind the loop": LOOP + "The end.{{ eos_token }}" + PROMPT,
    "another name": "{% set all = messages %}" + LOOP.replace("messages", "all") + PROMPT,
    "first message": "{{ messages[0].content }}" + LOOP + PROMPT,
    "first in the loop": LOOP.replace(MESSAGE, MESSAGE + "{{ loop.first }}") + PROMPT,
    "earlier messages": LOOP.replace(MESSAGE, MESSAGE + "{{ loop.previtem }}") + PROMPT,
    "state of the loop": "{% set s = namespace(n=0) %}"
    + LOOP.replace(MESSAGE, MESSAGE + "{% set s.n = s.n + 1 %}{{ s.n }}") + PROMPT,
    "inner loop": LOOP.replace(
        MESSAGE, MESSAGE + "{% for call in message.tool_calls %}{{ loop.last }}{% endfor %}"
    ) + PROMPT,
    "filtered": LOOP.replace("in messages", "in messages if message.role != 'tool'") + PROMPT,
    "refusal": "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + LOOP + PROMPT,
    "refused prompt": LOOP + "{% if add_generation_prompt %}{{ raise_exception('no') }}{% endif %}",
    "tools behind": LOOP + "{% if tools %}{{ tools | tojson }}{% endif %}" + PROMPT,
    "left early": LOOP.replace(
        MESSAGE, MESSAGE + "{% if message.content == 'user 3' %}{% break %}{% endif %}"
    ) + PROMPT,
    "last only of tools": LOOP.replace(
        MESSAGE, MESSAGE + "{% if message.role == 'tool' and loop.last %}!{% endif %}"
    ) + PROMPT,
    "marks": LOOP.replace(
        "{{ message.content }}", "{% generation %}{{ message.content }}{% endgeneration %}"
    ) + PROMPT,
    "mark behind": LOOP + "{% generation %}!{% endgeneration %}" + PROMPT,
}  # fmt: skip
OTHERS = {
    "last in the loop": LOOP.replace(MESSAGE, MESSAGE + "{{ loop.last }}") + PROMPT,
    "loop by key": LOOP.replace(MESSAGE, MESSAGE + "{{ loop['last'] }}") + PROMPT,
    "loop by another name": LOOP.replace(
        MESSAGE, MESSAGE + "{% set l = loop %}{{ l.length }}"
    ) + PROMPT,
    "loop of a macro": LOOP.replace(
        MESSAGE, "{% macro m() %}{{ loop.revindex }}{% endmacro %}{{ m() }}"
    ) + PROMPT,
    "outer loop": LOOP.replace(
        MESSAGE, MESSAGE + "{% for end in [1] if loop.last %}!{% endfor %}"
    ) + PROMPT,
    "number of messages": "{{ messages | length }}" + LOOP + PROMPT,
    "last message": "{{ messages[-1].content }}" + LOOP + PROMPT,
    "next message": LOOP.replace(
        MESSAGE, MESSAGE + "{{ messages[loop.index0 + 1].role }}"
    ) + PROMPT,
    "prompt before": PROMPT + LOOP,
    "prompt in the loop": LOOP.replace(MESSAGE, PROMPT + MESSAGE),
    "state behind": "{% set s = namespace(n=0) %}"
    + LOOP.replace(MESSAGE, MESSAGE + "{% set s.n = s.n + 1 %}") + "{{ s.n }}" + PROMPT,
    "macro of the state": "{% set s = namespace(n=0) %}{% macro m() %}{{ s.n }}{% endmacro %}"
    + LOOP.replace(MESSAGE, MESSAGE + "{% set s.n = s.n + 1 %}") + "{{ m() }}" + PROMPT,
    "first message behind": LOOP + "{{ messages[0].content }}" + PROMPT,
    "another list": LOOP.replace("in messages", "in messages[1:]") + PROMPT,
    "name of two lists": "{% set all = messages %}{% set all = messages[1:] %}"
    + LOOP.replace("in messages", "in all") + PROMPT,
    "two loops": LOOP + LOOP + PROMPT,
    "loop in a condition": "{% if tools %}" + LOOP + "{% endif %}" + PROMPT,
    "other end": LOOP.replace("{% endfor %}", "{% else %}None.{% endfor %}") + PROMPT,
    "recursive": LOOP.replace("in messages", "in messages recursive") + PROMPT,
    "block": LOOP + "{% block b %}!{% endblock %}" + PROMPT,
}  # fmt: skip
SHIPPED = {path.stem: path.read_text() for path in sorted(TEMPLATES.glob("*.jinja"))}


def outcome(render: Any, *arguments: Any) -> object:
    """Return what a function returns, or the text of its refusal."""
    try:
        return render(*arguments)
    except InvalidRecord as error:
        return str(error)


def check_beginnings(template: str) -> bool:
    """Compare all beginnings with renderings of their own; return whether a short conversation was rendered once."""
    chat = ChatTemplate(TokenizerWithTemplate(template))
    for record in RECORDS:
        conversation: Conversation = conversation_of(record)
        source = chat.source(conversation)
        beginnings = Beginnings(chat, source)
        whole = outcome(chat.rendered, source)
        assert outcome(lambda texts: texts.whole, beginnings) == whole
        if isinstance(whole, str):
            continue
        for count in range(len(conversation.messages) + 1):
            shorter = source.before(count)
            if count:
                expected = outcome(chat.rendered, shorter)
                assert outcome(beginnings.rendered, count) == expected
            assert beginnings.prompt(count) == chat.prompt(shorter)
    return chat.in_order(chat.source(Conversation(TURNS[1:3]))) is not None


@pytest.mark.parametrize("name", IN_ORDER)
def test_template_in_order_has_equal_beginnings(name: str) -> None:
    # Such a mark has another place in the text of fewer messages.
    assert check_beginnings(IN_ORDER[name]) == (name != "mark behind")


@pytest.mark.parametrize("name", OTHERS)
def test_template_that_may_look_ahead_renders_each(name: str) -> None:
    assert not check_beginnings(OTHERS[name])


def test_shipped_templates_have_equal_beginnings() -> None:
    in_order = {name for name in SHIPPED if check_beginnings(SHIPPED[name])}
    assert in_order >= {"gemma", "llama3", "phi3", "qwen2_5", "qwen3_instruct_2507"}
