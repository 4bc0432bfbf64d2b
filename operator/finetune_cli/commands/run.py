"""`finetune run` and, with fresh budgets, `finetune retry`: the pipeline on this machine."""

import argparse
import asyncio
import json
import os
import shlex
import subprocess
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from finetune_cli.arguments import add_local_arguments, claims, workdir_for
from finetune_cli.commands import Commands
from finetune_cli.display import display_for, gate_line, interruptions_line, live_table
from finetune_cli.exit_codes import FAILED, INTERRUPTED
from finetune_cli.local.fault_injection import fault
from finetune_cli.local.run import LocalRun, is_until_reached
from finetune_cli.local.serving import keep_serving
from finetune_cli.manifest.manifest import read
from finetune_cli.pipeline_status import DONE, below_gate, ready_message
from finetune_operator.api.spec import STAGES
from finetune_operator.api.status import PipelineStatus
from finetune_operator.core.settings import Settings
from finetune_trainer.contract.environment import GIT_SHA

DESCRIPTION = """\
Run a pipeline on this machine: each stage is a process, each volume a folder. All of it lives in one work folder;
running the command again goes on where it stopped, and finished stages are not run again. Ctrl-C stops as an
eviction would. Exit code: 0 done, 1 failed, 2 the manifest is invalid, 3 done but below the gate, 130 interrupted.
"""


def register(commands: Commands) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser("run", help="run a pipeline on this machine", description=DESCRIPTION)
    add_arguments(parser)
    parser.set_defaults(run=run, retry=False)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `run` and `retry` have in common."""
    parser.add_argument("file", type=Path, metavar="FILE", help="the manifest")
    add_local_arguments(parser)
    stages = [stage.name for stage in STAGES]
    parser.add_argument("--until", choices=stages, help="stop when this stage is done")
    help_evict = "take the stage's node away, with notice, when it has done so many steps (SIGTERM, then SIGKILL)"
    help_kill = "lose the stage's node without notice (SIGKILL)"
    for kind, words in (("evict", help_evict), ("kill", help_kill)):
        parser.add_argument(f"--{kind}", action="append", default=[], metavar="STAGE@STEP", help=words)
    parser.add_argument("--keep-serving", action="store_true", help="serve the model after deploy, until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="print the status object at the end, and nothing else")


def run(arguments: argparse.Namespace) -> int:
    """Run until the end and give the exit code."""
    manifest = read(arguments.file)
    drills = [fault("evict")(text) for text in arguments.evict] + [fault("kill")(text) for text in arguments.kill]
    workdir = workdir_for(manifest, arguments.workdir)
    with display_for(manifest.name, to_stderr=arguments.json) as view:
        laptop = LocalRun.create(manifest, workdir, view.event)
        with laptop.locked():
            laptop.cluster.folders.link_claims(claims(arguments.claim))
            laptop.check_claims()
            laptop.check_sources()
            if commit := commit_of(manifest.path.parent):
                os.environ.setdefault(GIT_SHA, commit)
            now = datetime.now(UTC)  # noqa: TID251  an edge
            laptop.apply_manifest(retry=now.isoformat() if arguments.retry else None)
            status = asyncio.run(laptop.run(Settings(until=arguments.until), drills, view.update))
    if arguments.json:
        print(json.dumps(status.model_dump(mode="json", by_alias=True, exclude_none=True), indent=1))
    else:
        conclude(laptop, status, arguments)
    if arguments.keep_serving and status.phase == "Succeeded" and not keep_serving(laptop):
        return FAILED
    return exit_code(status, laptop, arguments.until)


def commit_of(folder: Path) -> str | None:
    """Give the commit that a folder is at, with -dirty behind it where files differ; None where there is none."""
    command = ("git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return asked.stdout.strip() or None


def exit_code(status: PipelineStatus, laptop: LocalRun, until: str | None) -> int:
    """Say in a number how it ended."""
    if status.finished_at and status.phase not in DONE:
        return FAILED
    if not status.finished_at and (laptop.cluster.stopping or not is_until_reached(status, until)):
        return INTERRUPTED
    return below_gate(status)


def conclude(laptop: LocalRun, status: PipelineStatus, arguments: argparse.Namespace) -> None:
    """Say at the end what there is, what it cost, and what to do next."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(live_table(laptop.key.name, status))
    if status.interruptions:
        console.print(interruptions_line(status))
    if status.gate:
        console.print(gate_line(status.gate), markup=False)
    if status.model:
        console.print(f"model: {status.model.uri} ({status.model.digest[:19]}…)", markup=False)
    places = shlex.join([str(arguments.file), "--workdir", str(laptop.workdir)])
    if status.finished_at:
        console.print(f"{status.phase}: {ready_message(status)}", markup=False)
        if status.phase == "Failed":
            console.print(f"mend it, then: finetune retry {places}", markup=False)
    elif laptop.cluster.stopping:
        console.print(f"stopped. To go on: finetune run {places}", markup=False)
    elif laptop.manifest.spec.suspend:
        console.print("nothing is started: spec.suspend is true")
