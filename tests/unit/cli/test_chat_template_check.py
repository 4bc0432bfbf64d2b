"""prepare.chatTemplate and its arguments: refused with the line by validate, or by validate --check."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune_cli.__main__ import main

pytestmark = pytest.mark.usefixtures("unread_data")

Check = Callable[..., tuple[int, str]]
THINKING = "{{ messages[0].content }}{{ enable_thinking }}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a model, records and a template."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    (tmp_path / "base/config.json").write_text("{}")
    (tmp_path / "data.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "chat.jinja").write_text(THINKING)
    return tmp_path


@pytest.fixture
def check(folder: Path, capsys: pytest.CaptureFixture[str]) -> Check:
    """Return a function that validates a manifest with these settings of prepare."""

    def check(*options: str, **prepare: Any) -> tuple[int, str]:
        manifest = {
            "apiVersion": "finetune.dev/v1alpha1",
            "kind": "FineTunePipeline",
            "metadata": {"name": "demo"},
            "spec": {
                "model": {"uri": "base"},
                "datasets": [{"uri": "data.jsonl"}],
                "prepare": prepare,
            },
        }
        (folder / "p.yaml").write_text(yaml.safe_dump(manifest))
        code = main(["validate", *options, "p.yaml"])
        return code, capsys.readouterr().out

    return check


@pytest.mark.parametrize(
    "prepare",
    [
        {"chatTemplate": "chat.jinja"},
        {"chatTemplate": THINKING},
        {
            "chatTemplate": "chat.jinja",
            "chatTemplateArguments": {"enable_thinking": False},
        },
        {"chatTemplateArguments": {"effort": "low", "budget": 3, "share": 0.5}},
    ],
)
def test_template_and_arguments_are_valid(
    check: Check, prepare: dict[str, Any]
) -> None:
    assert check("--check", **prepare) == (0, "p.yaml: valid\n")


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (
            {"chatTemplate": "chat.jinga"},
            "chat.jinga does not exist; did you mean ",
        ),
        ({"chatTemplate": "base"}, "spec.prepare.chatTemplate: base: is not a file"),
        ({"chatTemplate": "data.jsonl"}, "data.jsonl: has neither {{ nor {%"),
        (
            {"chatTemplate": "a\n{% for m in messages %}"},
            "spec.prepare.chatTemplate: the template: line 2: Unexpected end of template",
        ),
        (
            {"chatTemplate": "{{ messages.__class__ }}"},
            "line 1: reads __class__: attributes that begin with _ are refused",
        ),
        (
            {
                "chatTemplate": "chat.jinja",
                "chatTemplateArguments": {"enable_thinkin": False},
            },
            "Arguments.enable_thinkin: the chat template does not read it; it reads enable_thinking",
        ),
    ],
)
def test_unusable_template_is_refused_by_the_check(
    check: Check, prepare: dict[str, Any], message: str
) -> None:
    code, output = check("--check", **prepare)
    assert code == 2
    assert message in output
    assert output.count("\n") == 1


def test_line_of_a_file_is_named_with_it(check: Check, folder: Path) -> None:
    (folder / "chat.jinja").write_text("a\n{{ x")
    _, output = check("--check", chatTemplate="chat.jinja")
    assert "chatTemplate: chat.jinja: line 2: unexpected end of template" in output


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (
            {"chatTemplate": "s3://bucket/chat.jinja"},
            "must be Jinja text, which has {{ or {%, or a file: pvc://CLAIM/PATH, file:///PATH or",
        ),
        ({"chatTemplate": "pvc://claim/../chat.jinja"}, "leaves the claim"),
        (
            {"chatTemplateArguments": {"messages": "x"}},
            "chatTemplateArguments.messages: is set by each conversation: remove it",
        ),
        ({"chatTemplateArguments": {"if": 1}}, "must be the name of a variable"),
        ({"chatTemplateArguments": {"a-b": 1}}, "must be the name of a variable"),
        (
            {"chatTemplateArguments": {"effort": ["low"]}},
            "must be true, false, a number or a text (got a list)",
        ),
        (
            {"chatTemplateArguments": {"effort": "x" * 1025}},
            "must have at most 1,024 characters",
        ),
        (
            {"chatTemplateArguments": {f"a{i}": 1 for i in range(17)}},
            "must have at most 16 entries",
        ),
        ({"chatTemplateArguments": {"effort": None}}, "is empty; set a value"),
    ],
)
def test_wrong_value_is_refused_without_reading_a_file(
    check: Check, prepare: dict[str, Any], message: str
) -> None:
    code, output = check(**prepare)
    assert code == 2
    assert message in output
    assert output.count("\n") == 1
