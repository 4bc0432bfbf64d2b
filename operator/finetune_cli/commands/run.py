"""`finetune run`: run a pipeline on this machine; `finetune retry` does the same with fresh budgets."""

import argparse
import asyncio
import json
import os
import subprocess
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from finetune_cli.arguments import add_local_arguments, claims, manifest_path, workdir_for
from finetune_cli.commands import Commands
from finetune_cli.display import Display, display_for
from finetune_cli.exit_codes import DONE, FAILED, INTERRUPTED, below_gate
from finetune_cli.local.fault_injection import fault
from finetune_cli.local.run import LocalRun, is_until_reached
from finetune_cli.local.serving import keep_serving
from finetune_cli.local.summary import run_argument, summary_lines
from finetune_cli.manifest.manifest import read
from finetune_cli.status_tree import live_table
from finetune_operator.api.spec import STAGES
from finetune_operator.api.status import PipelineStatus
from finetune_operator.core.events import Event
from finetune_operator.core.settings import Settings
from finetune_trainer.contract.environment import GIT_SHA

DESCRIPTION = """\
Run a pipeline on this machine: each stage is a process, each volume a folder. The run is kept in one work folder.
Running the command again continues where it stopped; finished stages do not run again. Ctrl-C stops the stage as an
eviction would. Exit code: 0 done, 1 failed, 2 invalid manifest, 3 done but below the gate, 130 interrupted.
"""
RUN_OR_FILE = "manifest of the pipeline, or the name of a run to continue"


def register(commands: Commands) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser(
        "run", help="run a pipeline on this machine", description=DESCRIPTION
    )
    add_arguments(parser)
    parser.set_defaults(run=run, retry=False)


def add_arguments(parser: argparse.ArgumentParser, target: str = RUN_OR_FILE) -> None:
    """Add the arguments that `run` and `retry` share; `target` describes the positional one."""
    parser.add_argument("file", metavar="NAME|FILE", help=target)
    add_local_arguments(parser)
    stages = [stage.name for stage in STAGES]
    parser.add_argument("--until", choices=stages, help="stop after this stage")
    help_evict = "evict the stage when it has reached this step: SIGTERM, then SIGKILL; may be given several times"
    help_kill = (
        "kill the stage at this step without notice (SIGKILL), as the loss of its node would"
    )
    for kind, text in (("evict", help_evict), ("kill", help_kill)):
        parser.add_argument(
            f"--{kind}", action="append", default=[], metavar="STAGE@STEP", help=text
        )
    parser.add_argument(
        "--keep-serving",
        action="store_true",
        help="serve the published model after a run that succeeded, until Ctrl-C",
    )
    parser.add_argument("--json", action="store_true", help="print only the final status, as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run the pipeline until it has finished or is stopped, and return the exit code."""
    manifest = read(manifest_path(arguments.file))
    faults = [fault("evict")(text) for text in arguments.evict] + [
        fault("kill")(text) for text in arguments.kill
    ]
    workdir = workdir_for(manifest, arguments.workdir)
    with display_for(manifest.name, to_stderr=arguments.json) as display:
        local_run = LocalRun.create(manifest, workdir, display.event)
        with local_run.locked():
            local_run.cluster.folders.link_claims(claims(arguments.claim))
            for text in local_run.check():
                display.event(Event("Warning", "NotLookedAt", text))
            if commit := commit_of(manifest.path.parent):
                os.environ.setdefault(GIT_SHA, commit)
            retry = _retry_request(local_run, display) if arguments.retry else None
            local_run.apply_manifest(retry)
            status = asyncio.run(
                local_run.run(
                    Settings(until=arguments.until, placement_defaults=None), faults, display.update
                )
            )
    if arguments.json:
        print(
            json.dumps(status.model_dump(mode="json", by_alias=True, exclude_none=True), indent=1)
        )
    else:
        print_summary(local_run, status)
    if arguments.keep_serving and status.phase == "Succeeded" and not keep_serving(local_run):
        return FAILED
    return exit_code(status, local_run, arguments.until)


def _retry_request(local_run: LocalRun, display: Display) -> str | None:
    """Return the value of the retry annotation; None after a run without a failure: a retry would erase its record."""
    before = local_run.status()
    if before.finished_at and before.phase in DONE:
        display.event(
            Event(
                "Warning",
                "NothingToRetry",
                f"the run has finished ({before.phase}) without a failure",
            )
        )
        return None
    return datetime.now(UTC).isoformat()  # noqa: TID251  an edge


def commit_of(folder: Path) -> str | None:
    """Return the git commit of a folder, with the suffix -dirty for uncommitted changes; None outside a repository."""
    command = (
        "git",
        "-C",
        str(folder),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=40",
        "--exclude=*",
    )
    try:
        described = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip() or None


def exit_code(status: PipelineStatus, local_run: LocalRun, until: str | None) -> int:
    """Return the exit code: 0, FAILED, BELOW_GATE or INTERRUPTED."""
    if status.finished_at and status.phase not in DONE:
        return FAILED
    if not status.finished_at and (
        local_run.cluster.stopping or not is_until_reached(status, until)
    ):
        return INTERRUPTED
    return below_gate(status)


def print_summary(local_run: LocalRun, status: PipelineStatus) -> None:
    """Print the final status, the cost of interruptions, the model, and the command to run next."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(live_table(local_run.key.name, status))
    for line in summary_lines(status, local_run.workdir):
        console.print(line, markup=False)
    again = run_argument(local_run.workdir)
    if status.finished_at and status.phase == "Failed":
        console.print(f"After fixing the cause: finetune retry {again}", markup=False)
    elif not status.finished_at and local_run.cluster.stopping:
        console.print(f"Stopped. To continue: finetune run {again}", markup=False)
    elif not status.finished_at and local_run.manifest.spec.suspend:
        console.print("Nothing was started: spec.suspend is true")
    elif not status.finished_at:
        console.print(f"Stopped as --until asks. To continue: finetune run {again}", markup=False)
