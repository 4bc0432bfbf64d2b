"""Each turn is learned as a server asks for it: in a row with others, or in an example of its own."""

from pathlib import Path
from typing import Any

import pytest
from support.trainer.models import write_jsonl
from support.trainer.prepared import (
    make_tokenizer,
    packed_documents,
    prepare,
    prepare_config,
    trained_texts,
)
from support.trainer.renderings import TEMPLATES, learned, rendering_of
from support.trainer.stages import environment_in, run_to_failure

from finetune_trainer.contract import Environment, ExitCode
from finetune_trainer.data.records.records import InvalidRecord

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
RETURNS = CHATML.replace(
    "<|end|>",
    "{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}",
)
THINKS = CHATML.replace(
    "{{ m.content }}",
    "{% if m.role == 'assistant' and loop.last %}<t></t>{% endif %}{{ m.content }}",
)
NO_END = CHATML.replace("<|end|>", "")
MARKS_CONTENT = CHATML.replace(
    "{{ m.content }}<|end|>",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}<|end|>",
)
TURNS = [
    {"role": "user", "content": "1?"},
    {"role": "assistant", "content": "one"},
    {"role": "user", "content": "2?"},
    {"role": "assistant", "content": "two"},
]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, [["one<|end|>", "two<|end|>"]]),
        (RETURNS, [["one<|return|>"], ["two<|return|>"]]),
        (THINKS, [["<t></t>one<|end|>"], ["<t></t>two<|end|>"]]),
        (NO_END, [["one<eos>"], ["two<eos>"]]),
        (MARKS_CONTENT, [["one<|end|>", "two<|end|>"]]),
    ],
    ids=["same text", "other ends", "other begins", "no ends", "marks without ends"],
)
def test_turn_is_learned_as_if_it_were_the_last(
    template: str, expected: list[list[str]]
) -> None:
    assert learned(template, {"messages": TURNS}) == expected


def test_example_of_a_turn_ends_with_it() -> None:
    first, second = rendering_of(THINKS, {"messages": TURNS}).examples
    assert first.text == "<|user|>1?<|end|><|assistant|><t></t>one<|end|>"
    assert second.text.startswith("<|user|>1?<|end|><|assistant|>one<|end|><|user|>2?")


def test_turns_with_the_same_text_share_an_example() -> None:
    """Qwen3 shows the reasoning of all turns behind the last question, and of no turn before it."""
    template = (TEMPLATES / "qwen3.jinja").read_text()
    call = {
        "type": "function",
        "function": {"name": "add", "arguments": {"a": 2}},
    }
    messages = [
        *TURNS[:2],
        {"role": "user", "content": "2?"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "I add.",
            "tool_calls": [call],
        },
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "two", "reasoning_content": "It is."},
    ]
    examples = rendering_of(template, {"messages": messages}).examples
    assert [sorted(example.spans) for example in examples] == [[1], [3, 5]]


def test_turn_without_any_end_is_refused_without_eos() -> None:
    with pytest.raises(
        InvalidRecord, match=r"messages\[3\]: neither the chat template"
    ):
        learned(NO_END, {"messages": TURNS}, eos="")
    assert learned(CHATML, {"messages": TURNS}, eos="")


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return environment_in(tmp_path)


def write(environment: Environment, *records: dict[str, Any]) -> None:
    assert environment.manifest_dir
    write_jsonl(environment.manifest_dir / "data.jsonl", list(records))


def test_record_with_several_examples_counts_once(
    tmp_path: Path,
    environment: Environment,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tokenizer = make_tokenizer(tmp_path / "model", chat_template=THINKS)
    write(environment, {"messages": TURNS}, {"messages": TURNS[:2]})
    datasets = [{"uri": "data.jsonl", "weight": 2}]
    config = prepare_config(tmp_path / "model", datasets=datasets, context_length=128)
    result = prepare(config, environment)

    assert result.records == 2
    assert result.invalid == 0
    assert result.truncated == 0
    assert len(packed_documents(environment)) == 6
    once = ["<t></t>one<|end|>", "<t></t>one<|end|>", "<t></t>two<|end|>"]
    assert trained_texts(environment, tokenizer) == sorted(once * 2)
    log = capsys.readouterr().out
    assert "1 conversations with an example for each turn" in log


def test_examples_of_a_record_are_in_one_split(
    tmp_path: Path, environment: Environment
) -> None:
    make_tokenizer(tmp_path / "model", chat_template=THINKS)
    turns = [[*TURNS[:1], {"role": "assistant", "content": f"{n}"}] for n in range(40)]
    write(environment, *({"messages": turn + TURNS[2:]} for turn in turns))
    config = prepare_config(
        tmp_path / "model", validation_fraction=0.5, context_length=128
    )
    prepare(config, environment)

    train = packed_documents(environment, "train")
    validation = packed_documents(environment, "validation")
    assert len(train) % 2 == len(validation) % 2 == 0
    assert len(train) + len(validation) == 80


def test_long_example_of_a_turn_is_truncated_alone(
    tmp_path: Path, environment: Environment
) -> None:
    tokenizer = make_tokenizer(tmp_path / "model", chat_template=THINKS)
    long = [*TURNS[:2], {"role": "user", "content": "why? " * 50}, TURNS[3]]
    write(environment, {"messages": long})
    result = prepare(prepare_config(tmp_path / "model"), environment)

    assert result.records == 1
    assert result.truncated == 1
    assert result.dropped == 0
    assert trained_texts(environment, tokenizer) == ["<t></t>one<|end|>"]


def test_completion_of_several_turns_needs_the_same_texts(
    tmp_path: Path, environment: Environment
) -> None:
    pair = {
        "prompt": TURNS[:1],
        "chosen": TURNS[1:],
        "rejected": [{"role": "assistant", "content": "no"}],
    }
    make_tokenizer(tmp_path / "model", chat_template=THINKS)
    write(environment, pair)
    config = prepare_config(tmp_path / "model", objective="DPO", context_length=128)
    message, code = run_to_failure(config, environment)
    assert code == ExitCode.DATA
    assert "chosen has several turns" in message
    assert "put all turns but the last into the prompt" in message

    write(environment, pair | {"prompt": TURNS[:3], "chosen": TURNS[3:]})
    assert prepare(config, environment).train_rows == 2


def test_long_text_is_split_into_pieces(
    tmp_path: Path,
    environment: Environment,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each piece begins with the last token of the piece before it, so that every token but the first is a target."""
    tokenizer = make_tokenizer(tmp_path / "model")
    text = "the file number " * 60
    write(environment, {"text": text}, {"text": "short"})
    config = prepare_config(tmp_path / "model", packing=False)
    result = prepare(config, environment)

    assert result.records == 2
    assert result.split == 1
    assert result.truncated == 0
    *pieces, short = packed_documents(environment)
    tokens = pieces[0][0]
    targets = pieces[0][1]
    for piece, loss_mask in pieces[1:]:
        assert piece[0] == tokens[-1]
        assert loss_mask[0] == 0
        tokens = tokens + piece[1:]
        targets = targets + loss_mask[1:]
    assert tokens == [*tokenizer(text).input_ids, tokenizer.eos_token_id]
    assert targets == [0] + [1] * (len(tokens) - 1)
    assert tokens.count(tokenizer.eos_token_id) == 1
    assert short[0][-1] == tokenizer.eos_token_id
    assert "1 split into pieces of 64 tokens" in capsys.readouterr().out


def test_long_completion_is_truncated_unless_split_is_asked_for(
    tmp_path: Path, environment: Environment
) -> None:
    make_tokenizer(tmp_path / "model")
    write(environment, {"prompt": "the", "completion": " file" * 200})
    config = prepare_config(tmp_path / "model", too_long="Split")
    message, code = run_to_failure(config, environment)
    assert code == ExitCode.DATA
    assert "only plain text can be split: set prepare.tooLong to Truncate" in message

    assert prepare(prepare_config(tmp_path / "model"), environment).truncated == 1


def test_completion_is_refused_without_eos(
    tmp_path: Path,
    environment: Environment,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tokenizer = make_tokenizer(tmp_path / "model")
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "model")
    write(environment, {"prompt": "the", "completion": " file"})
    message, code = run_to_failure(prepare_config(tmp_path / "model"), environment)
    assert code == ExitCode.DATA
    assert "the tokenizer has no EOS token, which ends a completion" in message

    write(environment, {"text": "the file"})
    assert prepare(prepare_config(tmp_path / "model"), environment).records == 1
    assert "the tokenizer has no EOS token, so that no plain" in capsys.readouterr().out
