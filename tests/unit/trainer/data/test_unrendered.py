"""Texts of a conversation that a chat template drops: refused by name, or used and counted."""

from pathlib import Path
from typing import Any

import pytest
from support.trainer.models import write_jsonl
from support.trainer.prepared import make_tokenizer, prepare, prepare_config
from support.trainer.renderings import TEMPLATES, learned, rendering_of
from support.trainer.stages import environment_in, run_to_failure

from finetune_trainer.contract import Environment, ExitCode
from finetune_trainer.data.records.records import InvalidRecord
from finetune_trainer.data.records.unrendered import RenderedText, is_label

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_SYSTEM = CHATML.replace(
    "in messages %}",
    "in messages if m.role == 'user' or m.role == 'assistant' %}",
)
CUTS_THINKING = CHATML.replace("m.content }}", "m.content.split('</think>')[-1] }}")
SHOWS_THINKING = CUTS_THINKING.replace(
    "m.role }}\n",
    "m.role }}\n{% if m.reasoning_content %}<r>{{ m.reasoning_content }}</r>{% endif %}",
)
CALLS = CHATML.replace(
    "{{ m.content }}",
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}<call>{{ CALL }}</call>{% endfor %}",
)


def user(content: str = "Is it good?", **keys: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **keys}


def assistant(content: str = "Yes it is.", **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **keys}


def system(content: str = "Answer as the old king.") -> dict[str, Any]:
    return {"role": "system", "content": content}


def call(**arguments: Any) -> dict[str, Any]:
    function = {"name": "add", "arguments": arguments}
    return assistant("", tool_calls=[{"type": "function", "function": function}])


def template(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text()


DROPPED = [
    (NO_SYSTEM, [system(), user(), assistant()], "messages[0].content"),
    (
        NO_SYSTEM,
        [system("Yes"), user("Yes?"), assistant("Yes.")],
        "messages[0].content",
    ),
    (
        NO_SYSTEM,
        [{"role": "developer", "content": "Be short."}, user(), assistant()],
        "messages[0].content",
    ),
    (
        template("deepseek_r1_distill"),
        [system(), system("Be short."), user(), assistant()],
        "messages[0].content",
    ),
    (
        CUTS_THINKING,
        [user(), assistant("<think>\nThey said so.\n</think>\n\nYes.")],
        "messages[1].content",
    ),
    (
        CUTS_THINKING,
        [user(), assistant("They said so.\n</think>\n\nYes.")],
        "messages[1].content",
    ),
    (CHATML, [user(), assistant(thinking="They said so.")], "messages[1].thinking"),
    (CHATML, [user(), assistant(reasoning="Yes")], "messages[1].reasoning"),
    (CHATML, [user(name="The old king"), assistant()], "messages[0].name"),
    (CHATML, [user(), assistant(notes=["a b", {"c": "d e"}])], "messages[1].notes[0]"),
    (
        CHATML.replace("{{ m.content }}", "{{ m.content[:4] }}"),
        [user("Is"), assistant()],
        "messages[1].content",
    ),
    (
        CALLS.replace("CALL", "c.function.name"),
        [user(), call(a="two"), assistant()],
        "messages[1].tool_calls[0].function.arguments.a",
    ),
    (
        CALLS.replace("CALL", "c.function.name"),
        [user(), call(a="add"), assistant()],
        "messages[1].tool_calls[0].function.arguments",
    ),
]


@pytest.mark.parametrize(
    ("template", "messages", "place"),
    DROPPED,
    ids=[f"{number} {place}" for number, (_, _, place) in enumerate(DROPPED)],
)
def test_text_that_a_template_drops_is_named(
    template: str, messages: list[dict[str, Any]], place: str
) -> None:
    sentences = rendering_of(template, {"messages": messages}).unrendered
    assert sentences[0].startswith(f"{place}: the chat template does not render it: ")


KEPT = [
    (
        CHATML,
        [user(id="msg-1", at="2026-01-31", url="https://a.b/c"), assistant(score=1.5)],
        ["Yes it is.<|im_end|>"],
    ),
    (
        CHATML.replace("{{ m.content }}", "{{ m.content | tojson }}"),
        [user('a "b"\n\tc'), assistant("é\n漢")],
        ['"é\\n漢"<|im_end|>'],
    ),
    (
        CHATML.replace(
            "{{ m.content }}", "{{ m.content | trim | replace('\n', ' ') }}"
        ),
        [user(" a\nb "), assistant("c\nd\n")],
        ["c d<|im_end|>"],
    ),
    (
        NO_SYSTEM.replace("== 'user'", "in ['user', 'system']"),
        [{"role": "developer", "content": "Be short."}, user(), assistant()],
        ["Yes it is.<|im_end|>"],
    ),
    (
        SHOWS_THINKING,
        [user(), assistant("<think>\nThey said so.\n</think>\n\nYes.")],
        ["<r>They said so.</r>Yes.<|im_end|>"],
    ),
    (
        SHOWS_THINKING,
        [user(), assistant(reasoning="They said so.")],
        ["<r>They said so.</r>Yes it is.<|im_end|>"],
    ),
    (
        SHOWS_THINKING.replace("reasoning_content", "reasoning"),
        [user(), assistant(thinking="They said so.")],
        ["<r>They said so.</r>Yes it is.<|im_end|>"],
    ),
    (
        CALLS.replace("CALL", "c.function.name + ' ' + c.function.arguments"),
        [user(), call(a="two"), assistant()],
        ['<call>add {"a": "two"}</call><|im_end|>', "Yes it is.<|im_end|>"],
    ),
    (
        CALLS.replace("CALL", "c.function.arguments"),
        [user(), call(a="two"), assistant()],
        ['<call>{"a": "two"}</call><|im_end|>', "Yes it is.<|im_end|>"],
    ),
    (
        CALLS.replace("CALL", "c.function.arguments | tojson").replace(
            "m.tool_calls or []", "(m.tool_calls if m.content is none else [])"
        ),
        [user(), call(a="two"), assistant()],
        ['<call>{"a": "two"}</call><|im_end|>', "Yes it is.<|im_end|>"],
    ),
    (
        CHATML.replace("{{ m.content }}", "{{ m.content[0].text }}"),
        [user(), assistant()],
        ["Yes it is.<|im_end|>"],
    ),
]


@pytest.mark.parametrize(("template", "messages", "turns"), KEPT)
def test_text_is_handed_over_in_the_form_of_the_template(
    template: str, messages: list[dict[str, Any]], turns: list[str]
) -> None:
    assert learned(template, {"messages": messages}) == [turns]


def test_text_in_another_order_is_rendered() -> None:
    """The template writes all questions first; the second is a part of the first."""
    questions_first = (
        "{% for m in messages if m.role != 'assistant' %}{{ m.content }}|{% endfor %}"
        "{% for m in messages if m.role == 'assistant' %}>{{ m.content }}<e>{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    messages = [user("It is."), user("It"), assistant()]
    assert learned(questions_first, {"messages": messages}) == [["Yes it is.<e>"]]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            {"weight": 0.5},
            "messages[1].weight must be 0 or 1, false or true, it is 0.5",
        ),
        (
            {"weight": "0"},
            'messages[1].weight must be 0 or 1, false or true, it is "0"',
        ),
        ({"train": [1]}, "messages[1].train must be 0 or 1, false or true, it is [1]"),
        ({"weight": 0}, "weight 0 and train false leave no turn to learn"),
        ({"train": False}, "weight 0 and train false leave no turn to learn"),
    ],
)
def test_weight_that_cannot_be_honoured_is_refused(
    keys: dict[str, Any], expected: str
) -> None:
    with pytest.raises(InvalidRecord) as raised:
        learned(CHATML, {"messages": [user(), assistant(**keys)]})
    assert expected in str(raised.value)


def test_true_for_a_message_that_is_not_learned_is_refused() -> None:
    with pytest.raises(InvalidRecord, match=r"messages\[0\].train is true, but only"):
        learned(CHATML, {"messages": [user(train=True), assistant()]})


MARKED = CHATML.replace(
    "{{ m.content }}",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}",
)


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["plain", "marked"])
@pytest.mark.parametrize("out", [{"weight": 0}, {"train": False}, {"weight": 0.0}])
def test_turn_out_of_the_loss_is_not_learned(
    template: str, out: dict[str, Any]
) -> None:
    messages = [
        user(),
        assistant("Bad.", **out),
        user(),
        assistant("Good.", weight=1, train=True),
    ]
    rendering = rendering_of(template, {"messages": messages})
    assert "Bad." in rendering.examples[0].text
    assert learned(template, {"messages": messages}) == [["Good.<|im_end|>"]]


def test_label_is_a_word_without_spaces() -> None:
    dates = ("2026-01-31T10:00:00Z", "2026-01-31 10:00:00")
    for label in ("", "msg_1", *dates, "https://a.b/c", "<urn:uuid:39147604-bfbe>"):
        assert is_label(label)
    for words in ("two words", "Größe", "x" * 201, "<urn:two words>", "<word>"):
        assert not is_label(words)


def test_rendered_text_holds_other_spaces_and_escaped_texts() -> None:
    rendered = RenderedText(r'two words, "in \"JSON\""')
    assert rendered.holds(" two\nwords ")
    assert rendered.holds('in "JSON"')
    assert not rendered.holds("elsewhere")


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return environment_in(tmp_path)


def write(environment: Environment, *conversations: list[dict[str, Any]]) -> None:
    assert environment.manifest_dir
    write_jsonl(
        environment.manifest_dir / "data.jsonl",
        [{"messages": messages} for messages in conversations],
    )


def test_dropped_system_message_makes_the_record_invalid(
    tmp_path: Path, environment: Environment
) -> None:
    make_tokenizer(tmp_path / "model", chat_template=NO_SYSTEM)
    write(environment, [user(), assistant()], [system(), user(), assistant()])

    message, code = run_to_failure(prepare_config(tmp_path / "model"), environment)
    assert code == ExitCode.DATA
    assert (
        "data.jsonl:2: messages[0].content: the chat template does not render it: remove it, "
        "set prepare.chatTemplate, or allow it with prepare.unrendered: Warn\n"
    ) in message + "\n"


def test_dropped_texts_are_counted_and_named_once_with_warn(
    tmp_path: Path,
    environment: Environment,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_tokenizer(tmp_path / "model", chat_template=NO_SYSTEM)
    with_system = [system(), user(), assistant(thinking="They said so.")]
    write(environment, [user(), assistant()], with_system, with_system)
    config = prepare_config(tmp_path / "model", unrendered="Warn", context_length=128)
    result = prepare(config, environment)

    assert result.records == 3
    assert result.invalid == 0
    assert result.unrendered == 2
    log = capsys.readouterr().out
    assert log.count("messages[0].content: the chat template does not render it") == 1
    assert log.count("messages[2].thinking: the chat template does not render it") == 1
    assert "data.jsonl:2: messages[0].content" in log
    assert "2 with a text that the rows do not hold" in log
