"""`finetune retry`: run again from the stage that failed, with fresh budgets."""

from finetune_cli.commands import Commands
from finetune_cli.commands.run import add_arguments, run

DESCRIPTION = """\
Start the stage that failed again, with fresh budgets for failures and interruptions; stages that succeeded are kept.
Otherwise the same as `finetune run`.
"""


def register(commands: Commands) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser("retry", help="run again from the stage that failed", description=DESCRIPTION)
    add_arguments(parser)
    parser.set_defaults(run=run, retry=True)
