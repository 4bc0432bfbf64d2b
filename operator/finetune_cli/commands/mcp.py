"""`finetune mcp`: offer the commands to a program that works with a language model."""

import argparse
import importlib
import sys

from finetune_cli.checks.extras import is_installed
from finetune_cli.commands import (
    Commands,
    compare,
    doctor,
    explain,
    get,
    logs,
    plan,
    preview,
    retry,
    schema,
    validate,
    verbs,
)
from finetune_cli.commands import list as list_command
from finetune_cli.commands import run as run_command
from finetune_cli.diagnostics import UsageError
from finetune_cli.mcp.tool import Tool

DESCRIPTION = """\
Serve the commands as tools of the Model Context Protocol (MCP), on standard input and output: a client starts this
command. The tools read. With --allow-writes there are also tools that run, stop and delete pipelines. They can do what
you can do: a manifest that a client runs may name programs of its own.
"""
READING: dict[str, tuple[str, ...]] = {
    "list": ("--json",),
    "get": ("--json",),
    "logs": (),
    "plan": ("--json",),
    "validate": ("--json",),
    "preview": ("--json",),
    "compare": ("--output=json",),
    "explain": (),
    "schema": (),
    "doctor": ("--json",),
}
"""Command -> its options in every call."""
WRITING: dict[str, tuple[str, ...]] = {
    "run": ("--detach",),
    "retry": ("--detach",),
    "stop": (),
    "suspend": (),
    "resume": (),
    "cancel": (),
    "delete": ("--yes",),
}
DESTRUCTIVE = frozenset({"run", "retry", "delete"})
"""A run publishes a model, starts the manifest's programs, and removes results of earlier edits."""
MODULES = (
    list_command, get, logs, plan, validate, preview, compare, explain, schema, doctor,
    run_command, retry, verbs,
)  # fmt: skip


def register(commands: Commands) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser(
        "mcp", help="offer the commands to a language model", description=DESCRIPTION
    )
    parser.add_argument(
        "--allow-writes",
        action="store_true",
        help="also offer run, retry, stop, suspend, resume, cancel and delete",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve until the client leaves; raises UsageError without the SDK."""
    if not is_installed("mcp"):
        raise UsageError(
            "an MCP server needs the package mcp, which is not installed: pip install 'finetune-operator[mcp]'"
        )
    if sys.stdin.isatty():
        print("waiting for an MCP client on stdin; Ctrl-C ends", file=sys.stderr)
    # Imported only here: the SDK is optional.
    server = importlib.import_module("finetune_cli.mcp.server")
    tools = tools_for(allow_writes=arguments.allow_writes)
    refusal = f"there is no such tool; there are {', '.join(tools)}"
    if not arguments.allow_writes:
        refusal += "; tools that write need: finetune mcp --allow-writes"
    server.serve(server.create_server(tools, refusal))
    return 0


def tools_for(*, allow_writes: bool) -> dict[str, Tool]:
    """Return name -> tool, of the commands that only read, or of all."""
    commands = argparse.ArgumentParser(prog="finetune").add_subparsers()
    for module in MODULES:
        module.register(commands)
    chosen = READING | WRITING if allow_writes else READING
    return {
        name: Tool(
            name=name,
            parser=commands.choices[name],
            fixed=fixed,
            is_read_only=name in READING,
            is_destructive=name in DESTRUCTIVE,
        )
        for name, fixed in chosen.items()
    }
