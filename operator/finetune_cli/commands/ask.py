"""`finetune ask`: ask the trained model a question, and with --base also its base model."""

import argparse
import contextlib
import sys

from finetune_cli.arguments import add_target
from finetune_cli.card.markup import visible
from finetune_cli.chat import conversations
from finetune_cli.commands import Commands
from finetune_cli.conversation import BASE, MAX_TOKENS, TRAINED, ModelConversation
from finetune_cli.diagnostics import UsageError

DESCRIPTION = """\
Ask the model that a run has published, and print its answer as it is written. The model decodes greedily, so the same
model gives the same answer. A model that was trained on conversations gets the question as a message, by its own chat
template; any other model continues it as a text. For a run on this machine, a model server is started and stopped at
the end, unless `finetune run NAME --keep-serving` serves the model. Of a pipeline on a cluster, the server of its
stage deploy is asked, through the API server.
"""


def register(commands: Commands) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser(
        "ask", help="ask the trained model a question", description=DESCRIPTION
    )
    add_arguments(parser)
    parser.add_argument("question", metavar="QUESTION", help="text of the question")
    parser.set_defaults(run=run)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `ask` and `chat` share."""
    add_target(parser)
    text = "also ask the base model of a run on this machine"
    parser.add_argument("--base", action="store_true", help=text)
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=MAX_TOKENS,
        metavar="N",
        help=f"longest answer (default: {MAX_TOKENS})",
    )


def labels_of(arguments: argparse.Namespace) -> list[str]:
    """Return the models to ask; raise UsageError for an answer of no tokens."""
    if arguments.max_tokens < 1:
        raise UsageError(f"--max-tokens {arguments.max_tokens}: must be at least 1")
    return [TRAINED, BASE] if arguments.base else [TRAINED]


def run(arguments: argparse.Namespace) -> int:
    """Ask each model."""
    labels = labels_of(arguments)
    with conversations(arguments, labels, arguments.max_tokens) as models:
        for model in models:
            print_answer(model, arguments.question, labelled=len(models) > 1)
    return 0


def print_answer(model: ModelConversation, question: str, *, labelled: bool) -> None:
    """Print the answer as it arrives; control characters are written out, so that they control no terminal."""
    if labelled:
        print(f"{model.label}: ", end="")
    try:
        with contextlib.closing(model.ask(question)) as pieces:
            for piece in pieces:
                print(visible(piece), end="", flush=True)
    finally:
        print(flush=True)
    if model.finish_reason == "length":
        text = f"({model.label}: ended at --max-tokens {model.max_tokens})"
        print(text, file=sys.stderr)
