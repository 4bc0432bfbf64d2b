"""`finetune drill`: evict a running stage on purpose, and report what that cost."""

import argparse

from finetune_cli.arguments import (
    NAME_OR_FILE,
    add_cluster_arguments,
    add_workdir,
    run_on_cluster,
    targets_cluster,
)
from finetune_cli.commands import Commands
from finetune_cli.local import process_eviction as local
from finetune_operator.api.spec import STAGES

DESCRIPTION = """\
Evict the running stage on purpose, wait, and report its cost: the time until its work was durable, until the next
attempt's Job and until the next step, the steps lost, and the money if a price is known. On a cluster, its pod is
evicted through the Eviction API, which needs the right to create pods/eviction (--kill: to delete pods). On this
machine, the evicted process is part of a run in another terminal. The eviction counts against maxInterruptions. Ctrl-C
ends only the watching. Exit code: 0 the stage went on, 1 refused, failed or timed out, 2 wrong arguments, 130
interrupted.
"""


def register(commands: Commands) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser(
        "drill", help="evict a stage and report what it cost", description=DESCRIPTION
    )
    parser.add_argument("name", metavar="NAME|FILE", help=NAME_OR_FILE)
    stages = [stage.name for stage in STAGES]
    parser.add_argument(
        "stage",
        nargs="?",
        choices=stages,
        help="stage to evict (default: the stage that runs)",
    )
    help_kill = "SIGKILL at once; on a cluster, delete the pod without grace, which leaves it about 2 s"
    # Not stored as `kill`, a flag of local runs: `arguments.targets_cluster` would refuse it with -n.
    parser.add_argument(
        "--kill", action="store_true", dest="without_grace", help=help_kill
    )
    parser.add_argument(
        "-y", "--yes", action="store_true", help="do not ask before the eviction"
    )
    help_timeout = "longest wait, as 90s, 30m or 1h30m (default: 15m)"
    parser.add_argument("--timeout", default="15m", metavar="30m", help=help_timeout)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    add_workdir(parser)
    add_cluster_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Evict, watch and return the exit code."""
    if targets_cluster(arguments.name, arguments):
        return run_on_cluster("pod_eviction", arguments)
    return local.run(arguments)
