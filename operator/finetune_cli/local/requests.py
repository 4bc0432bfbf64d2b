"""`finetune cancel`, `suspend`, `stop`, `resume` and `delete` of a run on this machine.

A request is written to pipeline.json, as a client of a cluster writes it to the API server. The process that works on
the run reads it within a second and acts on it. Without such a process, the command acts on it itself.
"""

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from finetune_cli.arguments import find_workdir, is_manifest
from finetune_cli.diagnostics import UsageError
from finetune_cli.exit_codes import FAILED
from finetune_cli.local.look import RunLook, look_at
from finetune_cli.local.run import local_settings
from finetune_cli.local.watch import summary
from finetune_cli.local.work_folder import WorkFolderInUse, delete, locked
from finetune_cli.outcome import is_up_to_date
from finetune_cli.output.question import agreed
from finetune_cli.runs import manifest_of, until_of
from finetune_operator.api.group import CANCEL_ANNOTATION
from finetune_operator.core.pipeline import Pipeline
from finetune_operator.errors import ClusterError
from finetune_operator.local.cluster import Folders, LocalCluster
from finetune_operator.local.job_folder import is_locked
from finetune_operator.local.pipeline_file import PipelineFile
from finetune_operator.reconcile import reconcile
from finetune_trainer.sizes import format_size

POLL_SECONDS = 0.1


Start = Callable[[Sequence[str]], int]
"""Starts a run with words after `finetune run`, and returns its exit code."""


def run(arguments: argparse.Namespace, start: Start) -> int:
    """Do what the command asks, and return the exit code; raises UsageError if --workdir holds another run."""
    workdir = find_workdir(arguments.name, arguments.workdir)
    name = _name_of(workdir)
    if not is_manifest(arguments.name) and arguments.name not in {name, workdir.name}:
        raise UsageError(f"{workdir} holds the run {name}, not {arguments.name}")
    if arguments.command == "resume":
        return _resume(workdir, start)
    return VERBS[arguments.command](workdir, arguments)


def _name_of(workdir: Path) -> str:
    # A damaged file must not keep its run from being deleted.
    with contextlib.suppress(ClusterError):
        pipeline = PipelineFile(workdir).read()
        if pipeline:
            return pipeline.key.name
    return workdir.name


def _has_finished(look: RunLook) -> bool:
    """Return whether there is nothing to stop or to resume any more, and say so."""
    status = look.pipeline.status
    if status.finished_at:
        print(f"{look.key}: has already finished ({status.phase})")
    return status.finished_at is not None


def _cancel(workdir: Path, _: argparse.Namespace) -> int:
    look = look_at(workdir)
    if _has_finished(look):
        return 0
    now = datetime.now(UTC).isoformat()  # noqa: TID251  an edge
    PipelineFile(workdir).change(lambda pipeline: _with_cancel(pipeline, now))
    print(
        f"{look.key}: is being cancelled; `finetune retry` starts it again", flush=True
    )

    def holds(pipeline: Pipeline) -> bool:
        asked = pipeline.annotations.get(CANCEL_ANNOTATION) == now
        return asked or pipeline.status.cancelled

    return _await_end(workdir, holds)


def _with_cancel(pipeline: Pipeline, token: str) -> Pipeline:
    annotations = {**pipeline.annotations, CANCEL_ANNOTATION: token}
    return replace(pipeline, annotations=annotations)


def _suspend(workdir: Path, _: argparse.Namespace) -> int:
    look = look_at(workdir)
    if _has_finished(look):
        return 0
    if look.pipeline.spec.suspend:
        print(f"{look.key}: is already suspended")
        return _await_end(workdir, _is_suspended)
    PipelineFile(workdir).change(lambda pipeline: _with_suspend(pipeline, suspend=True))
    print(f"{look.key}: is being suspended; `finetune resume` continues it", flush=True)
    return _await_end(workdir, _is_suspended)


def _is_suspended(pipeline: Pipeline) -> bool:
    return pipeline.spec.suspend


def _with_suspend(pipeline: Pipeline, *, suspend: bool) -> Pipeline:
    spec = pipeline.spec.model_copy(update={"suspend": suspend})
    return replace(pipeline, spec=spec)


def _await_end(workdir: Path, holds: Callable[[Pipeline], bool]) -> int:
    """Wait until no process works on the run, and print its state. Ctrl-C ends only the waiting.

    Return FAILED if the request does not hold any more.
    """
    while True:
        try:
            with locked(workdir):
                settle(workdir)
            break
        except WorkFolderInUse:
            time.sleep(POLL_SECONDS)
        look = look_at(workdir)
        if look.works and not holds(look.pipeline):
            print(f"{look.key}: another command has started it again", file=sys.stderr)
            return FAILED
    print(summary(look_at(workdir)))
    return 0


def settle(workdir: Path) -> None:
    """Record the ends of all processes of a run, and the requests to it; starts nothing. The caller holds the lock."""
    manifest = manifest_of(workdir)
    manifest_dir = workdir
    if manifest:
        manifest_dir = manifest.parent
    cluster = LocalCluster(Folders.under(workdir, manifest_dir), lambda _: None)
    # Suspended, for this process only: no stage starts.
    cluster.stopping = True
    asyncio.run(_settle(cluster))


async def _settle(cluster: LocalCluster) -> None:
    settings = local_settings()
    while True:
        pipeline = cluster.pipeline_file.read()
        if pipeline is None:
            return
        is_settled = is_up_to_date(pipeline) and not pipeline.status.running_attempts()
        if is_settled and pipeline.status.phase != "Running":
            return
        now = datetime.now(UTC)  # noqa: TID251  an edge
        await reconcile(pipeline.key, cluster, settings, now)
        # The runner of a process whose `finetune run` was killed stops it by itself.
        await asyncio.sleep(POLL_SECONDS)


def _resume(workdir: Path, start: Start) -> int:
    look = look_at(workdir)
    if _has_finished(look):
        return 0
    was_suspended = look.pipeline.spec.suspend
    if look.works and not was_suspended:
        print(f"{look.key}: is not suspended")
        return 0
    PipelineFile(workdir).change(
        lambda pipeline: _with_suspend(pipeline, suspend=False)
    )
    if not _is_read_by_a_process(workdir):
        return start(_background_words(workdir))
    print(f"{look.key}: continues")
    return 0


def _is_read_by_a_process(workdir: Path) -> bool:
    """Wait until a process has read the request, and return True; return False once no process works on the run."""
    while is_locked(workdir):
        pipeline = PipelineFile(workdir).read()
        # It may have read the request before, and be about to end.
        if pipeline and is_up_to_date(pipeline):
            return is_locked(workdir)
        time.sleep(POLL_SECONDS)
    return False


def _background_words(workdir: Path) -> list[str]:
    """Return the words after `finetune run` that continue this run; raises UsageError without a manifest."""
    manifest = manifest_of(workdir)
    if manifest is None:
        raise UsageError(
            f"{workdir} has no recorded manifest; continue it: finetune run FILE --workdir {workdir}"
        )
    words = [str(manifest), "--workdir", str(workdir), "--detach"]
    until = until_of(workdir)
    if until:
        words += ["--until", until]
    return words


def _delete(workdir: Path, arguments: argparse.Namespace) -> int:
    size = format_size(_size_of(workdir))
    stopped = "; it runs and is stopped first" if is_locked(workdir) else ""
    question = f"delete {workdir}: {size} of results, checkpoints and logs{stopped}?"
    if not agreed(question, yes=arguments.yes):
        return FAILED
    name = _name_of(workdir)
    # No process can work on a damaged file.
    with contextlib.suppress(ClusterError):
        PipelineFile(workdir).change(
            lambda pipeline: _with_suspend(pipeline, suspend=True)
        )
    while True:
        try:
            with locked(workdir):
                _await_runners(workdir)
                delete(workdir)
            break
        except WorkFolderInUse:
            time.sleep(POLL_SECONDS)
    print(f"{name}: deleted ({size})")
    return 0


def _await_runners(workdir: Path) -> None:
    """Wait until no process of a stage is left, also of a `finetune run` that was killed: it would write anew."""
    while any(is_locked(job) for job in (workdir / "jobs").glob("*")):
        time.sleep(POLL_SECONDS)


def _size_of(folder: Path) -> int:
    size = 0
    for path in folder.rglob("*"):
        # A run that works replaces files all the time.
        with contextlib.suppress(FileNotFoundError):
            size += path.lstat().st_size if path.is_file() else 0
    return size


VERBS: dict[str, Callable[[Path, argparse.Namespace], int]] = {
    "cancel": _cancel,
    "suspend": _suspend,
    "stop": _suspend,
    "delete": _delete,
}
