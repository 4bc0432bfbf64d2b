"""The chat template of a base model is the template that servers read, whatever file it is in."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.trainer.models import write_jsonl
from support.trainer.prepared import (
    IDENTITY,
    make_tokenizer,
    prepare,
    prepare_config,
)
from support.trainer.stages import run_to_failure

from finetune_trainer.contract import Environment, ExitCode
from finetune_trainer.contract.preview import PreviewRequest
from finetune_trainer.data.chat_templates import read_chat_templates
from finetune_trainer.preview.preview import preview

OWN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
OF_PROCESSOR = f"processor:{OWN}"
PROMPT = "{{ '<assistant>' if add_generation_prompt }}"
EXCHANGE = [
    {"role": "user", "content": "open?"},
    {"role": "assistant", "content": "closes"},
]


@pytest.fixture(autouse=True)
def data(manifest_dir: Path) -> Path:
    return write_jsonl(manifest_dir / "data.jsonl", [{"messages": EXCHANGE}] * 20)


def make_base(folder: Path, own: str | None, files: dict[str, Any]) -> Path:
    """Write a model whose tokenizer has a template or none, and further files."""
    make_tokenizer(folder, chat_template=own)
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


OLD_FORM = {"chat_template.json": {"chat_template": OF_PROCESSOR + PROMPT}}
NEW_FORM = {"processor_config.json": {"chat_template": OF_PROCESSOR + PROMPT}}
PROCESSOR = {"preprocessor_config.json": {"image_processor_type": "X"}}


@pytest.mark.parametrize(
    ("own", "files", "is_read"),
    [
        (None, OLD_FORM, True),
        (None, NEW_FORM, True),
        (None, {"chat_template.jinja": OF_PROCESSOR + PROMPT}, True),
        (OWN + PROMPT, OLD_FORM | PROCESSOR, True),
        (OWN + PROMPT, NEW_FORM, True),
        # No server reads this file for a model without a processor.
        (OWN + PROMPT, OLD_FORM, False),
        (OWN + PROMPT, PROCESSOR, False),
    ],
)
def test_template_of_the_processor_is_read_as_by_servers(
    environment: Environment,
    tmp_path: Path,
    own: str | None,
    files: dict[str, Any],
    *,
    is_read: bool,
) -> None:
    base = make_base(tmp_path / "base", own, files)
    result = prepare(prepare_config(base), environment)
    expected = (OF_PROCESSOR if is_read else OWN) + PROMPT
    assert result.chat_template == "BaseModel"
    assert read_chat_templates(environment, IDENTITY) == {"default": expected}


def test_template_other_than_the_tokenizers_is_named(
    environment: Environment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = make_base(tmp_path / "base", OWN + PROMPT, OLD_FORM | PROCESSOR)
    prepare(prepare_config(base), environment)
    log = capsys.readouterr().out
    assert (
        "chat_template.json has another chat template than the tokenizer: servers read it, "
        "so it is used, and published for both"
    ) in log


def test_damaged_template_of_a_processor_is_a_config_error(
    environment: Environment, tmp_path: Path
) -> None:
    base = make_base(tmp_path / "base", None, {"chat_template.json": '{"chat_te'})
    message, code = run_to_failure(prepare_config(base), environment)
    assert code == ExitCode.CONFIG
    assert "chat_template.json is not JSON" in message
    (base / "chat_template.json").write_text('{"chat_template": 3}')
    message, _ = run_to_failure(prepare_config(base), environment)
    assert "chat_template.json: chat_template is no text" in message


UNREAD = "chat_templates/default.jinja"


def test_template_that_no_server_reads_is_refused_by_name(
    environment: Environment, tmp_path: Path
) -> None:
    base = make_base(tmp_path / "base", None, {UNREAD: OWN})
    config = prepare_config(base)
    message, code = run_to_failure(config, environment)
    assert code == ExitCode.CONFIG
    assert f"has no chat template that servers read, but the file {UNREAD}" in message
    assert "set prepare.chatTemplate to a copy of this file" in message
    report = preview(PreviewRequest(config=config), environment)
    [problem] = report.problems
    assert problem.field == "model.uri"
    assert UNREAD in problem.message


def test_fix_of_an_unread_template_is_accepted(
    environment: Environment, tmp_path: Path
) -> None:
    base = make_base(tmp_path / "base", None, {UNREAD: OWN})
    config = prepare_config(base, chat_template=OWN + PROMPT)
    assert prepare(config, environment).chat_template == "Manifest"


def test_plain_text_beside_an_unread_template_is_used(
    environment: Environment, manifest_dir: Path, tmp_path: Path
) -> None:
    write_jsonl(manifest_dir / "data.jsonl", [{"text": "The parser opens a socket"}])
    base = make_base(tmp_path / "base", None, {UNREAD: OWN})
    assert prepare(prepare_config(base), environment).chat_template is None
