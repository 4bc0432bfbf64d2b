"""Loss masks, token by token, against those that transformers computes from the training templates of TRL.

A training template renders and marks the conversation up to a turn. The marked tokens of this turn must be learned
here, and no others, but for two rules: a turn begins behind the prompt of a server, whatever the marks say, and the
white space behind its end is not learned.
"""

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from support.trainer.generated_conversations import (
    Messages,
    conversations,
    tools_for,
    with_text_arguments,
)
from support.trainer.prepared import make_tokenizer
from support.trainer.shipped_templates import (
    MARKED,
    OF_PARTS,
    TRL_TEMPLATES,
    rendering_in,
    with_parts,
)

from finetune_trainer.data.records.conversations import REASONING_NAMES
from finetune_trainer.data.records.records import InvalidRecord
from finetune_trainer.data.records.turns import Example
from finetune_trainer.data.tokenizing.encoder import Encoder, TextExample

EXAMPLES = 100 if os.environ.get("TRAINING") == "all" else 6
Pairs = list[tuple[int, int]]
"""Tokens with their loss mask."""

CONTROL = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<|im_start|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<|END_OF_TURN_TOKEN|>",
    "<turn|>",
    "</s>",
)
"""Tokens with which templates mark turns, some of them; the others consist of several tokens."""

OTHER_ENDS = {
    # This template writes no end. TRL marks the token with which the next turn begins; here EOS is learned.
    "glm4moe": ("<eos>", "<|user|>", "<|observation|>"),
    # A call ends with the token at which servers stop. TRL leaves it out.
    "diffusion_gemma": ("<|tool_response>",),
    "diffusion_gemma_training": ("<|tool_response>",),
}
"""Templates -> ends of a turn that are not the same here and in the marks of TRL."""
REFUSED = {"deepseek_r1_distill", "deepseekv3", "deepseekv3_training"}
"""Templates that refuse plain answers by name: their prompts end with `<think>`, which they do not render."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    tokenizer = make_tokenizer(Path(tmp_path_factory.mktemp("model")))
    tokenizer.add_special_tokens({"additional_special_tokens": list(CONTROL)})
    return tokenizer


def forms_of(name: str, messages: Messages) -> list[Messages]:
    """Return the messages in the forms that a template may read: transformers tries none itself."""
    forms = [[in_template(message) for message in messages]]
    if name.startswith(OF_PARTS):
        forms = [with_parts(form) for form in forms]
    forms.append(with_text_arguments(forms[0]))
    return forms


def in_template(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as `prepare` gives it to a template: reasoning has all its names, a developer is the system."""
    changed = {key: value for key, value in message.items() if key != "weight"}
    for name in REASONING_NAMES:
        if name in message:
            changed |= dict.fromkeys(REASONING_NAMES, message[name])
    return changed


def of_transformers(
    tokenizer: Any, template: str, messages: Messages, **options: Any
) -> Any:
    """Return what transformers renders of the first form that a template accepts; None if it accepts none."""
    name = template.removesuffix("_training")
    for form in forms_of(name, messages):
        for role in ("developer", "system"):
            given_messages = [
                message | {"role": role} if message["role"] == "developer" else message
                for message in form
            ]
            try:
                return tokenizer.apply_chat_template(
                    given_messages,
                    chat_template=TRL_TEMPLATES[template],
                    **tools_for(messages),
                    **options,
                )
            except Exception:  # noqa: BLE001  a template rejects by any error
                continue
    return None


def marked_by_trl(tokenizer: Any, name: str, messages: Messages) -> Pairs | None:
    """Return the tokens of a conversation as TRL marks them, without the white space at the end."""
    rendered = of_transformers(
        tokenizer,
        f"{name}_training",
        messages,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    if rendered is None:
        return None
    masks = rendered["assistant_masks"]
    pairs = list(zip(rendered["input_ids"], masks, strict=True))
    while pairs and not tokenizer.decode(pairs[-1][0]).strip():
        pairs.pop()
    return pairs


def learned_tokens(tokenizer: Any, example: Example, index: int) -> tuple[Pairs, Pairs]:
    """Return the tokens up to a turn, and the tokens of the turn, from the first that is learned to the last."""
    text = TextExample(example.text, example.loss_spans, has_special_tokens=True)
    [encoded] = Encoder(tokenizer).encode([text])
    document = encoded.document
    encoding = tokenizer(
        example.text, add_special_tokens=False, return_offsets_mapping=True
    )
    assert document.tokens.tolist() == encoding["input_ids"]
    start, end = example.spans[index]
    learned = [
        position
        for position, (token_start, token_end) in enumerate(encoding["offset_mapping"])
        if document.loss_mask[position] and start < token_end and token_start < end
    ]
    first = learned[0]
    behind = learned[-1] + 1
    pairs = list(
        zip(document.tokens.tolist(), document.loss_mask.tolist(), strict=True)
    )
    return pairs[:first], pairs[first:behind]


def tokens_of(pairs: Pairs) -> list[int]:
    return [token for token, _ in pairs]


def marked_turn(
    tokenizer: Any, name: str, messages: Messages, example: Example, index: int
) -> tuple[Pairs, Pairs] | None:
    """Return what the trainer learns of a turn, and the marked tokens of TRL up to its end; None if TRL rejects it."""
    before, learned = learned_tokens(tokenizer, example, index)
    whole = marked_by_trl(tokenizer, name, messages[: example.messages])
    count = len(before) + len(learned)
    if whole and tokens_of(whole[:count]) == tokens_of(before + learned):
        return learned, whole[:count]
    # TRL renders earlier turns otherwise.
    alone = marked_by_trl(tokenizer, name, messages[: index + 1])
    return (learned, alone) if alone else None


def check_equal(tokenizer: Any, prompt: str, learned: Pairs, marked: Pairs) -> None:
    """Check the last turn, which begins behind the prompt of a server: the same tokens are learned."""
    before = marked[: -len(learned)]
    turn = marked[-len(learned) :]
    if before[-1][1]:
        # The marks have begun already: the prompt must end with what they have.
        last_unmarked = max(index for index, (_, mask) in enumerate(before) if not mask)
        in_prompt = tokens_of(before[last_unmarked + 1 :])
        assert prompt.endswith(tokenizer.decode(in_prompt))
    elif not turn[0][1]:
        # The marks begin later than the prompt ends.
        assert tokenizer.decode(tokens_of(before)).endswith(prompt[-20:])
        first_marked = min(index for index, (_, mask) in enumerate(turn) if mask)
        turn = [(token, 1) for token in tokens_of(turn[:first_marked])] + turn[
            first_marked:
        ]
    assert turn == learned


def without_end(tokenizer: Any, pairs: Pairs, ends: tuple[str, ...]) -> Pairs:
    """Return the tokens in front of an end; all of them if they have none of these ends."""
    for end in ends:
        count = len(tokenizer(end, add_special_tokens=False).input_ids)
        if tokenizer.decode(tokens_of(pairs[-count:])) == end:
            return pairs[:-count]
    return pairs


def compare(tokenizer: Any, name: str, template: str, messages: Messages) -> int:
    """Compare the masks of all learned turns of a conversation; return the number of turns that were compared."""
    record = {"messages": messages} | tools_for(messages)
    try:
        rendering = rendering_in(template, record)
    except InvalidRecord:
        return 0
    if rendering.unrendered:
        return 0
    compared = 0
    for example in rendering.examples:
        for index in example.spans:
            turns = marked_turn(tokenizer, name, messages, example, index)
            if turns is None:
                continue
            prompt = of_transformers(
                tokenizer,
                template,
                messages[:index],
                tokenize=False,
                add_generation_prompt=True,
            )
            learned, marked = (
                without_end(tokenizer, pairs, OTHER_ENDS.get(template, ()))
                for pairs in turns
            )
            check_equal(tokenizer, prompt, learned, marked)
            compared += 1
    return compared


@pytest.mark.parametrize("variant", ["", "_training"], ids=["own", "training"])
@pytest.mark.parametrize("name", MARKED)
@settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None)
@given(messages=conversations())
def test_masks_equal_those_of_trl(
    tokenizer: Any, name: str, variant: str, messages: Messages
) -> None:
    compare(tokenizer, name, name + variant, messages)


QUESTION = {"role": "user", "content": "Is it good?"}
PLAIN = [QUESTION, {"role": "assistant", "content": "Yes it is."}]
THINKING = [
    QUESTION,
    {"role": "assistant", "content": "<think>\nIt may be.\n</think>\n\nYes it is."},
]


@pytest.mark.parametrize("variant", ["", "_training"], ids=["own", "training"])
@pytest.mark.parametrize("name", MARKED)
def test_each_training_template_is_compared(
    tokenizer: Any, name: str, variant: str
) -> None:
    """A comparison that every conversation skips would show nothing."""
    turns = [
        compare(tokenizer, name, name + variant, messages)
        for messages in (PLAIN, PLAIN * 2, THINKING)
    ]
    assert (sum(turns) == 0) == (name + variant in REFUSED)
