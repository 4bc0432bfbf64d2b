"""The loss mask, exact to the token: completions after their prompts, and the assistant's turns."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from support.trainer.models import write_jsonl
from support.trainer.prepared import (
    make_tokenizer,
    packed_documents,
    prepare,
    prepare_config,
    trained_texts,
)
from support.trainer.renderings import learned, learned_by_example, rendering_of
from support.trainer.stages import environment_in, run_to_failure

from finetune_trainer.contract import Environment, ExitCode
from finetune_trainer.data.records.chat_template import ChatTemplate
from finetune_trainer.data.records.records import InvalidRecord
from finetune_trainer.data.tokenizing.encoder import Encoder, RecordFormatter

many_examples = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
texts = st.text(
    st.sampled_from(" \nabenops the.,éß漢🙂<"), max_size=30
)  # no ">", so no special tokens


@pytest.fixture(scope="module", params=["plain", "trimmed offsets", "BOS"])
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    return make_tokenizer(
        tmp_path_factory.mktemp("tokenizer"),
        trims_offsets=request.param == "trimmed offsets",
        writes_bos=request.param == "BOS",
    )


@many_examples
@given(prompt=texts, completion=texts)
def test_tokens_are_those_of_the_evaluation(
    tokenizer: Any, prompt: str, completion: str
) -> None:
    from lm_eval.api.model import TemplateLM  # noqa: PLC0415  the import takes seconds

    assume(prompt.strip() and completion.strip())
    formatted = RecordFormatter(ChatTemplate(tokenizer)).format(
        {"prompt": prompt, "completion": completion}
    )
    [(document, _, _)] = Encoder(tokenizer).encode(list(formatted.examples))

    evaluation = SimpleNamespace(backend="causal", tok_encode=tokenizer.encode)
    context, continuation = TemplateLM._encode_pair(evaluation, prompt, completion)
    assert document.tokens.tolist()[:-1] == tokenizer.encode(prompt + completion)
    if (
        tokenizer.encode(prompt + completion)[: len(context)] == context
        and prompt == prompt.rstrip()
    ):
        assert document.tokens[document.loss_mask == 1].tolist() == [
            *continuation,
            tokenizer.eos_token_id,
        ]


@many_examples
@given(prompt=texts, completion=texts)
def test_loss_covers_tokens_with_a_character_of_the_completion(
    tokenizer: Any, prompt: str, completion: str
) -> None:
    assume(completion.strip())
    formatted = RecordFormatter(ChatTemplate(tokenizer)).format(
        {"prompt": prompt, "completion": completion}
    )
    [(document, _, _)] = Encoder(tokenizer).encode(list(formatted.examples))

    # With a byte-level tokenizer, each character of a token's name is one byte of the text.
    names = tokenizer.convert_ids_to_tokens(document.tokens[:-1].tolist())
    end = 0
    for index, name in enumerate(names):
        end += 0 if name == "<bos>" else len(name)
        assert document.loss_mask[index] == (index > 0 and end > len(prompt.encode()))
    assert document.loss_mask[-1] == 1


CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
EOS_ONCE = CHATML.replace(
    "{% endfor %}",
    "{% endfor %}{% if not add_generation_prompt %}{{ eos_token }}{% endif %}",
)
THINKING = (
    "{% for m in messages %}<|{{ m.role }}|>\n"
    "{% if m.role == 'assistant' and loop.last and '</think>' not in m.content %}<think>\n</think>\n{% endif %}"
    "{{ m.content.split('</think>')[-1].strip() if m.role == 'assistant' and not loop.last else m.content }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
PROMPTS_FOR_THOUGHT = CHATML.replace("<|assistant|>\n", "<|assistant|>\n<think>\n")
MARKED = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
DATED = "{{ strftime_now('%d %b %Y') }} " + CHATML
ALTERNATING = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    + CHATML
)

TWO_TURNS = [
    {"role": "user", "content": "yes"},
    {"role": "assistant", "content": " yes "},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "yes\n"},
]


@pytest.mark.parametrize(
    ("template", "turns"),
    [
        (CHATML, [["yes<|end|>", "yes<|end|>"]]),
        (EOS_ONCE, [["yes<|end|>", "yes<|end|>\n<eos>"]]),
        (
            THINKING,
            [
                ["<think>\n</think>\n yes <|end|>"],
                ["<think>\n</think>\nyes\n<|end|>"],
            ],
        ),
        (MARKED, [[" yes <eos>", "yes\n<eos>"]]),
    ],
    ids=["plain", "EOS once", "adds reasoning to the last turn", "marked"],
)
def test_spans_cover_exactly_the_assistants_turns(
    template: str, turns: list[list[str]]
) -> None:
    assert learned(template, {"messages": TWO_TURNS}) == turns


def test_turn_behind_another_prompt_than_a_servers_is_named() -> None:
    rendering = rendering_of(PROMPTS_FOR_THOUGHT, {"messages": TWO_TURNS})
    assert rendering.unrendered[0].startswith(
        "messages[1]: servers ask for it behind '<think>\\n', which is not rendered"
    )
    assert learned_by_example(rendering) == [["yes<|end|>", "yes<|end|>"]]


def test_reasoning_of_an_earlier_turn_is_learned_by_itself() -> None:
    messages = [dict(message) for message in TWO_TURNS]
    messages[1]["content"] = "<think>hm</think>yes"
    messages[3]["content"] = "<think>so</think>no"

    assert learned(THINKING, {"messages": messages}) == [
        ["<think>hm</think>yes<|end|>"],
        ["<think>so</think>no<|end|>"],
    ]


def test_conversation_may_start_but_not_end_without_an_answer() -> None:
    messages = [
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "hello"},
    ]
    assert learned(CHATML, {"messages": messages[:1]}) == [["hello<|end|>"]]
    with pytest.raises(InvalidRecord, match=r"messages\[1\]: no turn of the assis"):
        learned(CHATML, {"messages": messages})


def test_template_that_prints_the_date_gets_a_fixed_one() -> None:
    [example] = rendering_of(DATED, {"messages": TWO_TURNS}).examples
    assert example.text.startswith("26 Jul 2024 ")


def test_template_that_drops_an_assistants_turn_is_rejected() -> None:
    with pytest.raises(
        InvalidRecord, match=r"messages\[1\].content: the chat template does not render"
    ):
        learned(
            "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
            {"messages": TWO_TURNS},
        )


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return environment_in(tmp_path)


def write_conversations(
    environment: Environment, *conversations: list[dict[str, str]]
) -> None:
    assert environment.manifest_dir
    write_jsonl(
        environment.manifest_dir / "data.jsonl",
        [{"messages": messages} for messages in conversations],
    )


def test_loss_covers_only_the_assistants_turns(
    tmp_path: Path, environment: Environment
) -> None:
    tokenizer = make_tokenizer(tmp_path / "chat", chat_template=CHATML)
    write_conversations(environment, TWO_TURNS)
    prepare(prepare_config(tmp_path / "chat", context_length=128), environment)

    assert trained_texts(environment, tokenizer) == ["yes<|end|>|yes<|end|>"]


@pytest.mark.parametrize("bos", ["", "<bos>"])
def test_without_a_chat_template_turns_are_role_and_content(
    tmp_path: Path, environment: Environment, bos: str
) -> None:
    tokenizer = make_tokenizer(tmp_path / "base", writes_bos=bool(bos))
    write_conversations(environment, [{"role": "system", "content": "be"}, *TWO_TURNS])
    prepare(prepare_config(tmp_path / "base", context_length=128), environment)

    [(tokens, _)] = packed_documents(environment)
    assert tokenizer.decode(tokens) == (
        f"{bos}system: be\n\nuser: yes\n\nassistant: yes<eos>\n\nuser: and?\n\nassistant: yes<eos>"
    )
    assert trained_texts(environment, tokenizer) == [" yes<eos>| yes<eos>"]


def test_conversation_rejected_by_the_template_is_invalid(
    tmp_path: Path, environment: Environment
) -> None:
    make_tokenizer(tmp_path / "chat", chat_template=ALTERNATING)
    write_conversations(
        environment, TWO_TURNS, [{"role": "system", "content": "be"}, *TWO_TURNS]
    )

    message, code = run_to_failure(prepare_config(tmp_path / "chat"), environment)
    assert code == ExitCode.DATA
    assert (
        "data.jsonl:2: the chat template rejected the conversation: no system role"
        in message
    )
