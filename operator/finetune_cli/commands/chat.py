"""`finetune chat`: talk to the trained model, and with --base also to its base model."""

import argparse
import contextlib
import sys

from finetune_cli.chat import conversations
from finetune_cli.commands import Commands
from finetune_cli.commands.ask import add_arguments, labels_of, print_answer
from finetune_cli.conversation import ModelConversation, RequestRefused

DESCRIPTION = """\
Talk to the model that a run has published; with --base, its base model answers beside it. Ctrl-C stops an answer,
Ctrl-D ends, /reset begins a new conversation, and a line that ends with \\ goes on in the next. Each model has its own
conversation. A model that was not trained on conversations continues each text alone. Servers are as for `finetune
ask`.
"""
RESET = "/reset"


def register(commands: Commands) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser(
        "chat", help="talk to the trained model", description=DESCRIPTION
    )
    add_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Ask the models each question of the user until Ctrl-D."""
    with contextlib.suppress(ImportError):
        # Editing and a history for `input`, where Python has them.
        import readline  # noqa: F401, PLC0415
    labels = labels_of(arguments)
    print("loading the model; Ctrl-C stops an answer, Ctrl-D ends", file=sys.stderr)
    with conversations(arguments, labels, arguments.max_tokens) as models:
        while True:
            try:
                question = _question()
            except EOFError:
                return 0
            except KeyboardInterrupt:
                # As in other shells, it discards the line.
                print()
                continue
            try:
                _answer(models, question)
            except KeyboardInterrupt:
                continue
            except RequestRefused as error:
                print(f"finetune: {error}", file=sys.stderr)


def _question() -> str:
    """Return what the user has typed; raise EOFError at the end of the input."""
    prompt = "> " if sys.stdin.isatty() else ""
    lines = [input(prompt)]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1].removesuffix("\\")
        lines.append(input(prompt))
    return "\n".join(lines)


def _answer(models: list[ModelConversation], question: str) -> None:
    if question.strip() == RESET:
        for model in models:
            model.messages = ()
        return
    if question.strip():
        for model in models:
            print_answer(model, question, labelled=len(models) > 1)
