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
# Files are completed behind the command only: the first word is a command, and a word with - an option.
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
TAKES_RUN = frozenset(
    {
        "plan",
        "run",
        "workspaces",
        "get",
        "logs",
        "retry",
        "cancel",
        "suspend",
        "stop",
        "resume",
        "delete",
        "wait",
        "drill",
    }
)
"""Commands whose NAME may be a run on this machine."""


def register(commands: Commands) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser(
        "completion",
        help="print a completion script for a shell",
        description=DESCRIPTION,
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
    """Return the words that may stand in place of the last word, given the words between `finetune` and it."""
    *before, last = words or [""]
    return sorted({word for word in _candidates(before, last) if word.startswith(last)})


def _candidates(before: list[str], last: str) -> Iterator[str]:
    # Here and not above: it imports this module.
    main = importlib.import_module("finetune_cli.__main__")
    if not before:
        yield from (*main.COMMANDS, "--version", "--help")
        return
    command = before[0]
    actions = main.arguments_of(command)
    option = _option_of(actions, before[-1])
    if option is not None:
        yield from option.choices or ()
        return
    if last.startswith("-"):
        for action in actions:
            yield from action.option_strings
        return
    for action in actions:
        is_positional = not action.option_strings
        if is_positional and action.choices:
            yield from (str(choice) for choice in action.choices)
    if command in TAKES_RUN:
        yield from (run.name for run in find_runs())


def _option_of(actions: list[argparse.Action], word: str) -> argparse.Action | None:
    """Return the option that expects a value after this word, or None."""
    for action in actions:
        # nargs is 0 for a flag, which takes no value.
        if word in action.option_strings and action.nargs != 0:
            return action
    return None
