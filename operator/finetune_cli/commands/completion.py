"""`finetune completion`: print the script with which a shell completes commands, options and names of runs."""

import argparse
import importlib
import sys
from collections.abc import Iterator

from finetune_cli.commands import Commands
from finetune_cli.runs import find_runs

DESCRIPTION = """\
Print the script that completes commands, options, stages and the names of runs on this machine. For bash, add to
~/.bashrc: eval "$(finetune completion bash)". For zsh, add to ~/.zshrc after compinit: eval "$(finetune completion
zsh)".
"""
BASH = """\
_finetune() {
    local word="${COMP_WORDS[COMP_CWORD]}" line
    COMPREPLY=()
    while IFS= read -r line; do
        COMPREPLY+=("$line")
    done < <(
        "${COMP_WORDS[0]}" completion bash --words "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null
        [[ $word == -* || $COMP_CWORD -lt 2 ]] || compgen -f -- "$word"
    )
}
complete -o filenames -F _finetune finetune kubectl-finetune
"""
ZSH = """\
_finetune() {
    local -a found
    found=("${(@f)$("${words[1]}" completion zsh --words "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    compadd -- ${found:#}
    [[ ${words[CURRENT]} == -* || $CURRENT -lt 3 ]] || _files
}
compdef _finetune finetune kubectl-finetune
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH}
TAKES_RUN = frozenset({"plan", "run", "get", "logs", "retry", "drill"})
"""Commands whose NAME may be that of a run on this machine."""


def register(commands: Commands) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser(
        "completion", help="print a completion script for a shell", description=DESCRIPTION
    )
    parser.add_argument("shell", choices=[*SCRIPTS], help="shell that reads the script")
    parser.add_argument("--words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the script, or for the script the words that may stand last in a command line."""
    if arguments.words is None:
        sys.stdout.write(SCRIPTS[arguments.shell])
    else:
        sys.stdout.writelines(f"{word}\n" for word in completions(arguments.words))
    return 0


def completions(words: list[str]) -> list[str]:
    """Return the words that may stand in place of the last one, given those between `finetune` and it."""
    *before, last = words or [""]
    return sorted({word for word in _candidates(before, last) if word.startswith(last)})


def _candidates(before: list[str], last: str) -> Iterator[str]:
    main = importlib.import_module("finetune_cli.__main__")  # it imports this module
    if not before:
        yield from (*main.COMMANDS, "--version", "--help")
        return
    actions = main.arguments_of(before[0])
    expected = _option_of(actions, before[-1])
    if expected is not None:
        yield from expected.choices or ()
    elif last.startswith("-"):
        yield from (option for action in actions for option in action.option_strings)
    else:
        positional = (action for action in actions if not action.option_strings)
        yield from (str(choice) for action in positional for choice in action.choices or ())
        yield from (run.name for run in find_runs() if before[0] in TAKES_RUN)


def _option_of(actions: list[argparse.Action], word: str) -> argparse.Action | None:
    """Return the option that expects a value after this word, or None."""
    return next((one for one in actions if word in one.option_strings and one.nargs != 0), None)
