"""A question before something is deleted."""

import sys

from finetune_cli.diagnostics import UsageError


def agreed(question: str, *, yes: bool) -> bool:
    """Print a question and return whether the user agrees; raises UsageError without a terminal to ask on."""
    if yes:
        return True
    if not sys.stdin.isatty():
        raise UsageError(
            f"{question} There is no terminal to ask on: add --yes; nothing was deleted"
        )
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline().strip().lower()
    agreed = answer in {"y", "yes"}
    if not agreed:
        print("nothing was deleted", file=sys.stderr)
    return agreed
