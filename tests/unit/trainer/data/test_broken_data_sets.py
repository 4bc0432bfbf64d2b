"""The mistakes that new users make with their data: each has a reason with its place and a fix."""

import re
from pathlib import Path

import pytest
from support.trainer.broken_data import MISTAKES, Mistake, lines
from support.trainer.prepared import prepare_config
from support.trainer.stages import run_to_failure

from finetune_trainer.contract import Environment


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_mistake_has_a_place_and_a_fix(
    environment: Environment,
    manifest_dir: Path,
    tokenizer_folder: Path,
    mistake: Mistake,
) -> None:
    path = manifest_dir / mistake.name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(mistake.content)
    uri = mistake.name.partition("/")[0]
    message, _ = run_to_failure(
        prepare_config(tokenizer_folder, uri, **mistake.changes), environment
    )
    assert mistake.message in message
    assert re.search("Error|Traceback|Exception", message) is None


def test_equal_mistakes_are_one_line_with_their_number(
    environment: Environment, manifest_dir: Path, tokenizer_folder: Path
) -> None:
    (manifest_dir / "data.jsonl").write_bytes(lines(*[{"question": "a"}] * 200))
    message, _ = run_to_failure(prepare_config(tokenizer_folder), environment)
    [_, line] = message.splitlines()
    assert line == (
        "200 \N{MULTIPLICATION SIGN}: needs messages, prompt and completion, or text; it has question; "
        "first data.jsonl:1, data.jsonl:2, data.jsonl:3"
    )
