"""Forms of records that are refused, each with its reason and the fix."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.trainer.models import write_jsonl
from support.trainer.prepared import make_tokenizer, prepare_config
from support.trainer.stages import run_to_failure

from finetune_trainer.contract import Environment

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
QUESTION = {"role": "user", "content": "the file?"}
ANSWER = {"role": "assistant", "content": "a socket"}
HUMAN = {"from": "human", "value": "the file?"}
GPT = {"from": "gpt", "value": "a socket"}
OPENAI_PAIR = {
    "input": {"messages": [QUESTION]},
    "preferred_output": [ANSWER],
    "non_preferred_output": [{"role": "assistant", "content": "the other one"}],
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_tokenizer(
        tmp_path_factory.mktemp("model") / "model", chat_template=TEMPLATE
    )


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"messages": [{"role": ["user"], "content": "a"}, ANSWER]},
        "messages[0].role must be a string, it is a list",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": ["text"]}]}, ANSWER]},
        "messages[0].content[0] is a part ",
    ),
    (
        {"conversations": [{"from": "narrator", "value": "a"}, GPT]},
        "conversations[0].from is narrator: write human, gpt, system, function_call or observation",
    ),
    (
        {"conversations": [HUMAN, {"from": "function_call", "value": "add(1)"}]},
        "conversations[1].value is no call in JSON",
    ),
    ({"conversations": [HUMAN, {"from": "gpt"}]}, "conversations[1].value is missing"),
    ({"conversations": "[oops"}, "conversations is not JSON"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, ANSWER]},
        "messages[0].content[0] is a part image_url: only text is trained on",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}, ANSWER]},
        "messages[0].content[0].text must be a string, it is null",
    ),
    (
        {"system": "Be old.", "messages": [{"role": "system", "content": "x"}, ANSWER]},
        "has a column system and also a message of the role system: keep one of them",
    ),
    (
        {"prompt": [QUESTION], "completion": "a socket"},
        'write completion as [{"role": "assistant", "content": …}]',
    ),
    (
        {"prompt": "the file?", "completion": [ANSWER]},
        'write prompt as [{"role": "user", "content": …}]',
    ),
    (
        {"prompt": [QUESTION], "completion": [QUESTION]},
        "no message of completion has the role assistant",
    ),
    (
        {"prompt": "a", "completion": "b", "label": False},
        "label is false, so the answer is to be avoided, and SFT would learn it: remove the record",
    ),
    (
        {"conversations": [HUMAN, GPT], "kto_tag": False},
        "kto_tag is false, so the answer is to be avoided",
    ),
    (
        {"prompt": "a", "completion": "b", "tools": [{"name": "add"}]},
        "tools beside a prompt that is no list of messages: nothing renders them",
    ),
    ({"instruction": "a", "output": " "}, "output is empty: there is nothing to learn"),
    (
        {"instruction": "a", "output": "b", "history": [["a"]]},
        "history[0] must be [question, answer], two texts",
    ),
    (
        {"text": "a", "messages": [QUESTION, ANSWER]},
        "has messages and also text: choose with columns: {messages: messages} or columns: {text: text}",
    ),
    (
        {"instruction": "a", "output": "b", "text": "Below is"},
        "or columns: {instruction: instruction, output: output} in the data set of the manifest",
    ),
    (
        {"question": "a", "answer": "b"},
        "it has answer, question: write columns: {instruction: question, output: answer}",
    ),
    (
        {"input": "a", "output": "b"},
        "it has input, output: write columns: {instruction: input}",
    ),
    (
        {"Prompt": "a", "Completion": "b"},
        "write columns: {prompt: Prompt, completion: Completion}",
    ),
    ({"txt": "a"}, "it has txt: write columns: {text: txt}"),
    (OPENAI_PAIR, "set train.objective to DPO"),
]


@pytest.mark.parametrize(
    ("record", "reason"), REFUSED, ids=[reason[:40] for _, reason in REFUSED]
)
def test_record_of_another_form_is_refused_with_the_fix(
    environment: Environment,
    manifest_dir: Path,
    tokenizer: Any,
    record: dict[str, Any],
    reason: str,
) -> None:
    write_jsonl(manifest_dir / "data.jsonl", [record])
    message, _ = run_to_failure(
        prepare_config(Path(tokenizer.name_or_path)), environment
    )
    [_, line] = message.splitlines()
    assert line.startswith("data.jsonl:1: ")
    assert reason in line


def test_pair_with_more_in_its_input_is_refused(
    environment: Environment, manifest_dir: Path, tokenizer: Any
) -> None:
    record = json.loads(json.dumps(OPENAI_PAIR))
    record["input"]["context"] = "some words"
    write_jsonl(manifest_dir / "data.jsonl", [record])
    message, _ = run_to_failure(
        prepare_config(Path(tokenizer.name_or_path), objective="DPO"), environment
    )
    assert "input has also context, which is not used: remove it" in message
