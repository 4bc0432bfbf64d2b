"""`finetune run`: run a pipeline on this machine; `finetune retry` does the same with fresh budgets."""

import argparse
import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
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
from finetune_cli.diagnostics import UsageError
from finetune_cli.exit_codes import FAILED, INTERRUPTED
from finetune_cli.local.background import run_in_background
from finetune_cli.local.fault_injection import Fault, fault
from finetune_cli.local.look import as_stopped
from finetune_cli.local.run import LocalRun, local_settings
from finetune_cli.local.serving.serving import check_port, keep_serving
from finetune_cli.local.summary import (
    next_commands,
    run_argument,
    summary_lines,
)
from finetune_cli.local.work_folder import LOG
from finetune_cli.manifest.manifest import Manifest, read
from finetune_cli.outcome import below_gate, is_until_reached
from finetune_cli.outcome import exit_code as finished_exit_code
from finetune_cli.output.notes import notes_of
from finetune_cli.output.status.display import Display, display_for
from finetune_cli.output.status.tree import live_table
from finetune_cli.runs import RUNS
from finetune_operator.api.spec import STAGES
from finetune_operator.api.status import PipelineStatus
from finetune_operator.core.events import Event
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
    _add_all(parser)


def _add_all(parser: argparse.ArgumentParser) -> None:
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
        "--port",
        type=int,
        metavar="N",
        help="port of --keep-serving (default: any free port)",
    )
    parser.add_argument(
        "-d",
        "--detach",
        action="store_true",
        help="return when all checks have passed, and run in the background",
    )
    parser.add_argument(
        "--json", action="store_true", help="print only the final status, as JSON"
    )


def start(words: Sequence[str]) -> int:
    """Run with these words of a command line, and return the exit code; other options have their defaults."""
    # The command's own parser: another command that starts a run cannot forget an option.
    parser = argparse.ArgumentParser(prog="finetune run")
    _add_all(parser)
    return run(parser.parse_args(words))


def run(arguments: argparse.Namespace) -> int:
    """Run the pipeline until it has finished or is stopped, and return the exit code."""
    check_flags(arguments)
    manifest = read(manifest_path(arguments.file), overrides(arguments))
    faults = [fault("evict")(text) for text in arguments.evict]
    faults += [fault("kill")(text) for text in arguments.kill]
    workdir = workdir_for(manifest, arguments.workdir)
    if not arguments.workdir and workdir.parent != RUNS.absolute():
        print(f"{manifest.name} goes on in {workdir}", file=sys.stderr)
    local_run = LocalRun.create(manifest, workdir, commit=manifest_commit(manifest))
    with local_run.locked():
        with _display(arguments, local_run) as display:
            _prepare(arguments, local_run, display)

        def work() -> int:
            return _work(arguments, local_run, faults)

        if arguments.detach:
            log = workdir / LOG
            process = run_in_background(work, log)
            print(background_text(manifest.name, workdir, process))
            return 0
        code = work()
    if (
        arguments.keep_serving
        and local_run.status().phase == "Succeeded"
        and not keep_serving(local_run, arguments.port)
    ):
        return FAILED
    return code


def check_flags(arguments: argparse.Namespace) -> None:
    """Raise UsageError for flags that contradict each other, and for a port that is not free."""
    if arguments.port is not None:
        if not arguments.keep_serving:
            raise UsageError("--port is for --keep-serving: add it, or remove --port")
        check_port(arguments.port)
    for name in ("json", "keep_serving"):
        if arguments.detach and getattr(arguments, name):
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(
                f"{flag} needs a run that this command waits for: leave out {flag} or --detach"
            )


def background_text(name: str, workdir: Path, process: int) -> str:
    """Return what a user can do with a run that has gone to the background."""
    target = run_argument(workdir)
    return (
        f"{name} runs in the background (process {process}); its output: {workdir / LOG}\n"
        f"watch: finetune get {target} -w    wait: finetune wait {target}    stop: finetune stop {target}"
    )


def _display(arguments: argparse.Namespace, local_run: LocalRun) -> Display:
    display = display_for(
        local_run.manifest.name, to_stderr=arguments.json, until=arguments.until
    )
    local_run.cluster.on_event = display.event
    return display


def _prepare(
    arguments: argparse.Namespace, local_run: LocalRun, display: Display
) -> None:
    """Check what the run needs, and store its manifest."""
    folders = claims(arguments.claim)
    for text in local_run.prepare(folders, arguments.until, retry=arguments.retry):
        display.event(Event("Warning", "NotLookedAt", text))


def _work(
    arguments: argparse.Namespace, local_run: LocalRun, faults: Sequence[Fault]
) -> int:
    """Reconcile until the run ends, print its end, and return the exit code."""
    settings = local_settings(arguments.until)
    with _display(arguments, local_run) as display:
        status = asyncio.run(local_run.run(settings, faults, display.update))
    pipeline = local_run.cluster.pipeline_file.read()
    if pipeline:
        # Ctrl-C suspends the pipeline for this command only, which ends with it.
        status = as_stopped(pipeline)
    if arguments.json:
        values = status.model_dump(mode="json", by_alias=True, exclude_none=True)
        notes = [vars(note) for note in notes_of(status)]
        print(json.dumps({**values, "notes": notes}, indent=1))
    else:
        print_summary(local_run, status, arguments.until)
    return exit_code(status, local_run, arguments.until)


def manifest_commit(manifest: Manifest) -> str | None:
    """Return the commit of the manifest for the model card; None if the shell names it or there is none."""
    # The user's own variable takes precedence: the stages inherit it.
    if GIT_SHA in os.environ:
        return None
    return commit_of(manifest.path.parent)


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


def print_summary(
    local_run: LocalRun, status: PipelineStatus, until: str | None
) -> None:
    """Print the final status, the cost of interruptions, the model, and the command to run next."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(live_table(local_run.key.name, status, until=until))
    lines = list(summary_lines(status, local_run.workdir))
    if not status.finished_at:
        # The last line is the outcome, and a run that goes on later has none.
        lines.pop()
    lines.append(_next_command(local_run, status, until))
    pipeline = local_run.cluster.pipeline_file.read()
    if pipeline:
        lines += next_commands(pipeline, local_run.workdir)
    for line in lines:
        if line:
            console.print(line, markup=False)


def _next_command(
    local_run: LocalRun, status: PipelineStatus, until: str | None
) -> str:
    """Return how to go on from a run that has failed or stopped; empty for all other runs."""
    again = run_argument(local_run.workdir)
    if status.phase == "Failed":
        return f"After fixing the cause: finetune retry {again}"
    if status.phase == "Cancelled":
        return f"To start it again: finetune retry {again}"
    if status.finished_at:
        return ""
    if is_until_reached(status, until):
        return f"Stopped as --until asks. To continue: finetune run {again}"
    if local_run.manifest.spec.suspend:
        return "Nothing was started: spec.suspend is true"
    if until:
        again = f"{again} --until {until}"
    return f"Stopped. To continue: finetune run {again}"
