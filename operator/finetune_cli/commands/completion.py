"""`finetune completion`: print the script with which a shell completes commands, options and names of runs.

A shell waits for each completion, so nothing of the commands is imported: a table that is generated from their parsers
has the words.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from finetune_cli.commands import Commands
from finetune_cli.runs import find_runs

DESCRIPTION = """\
Print the script that completes commands, options, stages and the names of runs on this machine. For bash, add to
~/.bashrc: eval "$(finetune completion bash)". For zsh, add to ~/.zshrc after compinit: eval "$(finetune completion
zsh)". For fish: finetune completion fish > ~/.config/fish/completions/finetune.fish
"""
TABLE = Path(__file__).with_name("completions.json")
Table = dict[str, dict[str, Any]]
"""Command -> its options with their values, the words of its arguments, and whether it takes a run."""
FILES = ":files"
"""Line after the words, if a file may stand there, too."""
# The words are one argument, a line each: argparse would drop a word -- between others.
BASH = """\
_finetune() {
    local IFS=$'\\n' word="${COMP_WORDS[COMP_CWORD]}" line
    COMPREPLY=()
    while read -r line; do
        if [[ $line == :files ]]; then
            COMPREPLY+=($(compgen -f -- "$word"))
        else
            COMPREPLY+=("$line")
        fi
    done < <("${COMP_WORDS[0]}" completion bash --words="${COMP_WORDS[*]:1:COMP_CWORD}" 2>/dev/null)
}
complete -o filenames -F _finetune finetune kubectl-finetune
"""
ZSH = """\
_finetune() {
    local -a lines
    lines=("${(@f)$("${words[1]}" completion zsh --words="${(pj:\\n:)words[2,CURRENT]}" 2>/dev/null)}")
    compadd -- ${${lines:#}:#:files}
    (( ! ${lines[(Ie):files]} )) || _files
}
compdef _finetune finetune kubectl-finetune
"""
FISH = """\
function __finetune_complete
    set -l words (commandline -opc) (commandline -ct)
    set -l lines ($words[1] completion fish --words=(string join \\n -- $words[2..] | string collect -N) 2>/dev/null)
    string match --invert -- :files $lines
    if contains -- :files $lines
        __fish_complete_path (commandline -ct)
    end
end
complete -c finetune -f -a '(__finetune_complete)'
complete -c kubectl-finetune -f -a '(__finetune_complete)'
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


def register(commands: Commands) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser(
        "completion",
        help="print a completion script for a shell",
        description=DESCRIPTION,
    )
    parser.add_argument("shell", choices=[*SCRIPTS], help="shell that reads the script")
    parser.add_argument("--words", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the script, or for the script the words that may stand last in a command line."""
    if arguments.words is None:
        sys.stdout.write(SCRIPTS[arguments.shell])
        return 0
    table = json.loads(TABLE.read_text("utf-8"))
    *before, last = arguments.words.split("\n")
    candidates = _words(table, before, last)
    words = sorted({word for word in candidates if word.startswith(last)})
    # Last: it is no word.
    if _takes_file(table, before, last):
        words.append(FILES)
    sys.stdout.writelines(f"{word}\n" for word in words)
    return 0


def _words(table: Table, before: list[str], last: str) -> Iterator[str]:
    """Yield the words that may follow the words before, whatever the last one begins with."""
    if not before:
        yield from (*table, "--version", "--help")
        return
    command = table.get(before[0], {})
    options = command.get("options", {})
    values = options.get(before[-1])
    # The table has null for a flag, which no value follows.
    if values is not None:
        yield from values
    elif last.startswith("-"):
        yield from options
    else:
        yield from command.get("words", ())
        if command.get("runs"):
            yield from (run.name for run in find_runs())


def _takes_file(table: Table, before: list[str], last: str) -> bool:
    """Return whether a file may be the last word: not a command, an option, or a value of a known set."""
    if not before or last.startswith("-"):
        return False
    options = table.get(before[0], {}).get("options", {})
    return not options.get(before[-1])
