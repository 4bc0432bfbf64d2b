"""`finetune retry`, `cancel`, `suspend`, `resume` and `delete` on a cluster: requests that the operator acts on."""

import argparse
import asyncio
from collections.abc import Callable
from datetime import UTC, datetime

from finetune_cli.cluster.session import ClusterSession, Object, connect
from finetune_cli.diagnostics import UsageError
from finetune_cli.exit_codes import DONE, FAILED
from finetune_cli.output.question import agreed
from finetune_operator.api.group import CANCEL_ANNOTATION, RETRY_ANNOTATION
from finetune_operator.kubernetes import paths

DELETE = "delete"
Patch = tuple[Object | None, str]
"""The merge patch, None if it would change nothing, and the message to print."""


def run(arguments: argparse.Namespace) -> int:
    """Send the request and print it, without waiting for its effect."""
    if getattr(arguments, "json", False):
        raise UsageError(
            f"{arguments.command} --json works on this machine only; for a cluster, use `finetune get NAME --json`"
        )
    return asyncio.run(_run(arguments))


async def _run(arguments: argparse.Namespace) -> int:
    async with connect(arguments) as session:
        pipeline = await session.get_object()
        if arguments.command == DELETE:
            return await _delete(session, pipeline, yes=arguments.yes)
        patch, message = VERBS[arguments.command](pipeline)
        if patch:
            await session.api.patch(paths.pipeline(session.key), patch)
        print(f"{session.key}: {message}")
    return 0


async def _delete(session: ClusterSession, pipeline: Object, *, yes: bool) -> int:
    claim = "its claim goes only with workspace.whenDeleted: Delete"
    question = f"delete {session.key} with its Jobs and its server ({claim})?"
    if not agreed(question, yes=yes):
        return FAILED
    # Of this object only: another of its name may have been created since.
    uid = pipeline["metadata"]["uid"]
    await session.api.delete(paths.pipeline(session.key), uid=uid)
    print(f"{session.key}: is being deleted")
    return 0


def _retry(pipeline: Object) -> Patch:
    phase = _phase(pipeline)
    if phase in DONE:
        return (
            None,
            f"has finished ({phase}) without a failure: there is nothing to start again",
        )
    effect = "continues"
    if phase in {"Failed", "Cancelled"}:
        effect = f"starts again at {pipeline['status'].get('stage')}"
    return _annotation_patch(RETRY_ANNOTATION), f"{effect}, with fresh budgets"


def _cancel(pipeline: Object) -> Patch:
    status = pipeline.get("status") or {}
    if status.get("finishedAt"):
        return None, f"has already finished ({_phase(pipeline)})"
    message = "is being cancelled; `finetune retry` starts it again"
    return _annotation_patch(CANCEL_ANNOTATION), message


def _suspend(pipeline: Object) -> Patch:
    if pipeline["spec"].get("suspend"):
        return None, "is already suspended"
    return {
        "spec": {"suspend": True}
    }, "is being suspended; `finetune resume` continues it"


def _resume(pipeline: Object) -> Patch:
    if not pipeline["spec"].get("suspend"):
        return None, "is not suspended"
    return {"spec": {"suspend": False}}, "continues"


VERBS: dict[str, Callable[[Object], Patch]] = {
    "retry": _retry,
    "cancel": _cancel,
    "suspend": _suspend,
    "stop": _suspend,
    "resume": _resume,
}


def _phase(pipeline: Object) -> str:
    # Before the first reconcile, a pipeline has no status.
    status = pipeline.get("status") or {}
    return str(status.get("phase") or "Pending")


def _annotation_patch(annotation: str) -> Object:
    # A time, so that a second request differs from the first and is not lost.
    now = datetime.now(UTC)  # noqa: TID251  an edge
    return {"metadata": {"annotations": {annotation: now.isoformat()}}}
