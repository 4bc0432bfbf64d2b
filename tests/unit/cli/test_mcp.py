"""`finetune mcp`, by the SDK's own client: in memory, and once on stdin and stdout."""

import argparse
import asyncio
import itertools
import json
import os
import sys

import pytest
from mcp import Client, StdioServerParameters
from support.cli.recorded_runs import write_run
from support.operator.scenario import Scenario, scores

from finetune_cli.__main__ import main
from finetune_cli.commands import mcp
from finetune_cli.commands.mcp import READING, tools_for
from finetune_cli.mcp.server import LONGEST, create_server
from finetune_operator.local.runner import LOG

NO_TOOL = "no such tool"
COMMANDS = tools_for(allow_writes=True)
HOSTILE = ("--yes", "--x=y", "-o", "$(id)", "a b\n", "../../etc", "=x")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder, without runs elsewhere and without a kubeconfig."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


async def _offered(server):
    async with Client(server) as client:
        return (await client.list_tools()).tools


def offered(*, allow_writes):
    server = create_server(tools_for(allow_writes=allow_writes), NO_TOOL)
    return asyncio.run(_offered(server))


async def _call(server, name, arguments):
    async with Client(server) as client:
        result = await client.call_tool(name, arguments)
        texts = [block.text for block in result.content if block.type == "text"]
        return result.is_error, "\n".join(texts)


def call(name, /, **arguments):
    """Return whether the call is an error, and its text."""
    server = create_server(tools_for(allow_writes=False), NO_TOOL)
    return asyncio.run(_call(server, name, arguments))


@pytest.fixture(scope="module")
def parser():
    """The parser of all commands that are tools."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    commands = parser.add_subparsers()
    for module in mcp.MODULES:
        module.register(commands)
    return parser


def test_tools_only_read_without_a_flag():
    tools = offered(allow_writes=False)
    assert {tool.name for tool in tools} == {*READING}
    assert all(tool.annotations.read_only_hint for tool in tools)


def test_tools_that_write_say_so():
    tools = {tool.name: tool.annotations for tool in offered(allow_writes=True)}
    reading = {name for name, hints in tools.items() if hints.read_only_hint}
    destructive = {name for name, hints in tools.items() if hints.destructive_hint}
    assert reading == {*READING}
    assert destructive == {"run", "retry", "delete"}
    assert {*tools} - reading - destructive == {"stop", "suspend", "resume", "cancel"}


def test_schema_of_a_tool_follows_from_its_options():
    schema = COMMANDS["logs"].input_schema()
    kinds = {name: value["type"] for name, value in schema["properties"].items()}
    assert kinds == {
        "name": "string", "workdir": "string", "context": "string", "namespace": "string",
        "stage": "string", "attempt": "integer", "metrics": "boolean", "samples": "boolean",
    }  # fmt: skip
    assert "train" in schema["properties"]["stage"]["enum"]
    validate = COMMANDS["validate"].input_schema()
    assert validate["required"] == ["files"]
    assert validate["properties"]["set"]["type"] == "array"


@pytest.mark.parametrize("name", COMMANDS)
def test_hostile_value_stays_the_value_of_its_argument(parser, name):
    tool = COMMANDS[name]
    fields = tool.input_schema()["properties"]
    required = dict.fromkeys(tool.input_schema()["required"], "x")
    before = vars(parser.parse_args(tool.command_line(required)))
    texts = [
        field
        for field, schema in fields.items()
        if schema["type"] in {"string", "array"} and "enum" not in schema
    ]
    for field, value in itertools.product(texts, HOSTILE):
        is_list = fields[field]["type"] == "array"
        words = tool.command_line(required | {field: [value] if is_list else value})
        after = vars(parser.parse_args(words))
        assert {key for key in after if after[key] != before[key]} == {field}
        shown = after[field][0] if is_list else after[field]
        assert str(shown) == value


def test_answer_is_the_json_of_the_command(here):
    write_run("demo", Scenario().finish(evaluate=scores(0.7, 0.02)).status)
    is_error, text = call("get", name="demo")
    assert not is_error
    assert json.loads(text)["status"]["phase"] == "Succeeded"


def test_errors_of_a_manifest_are_an_answer(here):
    (here / "p.yaml").write_text("kind: FineTunePipeline\n")
    is_error, text = call("validate", files=["p.yaml"])
    assert not is_error
    assert json.loads(text)["files"][0]["valid"] is False


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("compare", {"names": ["a"]}, "finetune compare a@1 a"),
        ("get", {"name": "x\0y"}, "null byte"),
        ("get", {"name": "a" * 300_000}, "too long"),
        ("get", {"nmae": "x"}, "'nmae' was unexpected"),
        ("validate", {"files": "p.yaml"}, "$.files: 'p.yaml' is not of type 'array'"),
        ("logs", {"stage": "trian"}, "$.stage: 'trian' is not one of"),
        ("delete", {"name": "demo"}, NO_TOOL),
    ],
)
def test_error_of_a_call_is_a_tool_error(here, name, arguments, message):
    is_error, text = call(name, **arguments)
    assert is_error
    assert message in text


def test_log_is_text_without_controls_and_cut_to_its_end(here):
    folder = write_run("demo", Scenario().finish().status)
    status = json.loads((folder / "pipeline.json").read_text())["status"]
    [train] = [stage for stage in status["stages"] if stage["name"] == "train"]
    log = folder / "jobs" / train["attempts"][-1]["job"] / LOG
    log.parent.mkdir(parents=True)
    hostile = "\x1b]0;owned\x07\x9b2J\rnaïve 日本\n"
    log.write_text(hostile + "x" * LONGEST + "\nend\n")
    is_error, text = call("logs", name="demo", stage="train")
    assert not is_error
    assert text.startswith("(the first ")
    assert "x\nend\n" in text
    log.write_text(hostile)
    _, text = call("logs", name="demo", stage="train")
    assert text.startswith("�]0;owned��2J\nnaïve 日本\n")


def test_server_on_stdin_and_stdout_answers(here):
    (here / "json.py").write_text("raise SystemExit('a file of the folder was run')")
    command = ["-P", "-m", "finetune_cli", "mcp"]
    parameters = StdioServerParameters(
        command=sys.executable, args=command, env={**os.environ}
    )
    is_error, text = asyncio.run(_call(parameters, "list", {}))
    assert not is_error, text
    assert json.loads(text)["items"] == []


def test_missing_sdk_is_an_error_with_the_fix(monkeypatch, capsys):
    monkeypatch.setattr(mcp, "is_installed", lambda _: False)
    assert main(["mcp"]) == 2
    assert "pip install 'finetune-operator[mcp]'" in capsys.readouterr().err
