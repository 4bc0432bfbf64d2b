"""Entry point of `finetune COMMAND`. A command is a module in `commands/` and an entry in COMMANDS."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from finetune_cli.diagnostics import InvalidManifest, UsageError, closest_match, quoted
from finetune_cli.exit_codes import FAILED, INTERRUPTED, INVALID, PIPE_CLOSED
from finetune_cli.output.encoding import replace_unencodable
from finetune_operator.errors import ClusterError

COMMANDS = {
    **{
        name: name
        for name in (
            "init",
            "convert",
            "validate",
            "preview",
            "plan",
            "run",
            "list",
            "workspaces",
            "get",
            "compare",
            "logs",
            "card",
            "ask",
            "chat",
            "retry",
            "explain",
            "schema",
            "doctor",
        )
    },
    **dict.fromkeys(("cancel", "suspend", "stop", "resume", "delete"), "verbs"),
    "wait": "wait",
    "drill": "drill",
    "completion": "completion",
}
"""Command -> its module in `commands/`, in the order of `finetune --help`."""
AS_OPTIONS = {"help": "--help", "version": "--version"}
"""Words that other programs have as commands -> the option that they mean here."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code, which is INVALID for wrong arguments and invalid manifests."""
    if arguments is None:
        arguments = sys.argv[1:]
    replace_unencodable()
    _provide_home()
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


def _provide_home() -> None:
    """Set HOME to / for a user without a home, as container runtimes do.

    Libraries ask for it when they are imported: the client of Kubernetes raises an error if there is none.
    """
    if os.path.expanduser("~") == "~":  # noqa: PTH111  Path.home() raises an error
        os.environ["HOME"] = "/"


def _exit_on_closed_pipe() -> int:
    """Redirect stdout to /dev/null and return PIPE_CLOSED.

    Without the redirection, Python's flush at exit would print the error a second time.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return PIPE_CLOSED


def _run(arguments: Sequence[str]) -> int:
    arguments = _with_options(arguments)
    _check_command(arguments)
    parser = _parser(arguments)
    parsed, unknown = parser.parse_known_args(arguments)
    if parsed.version:
        print(f"finetune {version('finetune-operator')}")
        return 0
    if parsed.command is None:
        parser.print_help()
        return 0
    if unknown:
        raise UsageError(_unknown_argument(parsed.command, unknown[0]))
    code: int = parsed.run(parsed)
    return code


def _with_options(arguments: Sequence[str]) -> Sequence[str]:
    """Return the arguments with `finetune --help` for `finetune help`, and `run --help` for `help run`."""
    if not arguments or arguments[0] not in AS_OPTIONS:
        return arguments
    return [*arguments[1:2], AS_OPTIONS[arguments[0]]]


def _check_command(arguments: Sequence[str]) -> None:
    """Raise UsageError for a command that does not exist."""
    if not arguments or arguments[0].startswith("-") or arguments[0] in COMMANDS:
        return
    match = closest_match(arguments[0], COMMANDS)
    hint = f"did you mean {match}?" if match else "`finetune --help` lists all"
    raise UsageError(f"there is no command {quoted(arguments[0])}; {hint}")


def _unknown_argument(command: str, word: str) -> str:
    """Return the error about an argument that a command does not take."""
    option = word.partition("=")[0]
    if not option.startswith("-"):
        return f"{command} takes no further argument {quoted(word)}; see `finetune {command} --help`"
    known = [text for action in arguments_of(command) for text in action.option_strings]
    match = closest_match(option, known)
    hint = f"did you mean {match}?" if match else f"see `finetune {command} --help`"
    return f"{command} has no option {option}; {hint}"


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
