"""`finetune drill` on this machine: evicts a stage of a run that another `finetune run` works on."""

import argparse
import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path

from finetune_cli.arguments import find_workdir, parse_timeout
from finetune_cli.drill.conduct import conclude, confirm, watch
from finetune_cli.drill.record import Drill, Look
from finetune_cli.drill.target import DrillTarget, Refused, choose_target
from finetune_cli.exit_codes import FAILED
from finetune_cli.local.summary import run_argument
from finetune_operator.api.status import PipelineStatus
from finetune_operator.core.durations import format_duration
from finetune_operator.core.observation import JobState
from finetune_operator.local.job_folder import is_locked, observe_job
from finetune_operator.local.pipeline_file import PipelineFile
from finetune_operator.local.runner import EVICT, JOB_FILE, KILL, send_command

EVICTED = "evicted on purpose (finetune drill)"
NODE_LOST = "killed on purpose, as if its node was lost (finetune drill --kill)"


def run(arguments: argparse.Namespace) -> int:
    """Evict the stage, watch the run and return the exit code."""
    timeout = parse_timeout(arguments.timeout)
    workdir = find_workdir(arguments.name, arguments.workdir)
    target = _find_target(workdir, arguments)
    folder = _job_folder(workdir, target)
    time_to_save = "no time to save"
    if not target.kill:
        job = json.loads((folder / JOB_FILE).read_bytes())
        time_to_save = format_duration(job["graceSeconds"])
    if not confirm(target.announce("the process", time_to_save), yes=arguments.yes):
        return FAILED
    drill = Drill(target)
    return conclude(
        drill,
        lambda: asyncio.run(_evict_and_watch(drill, workdir, arguments, timeout)),
        arguments,
    )


def _find_target(workdir: Path, arguments: argparse.Namespace) -> DrillTarget:
    """Return the attempt to evict; raises Refused."""
    pipeline = PipelineFile(workdir).read()
    if pipeline is None:
        raise Refused(f"{workdir} holds no run any more")
    target = choose_target(pipeline, arguments.stage, kill=arguments.without_grace)
    # The runner of a stage may outlive its `finetune run`, and would be evicted for nothing.
    if not is_locked(workdir):
        again = f"finetune run {run_argument(workdir)}"
        raise Refused(
            f"no `finetune run` works on {pipeline.key}, so nothing would resume; continue it: {again}"
        )
    # The status is up to half a second old: the process may have ended since.
    job = observe_job(_job_folder(workdir, target))
    if job is None or job.state is not JobState.RUNNING:
        raise Refused(
            f"attempt {target.attempt.number} of {target.stage} does not run at this moment; try again"
        )
    return target


def _job_folder(workdir: Path, target: DrillTarget) -> Path:
    return workdir / "jobs" / target.attempt.job


async def _evict_and_watch(
    drill: Drill,
    workdir: Path,
    arguments: argparse.Namespace,
    timeout_seconds: float | None,
) -> None:
    folder = _job_folder(workdir, drill.target)
    # Again, because the user may have taken minutes to confirm.
    if _find_target(workdir, arguments).attempt.job != drill.target.attempt.job:
        raise Refused("another attempt runs by now; nothing was evicted")
    # As late as possible: the lost steps are counted from this step.
    before = observe_job(folder)
    if before and before.progress:
        drill.step = before.progress.step
    _send(folder, kill=arguments.without_grace)
    drill.evicted = True
    started = time.monotonic()

    async def look() -> Look:
        return _look(drill, workdir, time.monotonic() - started)

    await watch(drill, look, timeout_seconds)


def _send(folder: Path, *, kill: bool) -> None:
    """Send the command to the runner of the Job; raises Refused if it takes none."""
    command = f"{EVICT} {EVICTED}"
    if kill:
        command = f"{KILL} {NODE_LOST}"
    try:
        send_command(folder, command)
    except OSError as error:
        causes = "its process has ended, an older version started it, or the file system has no named pipes"
        raise Refused(f"its runner takes no commands ({error}): {causes}") from error


def _look(drill: Drill, workdir: Path, seconds: float) -> Look:
    # The lock is looked at first: a run that ends writes its status before it releases the lock.
    working = is_locked(workdir)
    pipeline = PipelineFile(workdir).read()
    status = PipelineStatus()
    if pipeline:
        status = pipeline.status
    evicted = observe_job(_job_folder(workdir, drill.target))
    later = drill.target.later_attempt(status)
    next_job = None
    if later:
        next_job = observe_job(workdir / "jobs" / later.job)
    look = Look(
        seconds,
        status,
        ended=evicted is None or not evicted.live,
        next_job=next_job is not None,
    )
    if next_job:
        look = replace(look, progress=next_job.progress)
    if not working:
        ended = f"the `finetune run` that worked on {drill.target.pipeline} has ended"
        look = replace(look, problem=ended)
    return look
