"""Records of gpt-oss, whose messages speak on channels: what the rows hold, and what is refused."""

import json
from typing import Any

import pytest
from support.trainer.renderings import (
    TEMPLATES,
    TokenizerWithTemplate,
    learned,
    rendering_of,
)

from finetune_trainer.data.records.chat_template import ChatTemplate
from finetune_trainer.data.records.conversations import conversation_of
from finetune_trainer.data.records.message_forms import read_messages
from finetune_trainer.data.records.records import InvalidRecord

GPT_OSS = (TEMPLATES / "gptoss.jinja").read_text()
QWEN = (TEMPLATES / "qwen3.jinja").read_text()
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
            },
        },
    }
]
QUESTION = {"role": "user", "content": "What is the weather in Bern?"}
THOUGHT = {
    "role": "assistant",
    "channel": "analysis",
    "content": "I must ask the tool.",
}
CALL = {
    "role": "assistant",
    "channel": "commentary",
    "recipient": "functions.weather",
    "content_type": "json",
    "content": '{"city": "Bern"}',
}
RESULT = {
    "role": "tool",
    "name": "functions.weather",
    "channel": "commentary",
    "recipient": "assistant",
    "content": "rain all day",
}
THOUGHT_AGAIN = {"role": "assistant", "channel": "analysis", "content": "It rains."}
ANSWER = {"role": "assistant", "channel": "final", "content": "It rains in Bern."}
CALLED = [QUESTION, THOUGHT, CALL, RESULT, THOUGHT_AGAIN, ANSWER]


def learned_of(template: str, messages: list[Any], **fields: Any) -> list[list[str]]:
    return learned(
        template, {"messages": read_messages(messages, "messages"), **fields}
    )


def test_reasoning_and_answer_are_learned_on_their_channels():
    [[turn]] = learned_of(GPT_OSS, [QUESTION, THOUGHT, ANSWER])
    assert turn == (
        "<|channel|>analysis<|message|>I must ask the tool.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>It rains in Bern.<|return|>"
    )


def test_call_and_its_reasoning_are_learned_before_the_answer():
    # In one example: the answer stands behind the call with its reasoning, as a server sends it.
    [[call, answer]] = learned_of(GPT_OSS, CALLED, tools=TOOLS)
    assert "I must ask the tool." in call
    assert (
        'functions.weather<|channel|>commentary json<|message|>{"city": "Bern"}<|call|>'
        in call
    )
    assert answer == (
        "<|channel|>analysis<|message|>It rains.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>It rains in Bern.<|return|>"
    )


def test_answer_is_learned_behind_the_prompt_of_a_server():
    messages = read_messages(CALLED, "messages")
    chat = ChatTemplate(TokenizerWithTemplate(GPT_OSS))
    source = chat.source(conversation_of({"messages": messages, "tools": TOOLS}))
    prompt = chat.prompt(source.before(len(messages) - 1))
    last = rendering_of(GPT_OSS, {"messages": messages, "tools": TOOLS}).examples[-1]
    start, _ = last.loss_spans[-1]
    assert "I must ask the tool." in last.text[:start]
    assert last.text[:start] == prompt


def test_channels_are_rendered_by_other_templates():
    texts = json.dumps(
        learned_of(
            QWEN,
            CALLED,
            tools=TOOLS,
        )
    )
    for text in ("I must ask the tool.", "weather", "It rains.", "It rains in Bern."):
        assert text in texts


def test_usual_tool_data_are_learned_by_gpt_oss():
    call = {
        "type": "function",
        "function": {"name": "weather", "arguments": {"city": "Bern"}},
    }
    messages = [
        {"role": "system", "content": "Be short."},
        QUESTION,
        {"role": "assistant", "thinking": "I must ask the tool.", "tool_calls": [call]},
        {"role": "tool", "name": "weather", "content": "rain all day"},
        {"role": "assistant", "content": "It rains in Bern."},
    ]
    [[call_turn, answer]] = learned_of(GPT_OSS, messages, tools=TOOLS)
    assert '{"city": "Bern"}' in call_turn
    assert "It rains in Bern." in answer


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([QUESTION, ANSWER, THOUGHT], "messages[2].channel is analysis, and no answer"),
        ([QUESTION, THOUGHT, QUESTION, ANSWER], "messages[1].channel is analysis, and no answer"),
        ([QUESTION, THOUGHT, {**ANSWER, "thinking": "No."}], "reasoning of its own"),
        ([QUESTION, {**CALL, "recipient": "python"}, ANSWER], "messages[1].channel"),
        ([QUESTION, {**ANSWER, "channel": "commentary"}, ANSWER], "messages[1].channel"),
    ],
)  # fmt: skip
def test_channel_without_a_form_is_refused_by_name(messages, reason):
    with pytest.raises(InvalidRecord) as refused:
        learned_of(GPT_OSS, messages)
    assert reason in str(refused.value)


def test_turn_out_of_the_loss_keeps_its_switch():
    [turns] = learned_of(
        GPT_OSS, [QUESTION, {**ANSWER, "train": False}, QUESTION, ANSWER]
    )
    assert len(turns) == 1
