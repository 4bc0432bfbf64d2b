"""`finetune run`: run a pipeline on this machine; `finetune retry` does the same with fresh budgets."""

import argparse
import asyncio
import json
import os
import subprocess
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from finetune_cli.arguments import (
    add_local_arguments,
    add_set,
    claims,
    manifest_path,
    overrides,
    workdir_for,
)
from finetune_cli.commands import Commands
from finetune_cli.exit_codes import DONE, FAILED, INTERRUPTED, below_gate
from finetune_cli.exit_codes import exit_code as finished_exit_code
from finetune_cli.local.fault_injection import fault
from finetune_cli.local.run import LocalRun, is_until_reached
from finetune_cli.local.serving import keep_serving
from finetune_cli.local.summary import run_argument, summary_lines
from finetune_cli.manifest.manifest import read
from finetune_cli.output.display import Display, display_for
from finetune_cli.output.notes import notes_of
from finetune_cli.output.status_tree import live_table
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
    add_set(parser)
    parser.set_defaults(run=run, retry=False)


def add_arguments(parser: argparse.ArgumentParser, target: str = RUN_OR_FILE) -> None:
    """Add the arguments that `run` and `retry` share; `target` describes the positional argument."""
    parser.add_argument("file", metavar="NAME|FILE", help=target)
    add_local_arguments(parser)
    stages = [stage.name for stage in STAGES]
    parser.add_argument("--until", choices=stages, help="stop after this stage")
    faults = {
        "--evict": "evict the stage when it has reached this step: SIGTERM, then SIGKILL; may be given several times",
        "--kill": "kill the stage at this step without notice (SIGKILL), as the loss of its node would",
    }
    for flag, text in faults.items():
        parser.add_argument(
            flag, action="append", default=[], metavar="STAGE@STEP", help=text
        )
    parser.add_argument(
        "--keep-serving",
        action="store_true",
        help="serve the published model after a run that succeeded, until Ctrl-C",
    )
    parser.add_argument(
        "--json", action="store_true", help="print only the final status, as JSON"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the pipeline until it has finished or is stopped, and return the exit code."""
    manifest = read(manifest_path(arguments.file), overrides(arguments))
    faults = [fault("evict")(text) for text in arguments.evict]
    faults += [fault("kill")(text) for text in arguments.kill]
    workdir = workdir_for(manifest, arguments.workdir)
    # On this machine, a command explains a reason.
    settings = Settings(
        until=arguments.until, placement_defaults=None, troubleshooting_url=""
    )
    with display_for(manifest.name, to_stderr=arguments.json) as display:
        commit = _commit(manifest.path.parent)
        local_run = LocalRun.create(manifest, workdir, display.event, commit)
        with local_run.locked():
            local_run.cluster.folders.link_claims(claims(arguments.claim))
            # All checks come before the manifest is applied: an invalid one leaves the earlier run as it is.
            for text in local_run.check():
                display.event(Event("Warning", "NotLookedAt", text))
            retry = None
            if arguments.retry:
                retry = _retry_request(local_run, display)
            local_run.apply_manifest(retry)
            status = asyncio.run(local_run.run(settings, faults, display.update))
    if arguments.json:
        values = status.model_dump(mode="json", by_alias=True, exclude_none=True)
        notes = [vars(note) for note in notes_of(status)]
        print(json.dumps({**values, "notes": notes}, indent=1))
    else:
        print_summary(local_run, status)
    if (
        arguments.keep_serving
        and status.phase == "Succeeded"
        and not keep_serving(local_run)
    ):
        return FAILED
    return exit_code(status, local_run, arguments.until)


def _retry_request(local_run: LocalRun, display: Display) -> str | None:
    """Return the value of the retry annotation; None after a run without a failure: a retry would erase its record."""
    before = local_run.status()
    if before.finished_at and before.phase in DONE:
        text = f"the run has finished ({before.phase}) without a failure"
        display.event(Event("Warning", "NothingToRetry", text))
        return None
    return datetime.now(UTC).isoformat()  # noqa: TID251  an edge


def _commit(folder: Path) -> str | None:
    """Return the commit of the manifest for the model card; None if the shell names it or there is none."""
    # The user's own variable takes precedence: the stages inherit it.
    if GIT_SHA in os.environ:
        return None
    return commit_of(folder)


def commit_of(folder: Path) -> str | None:
    """Return the git commit of a folder, with the suffix -dirty for uncommitted changes; None outside a repository."""
    # Tags are excluded, and the commit is never shortened: the model card needs the whole one.
    options = ("--always", "--dirty", "--abbrev=40", "--exclude=*")
    command = ("git", "-C", str(folder), "describe", *options)
    try:
        # A repository on a network file system may take long; the commit is not worth waiting for.
        described = subprocess.run(
            command, capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip() or None


def exit_code(status: PipelineStatus, local_run: LocalRun, until: str | None) -> int:
    """Return the exit code: 0, FAILED, BELOW_GATE or INTERRUPTED."""
    if status.finished_at:
        return finished_exit_code(status)
    if local_run.cluster.stopping or not is_until_reached(status, until):
        return INTERRUPTED
    return below_gate(status)


def print_summary(local_run: LocalRun, status: PipelineStatus) -> None:
    """Print the final status, the cost of interruptions, the model, and the command to run next."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(live_table(local_run.key.name, status))
    for line in summary_lines(status, local_run.workdir):
        console.print(line, markup=False)
    hint = _next_command(local_run, status)
    if hint:
        console.print(hint, markup=False)


def _next_command(local_run: LocalRun, status: PipelineStatus) -> str:
    """Return how to go on from a run that has failed or stopped; empty for all other runs."""
    again = run_argument(local_run.workdir)
    if status.finished_at:
        if status.phase == "Failed":
            return f"After fixing the cause: finetune retry {again}"
        return ""
    if local_run.cluster.stopping:
        return f"Stopped. To continue: finetune run {again}"
    if local_run.manifest.spec.suspend:
        return "Nothing was started: spec.suspend is true"
    return f"Stopped as --until asks. To continue: finetune run {again}"
