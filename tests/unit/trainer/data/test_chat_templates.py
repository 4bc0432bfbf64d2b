"""prepare chooses the chat templates of a run once; every later stage reads them from its output."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.trainer.models import write_jsonl
from support.trainer.prepared import (
    IDENTITY,
    make_tokenizer,
    output_folder,
    packed_documents,
    prepare,
    prepare_again,
    prepare_config,
    trained_texts,
)
from support.trainer.stages import run_to_failure

from finetune_trainer.contract import Environment, ExitCode
from finetune_trainer.data import template_trial
from finetune_trainer.data.chat_templates import read_chat_templates, use_chat_templates

BASE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{{ '<assistant>' if add_generation_prompt }}"
)
TOOLS = "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}" + BASE
GIVEN = (
    "{%- macro mark() -%}{{ '' if enable_thinking else '(none)' }}{%- endmacro -%}\n"
    "{% for m in messages %}{{ m.role }}: {{ mark() if m.role == 'assistant' }}{{ m.content }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {{ mark() }}{% endif %}"
)
EXCHANGE = [
    {"role": "user", "content": "open?"},
    {"role": "assistant", "content": "closes"},
]
CALLABLE = [{"type": "function", "function": {"name": "look", "parameters": {}}}]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A model whose tokenizer has a template."""
    make_tokenizer(tmp_path / "base", chat_template=BASE)
    return tmp_path / "base"


@pytest.fixture
def named(tmp_path: Path) -> Path:
    """A model with a template for tools and a template that is asked by its name."""
    tokenizer = make_tokenizer(tmp_path / "named")
    tokenizer.chat_template = {"default": BASE, "tool_use": TOOLS, "rag": "{{ 1 }}"}
    tokenizer.save_pretrained(tmp_path / "named")
    return tmp_path / "named"


@pytest.fixture
def data(manifest_dir: Path) -> Path:
    return write_jsonl(manifest_dir / "data.jsonl", [{"messages": EXCHANGE}])


def text_of(model: Path, environment: Environment) -> str:
    """Return the only row as text."""
    from transformers import AutoTokenizer  # noqa: PLC0415  the import is slow

    [(tokens, _)] = packed_documents(environment)
    return str(AutoTokenizer.from_pretrained(model).decode(tokens))


def tokenizer_of(model: Path, environment: Environment) -> Any:
    """Return the base model's tokenizer with the templates that prepare used."""
    from transformers import AutoTokenizer  # noqa: PLC0415  the import is slow

    tokenizer = AutoTokenizer.from_pretrained(model)
    use_chat_templates(tokenizer, read_chat_templates(environment, IDENTITY))
    return tokenizer


@pytest.mark.usefixtures("data")
@pytest.mark.parametrize("is_file", [True, False])
def test_template_of_the_manifest_is_used_for_the_rows(
    environment: Environment, manifest_dir: Path, base: Path, *, is_file: bool
) -> None:
    (manifest_dir / "given.jinja").write_text(GIVEN)
    template = "given.jinja" if is_file else GIVEN
    arguments = {"enable_thinking": False}
    result = prepare(
        prepare_config(base, chat_template=template, chat_template_arguments=arguments),
        environment,
    )
    assert result.chat_template == "Manifest"
    assert text_of(base, environment) == (
        "user: open?<eos>\nassistant: (none)closes<eos>\n"
    )
    tokenizer = tokenizer_of(base, environment)
    assert trained_texts(environment, tokenizer) == ["closes<eos>"]
    assert tokenizer.apply_chat_template(EXCHANGE, tokenize=False) == text_of(
        base, environment
    )
    prompt = tokenizer.apply_chat_template(
        EXCHANGE[:1], tokenize=False, add_generation_prompt=True, enable_thinking=True
    )
    assert prompt == "user: open?<eos>\nassistant: "


@pytest.mark.usefixtures("data")
@pytest.mark.parametrize("start", ["\n\n ", "  {% if true %}\n", "{{- '' }}\n "])
def test_rows_begin_as_the_text_that_a_server_renders(
    environment: Environment, base: Path, start: str
) -> None:
    template = start + BASE + ("{% endif %}" if "if true" in start else "")
    prepare(prepare_config(base, chat_template=template), environment)
    tokenizer = tokenizer_of(base, environment)
    text = tokenizer.apply_chat_template(EXCHANGE, tokenize=False)
    assert text_of(base, environment) == text


@pytest.mark.usefixtures("data")
def test_arguments_are_defaults_of_the_base_models_template(
    tmp_path: Path, environment: Environment
) -> None:
    model = tmp_path / "thinking"
    make_tokenizer(model, chat_template=GIVEN)
    thinking = prepare_config(model, chat_template_arguments={"enable_thinking": True})
    result = prepare(thinking, environment)
    assert result.chat_template == "BaseModel"
    assert text_of(model, environment) == "user: open?<eos>\nassistant: closes<eos>\n"


def test_all_templates_of_the_base_model_are_kept(
    environment: Environment, manifest_dir: Path, named: Path
) -> None:
    record = {"messages": EXCHANGE, "tools": CALLABLE}
    write_jsonl(manifest_dir / "data.jsonl", [record])
    prepare(prepare_config(named), environment)
    assert text_of(named, environment).startswith("[look]<user>")
    assert read_chat_templates(environment, IDENTITY) == {
        "default": BASE,
        "tool_use": TOOLS,
        "rag": "{{ 1 }}",
    }


def test_template_of_the_manifest_renders_tools_too(
    environment: Environment, manifest_dir: Path, named: Path
) -> None:
    record = {"messages": EXCHANGE, "tools": CALLABLE}
    write_jsonl(manifest_dir / "data.jsonl", [record])
    given = "{{ tools[0].function.name if tools }}!" + BASE
    prepare(prepare_config(named, chat_template=given), environment)
    assert text_of(named, environment).startswith("look!<user>")
    assert read_chat_templates(environment, IDENTITY) == {
        "default": given,
        "tool_use": given,
        "rag": "{{ 1 }}",
    }


@pytest.mark.usefixtures("data")
def test_named_templates_without_a_default_need_one(
    tmp_path: Path, environment: Environment
) -> None:
    tokenizer = make_tokenizer(tmp_path / "rag")
    tokenizer.chat_template = {"rag": BASE, "default": BASE}
    tokenizer.save_pretrained(tmp_path / "rag")
    (tmp_path / "rag/chat_template.jinja").unlink()

    message, code = run_to_failure(prepare_config(tmp_path / "rag"), environment)
    assert code == ExitCode.CONFIG
    assert "has the chat templates rag, and none is called default" in message
    assert "set prepare.chatTemplate" in message
    prepare(prepare_config(tmp_path / "rag", chat_template=BASE), environment)


@pytest.mark.usefixtures("data")
def test_default_template_is_told(
    environment: Environment, tokenizer_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = prepare(prepare_config(tokenizer_folder), environment)
    assert result.chat_template == "Default"
    log = capsys.readouterr().out
    assert "has no chat template: `role: content`" in log
    assert "is used and published; set prepare.chatTemplate for another" in log
    tokenizer = tokenizer_of(tokenizer_folder, environment)
    text = tokenizer.apply_chat_template(EXCHANGE, tokenize=False)
    assert text == "user: open?\n\nassistant: closes<eos>"


def test_plain_text_needs_no_template(
    environment: Environment,
    manifest_dir: Path,
    tokenizer_folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_jsonl(manifest_dir / "data.jsonl", [{"text": "The parser opens a socket"}])
    result = prepare(prepare_config(tokenizer_folder), environment)
    assert result.chat_template is None
    assert read_chat_templates(environment, IDENTITY) == {}
    assert "chat template" not in capsys.readouterr().out


@pytest.mark.usefixtures("data")
def test_rows_of_another_template_are_not_continued(
    environment: Environment, manifest_dir: Path, base: Path
) -> None:
    """On a cluster the identity names the file and not its content."""
    file = manifest_dir / "given.jinja"
    config = prepare_config(base, chat_template="given.jinja")
    for name in ("first", "second"):
        file.write_text(f"{name}{BASE}")
        prepare_again(config, environment)
        assert text_of(base, environment).startswith(f"{name}<user>")


@pytest.mark.usefixtures("data")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"chat_template": "\n{% for m in messages %}"},
            "prepare.chatTemplate: line 2: Unexpected end of template",
        ),
        (
            {"chat_template": "{{ ''['__class__'].mro() }}"},
            "prepare.chatTemplate: its sandbox refuses it: access to attribute",
        ),
        (
            {"chat_template": "{% for i in range(10 ** 9) %}{% endfor %}"},
            "prepare.chatTemplate: a number in it is too large: Range too big",
        ),
        (
            {"chat_template": "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}"},
            "prepare.chatTemplate: a macro calls itself without end",
        ),
        (
            {
                "chat_template": BASE,
                "chat_template_arguments": {"enable_thinkin": False},
            },
            "prepare.chatTemplateArguments.enable_thinkin: the chat template does not read it",
        ),
        (
            {"chat_template": "{{ ['Well, ', ''] | random }}" + BASE},
            "prepare.chatTemplate: line 1: the filter random writes another text each",
        ),
        (
            {"chat_template": "{{ messages[0].items }}" + BASE},
            "which differs each time: call the method with ()",
        ),
        ({"chat_template": "data.jsonl"}, "data.jsonl has neither {{ nor {%"),
    ],
)
def test_unusable_template_is_a_config_error(
    environment: Environment, base: Path, changes: dict[str, Any], message: str
) -> None:
    failure, code = run_to_failure(prepare_config(base, **changes), environment)
    assert code == ExitCode.CONFIG
    assert message in failure


@pytest.mark.usefixtures("data")
def test_random_template_of_a_base_model_is_refused(
    tmp_path: Path, environment: Environment
) -> None:
    base = tmp_path / "random"
    make_tokenizer(base, chat_template="\n{{ ['Hm: ', ''] | random }}" + BASE)
    failure, code = run_to_failure(prepare_config(base), environment)
    assert code == ExitCode.CONFIG
    assert "so set prepare.chatTemplate: line 2: the filter random" in failure


@pytest.mark.usefixtures("data")
def test_template_that_never_ends_is_a_config_error(
    environment: Environment, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_trial, "MAX_SECONDS", 1.0)
    endless = (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    )
    failure, code = run_to_failure(
        prepare_config(base, chat_template=endless), environment
    )
    assert code == ExitCode.CONFIG
    assert "takes more than 1 s: it may loop" in failure


@pytest.mark.usefixtures("data")
def test_broken_template_of_the_base_model_is_a_config_error(
    tmp_path: Path, environment: Environment
) -> None:
    make_tokenizer(tmp_path / "broken", chat_template="a\n{{ b")
    failure, code = run_to_failure(prepare_config(tmp_path / "broken"), environment)
    assert code == ExitCode.CONFIG
    assert (
        "broken: its chat template cannot be used, so set prepare.chatTemplate: line 2: unexpected"
        in failure
    )


@pytest.mark.usefixtures("data")
def test_missing_template_file_is_named(environment: Environment, base: Path) -> None:
    failure, code = run_to_failure(
        prepare_config(base, chat_template="none.jinja"), environment
    )
    assert code == ExitCode.NOT_FOUND
    assert "none.jinja" in failure


@pytest.mark.usefixtures("data")
def test_damaged_templates_are_told_to_later_stages(
    environment: Environment, base: Path
) -> None:
    from finetune_trainer.runtime.errors import DataInvalid  # noqa: PLC0415

    prepare(prepare_config(base), environment)
    file = output_folder(environment) / "chat_templates.json"
    assert json.loads(file.read_text()) == {"default": BASE}
    file.write_text("{")
    with pytest.raises(DataInvalid, match="is damaged"):
        read_chat_templates(environment, IDENTITY)
