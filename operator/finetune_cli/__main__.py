"""`finetune COMMAND …`: a command is a module in `commands/` and a line in COMMANDS."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from finetune_cli.diagnostics import InvalidManifest, UsageError
from finetune_cli.exit_codes import FAILED, INTERRUPTED, INVALID, PIPE_CLOSED
from finetune_operator.errors import ClusterError

COMMANDS = {
    **{name: name for name in ("init", "validate", "plan", "run", "get", "logs", "retry")},
    **dict.fromkeys(("cancel", "suspend", "resume"), "verbs"),
    "wait": "wait",
}
"""Command -> its module in `commands/`, in the order of the help."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and give its exit code; 2 for anything wrong with what the user wrote."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        code = _run(arguments)
        if sys.stdout is not None:  # closed by whoever started us
            sys.stdout.flush()
    except InvalidManifest as invalid:
        print(invalid, file=sys.stderr)
        code = INVALID
    except UsageError as refused:
        print(f"finetune: {refused}", file=sys.stderr)
        code = INVALID
    except BrokenPipeError:
        code = _exit_on_closed_pipe()
    except (ClusterError, OSError) as error:
        print(f"finetune: {error}", file=sys.stderr)
        code = FAILED
    except KeyboardInterrupt:
        code = INTERRUPTED
    except SystemExit as leaving:
        if not isinstance(leaving.__context__, BrokenPipeError):  # rich's way to say it
            raise
        code = _exit_on_closed_pipe()
    return code


def _exit_on_closed_pipe() -> int:
    """Go quietly: whoever read our output has gone, and Python would complain once more on its way out."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return PIPE_CLOSED


def _run(arguments: Sequence[str]) -> int:
    parser = _parser(arguments)
    chosen = parser.parse_args(arguments)
    if chosen.version:
        print(f"finetune {version('finetune-operator')}")
        return 0
    if chosen.command is None:
        parser.print_usage(sys.stderr)
        return INVALID
    code: int = chosen.run(chosen)
    return code


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="finetune", description="Fine-tune a model from one manifest.")
    parser.add_argument("--version", action="store_true", help="print the version and stop")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    # Only the command that was named is imported, so that none waits for another's libraries.
    named = [module for name, module in COMMANDS.items() if name in arguments[:1]]
    for module in named or dict.fromkeys(COMMANDS.values()):
        importlib.import_module(f"finetune_cli.commands.{module}").register(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
