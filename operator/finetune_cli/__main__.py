"""Entry point of `finetune COMMAND`. A command is a module in `commands/` and an entry in COMMANDS."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from finetune_cli.diagnostics import InvalidManifest, UsageError
from finetune_cli.exit_codes import FAILED, INTERRUPTED, INVALID, PIPE_CLOSED
from finetune_cli.output.encoding import replace_unencodable
from finetune_operator.errors import ClusterError

COMMANDS = {
    **{
        name: name
        for name in (
            "init",
            "validate",
            "preview",
            "plan",
            "run",
            "list",
            "workspaces",
            "get",
            "logs",
            "retry",
        )
    },
    **dict.fromkeys(("cancel", "suspend", "stop", "resume", "delete"), "verbs"),
    "wait": "wait",
    "drill": "drill",
    "completion": "completion",
}
"""Command -> its module in `commands/`, in the order of `finetune --help`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code, which is INVALID for wrong arguments and invalid manifests."""
    if arguments is None:
        arguments = sys.argv[1:]
    replace_unencodable()
    try:
        code = _run(arguments)
        # stdout is None if the parent process closed it.
        if sys.stdout is not None:
            # Flush here: a closed pipe is then handled below and not at interpreter exit.
            sys.stdout.flush()
    except InvalidManifest as invalid:
        print(invalid, file=sys.stderr)
        code = INVALID
    except UsageError as error:
        print(f"finetune: {error}", file=sys.stderr)
        code = INVALID
    except BrokenPipeError:
        # Before OSError, of which it is a subclass.
        code = _exit_on_closed_pipe()
    except (ClusterError, OSError) as error:
        print(f"finetune: {error}", file=sys.stderr)
        code = FAILED
    except KeyboardInterrupt:
        code = INTERRUPTED
    except SystemExit as system_exit:
        # rich turns a BrokenPipeError into SystemExit.
        if not isinstance(system_exit.__context__, BrokenPipeError):
            raise
        code = _exit_on_closed_pipe()
    return code


def _exit_on_closed_pipe() -> int:
    """Redirect stdout to /dev/null and return PIPE_CLOSED.

    Without the redirection, Python's flush at exit would print the error a second time.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return PIPE_CLOSED


def _run(arguments: Sequence[str]) -> int:
    parser = _parser(arguments)
    parsed = parser.parse_args(arguments)
    if parsed.version:
        print(f"finetune {version('finetune-operator')}")
        return 0
    if parsed.command is None:
        parser.print_usage(sys.stderr)
        return INVALID
    code: int = parsed.run(parsed)
    return code


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="finetune", description="Fine-tune a model from one manifest."
    )
    parser.add_argument(
        "--version", action="store_true", help="print the version and exit"
    )
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", title="commands"
    )
    # Import only the command's own module, so that no command waits for the libraries of another.
    named = [module for name, module in COMMANDS.items() if name in arguments[:1]]
    for module in named or dict.fromkeys(COMMANDS.values()):
        importlib.import_module(f"finetune_cli.commands.{module}").register(commands)
    return parser


def arguments_of(command: str) -> list[argparse.Action]:
    """Return the arguments of a command, empty for an unknown command."""
    if command not in COMMANDS:
        return []
    # argparse has no public list of a parser's arguments.
    for action in _parser([command])._actions:  # noqa: SLF001
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            parser: argparse.ArgumentParser = action.choices[command]
            return parser._actions  # noqa: SLF001
    return []


if __name__ == "__main__":
    sys.exit(main())
