"""`finetune retry`, `cancel`, `suspend` and `resume` on a cluster: a word in the object, which the operator obeys."""

import argparse
import asyncio
from collections.abc import Callable
from datetime import UTC, datetime

from finetune_cli.cluster.session import Object, connect
from finetune_cli.diagnostics import UsageError
from finetune_cli.pipeline_status import DONE
from finetune_operator.api.group import CANCEL_ANNOTATION, RETRY_ANNOTATION
from finetune_operator.kubernetes import paths

Patch = tuple[Object | None, str]
"""What is patched into the object, None where that would change nothing, and what to say."""


def run(arguments: argparse.Namespace) -> int:
    """Ask, and say what was asked; nothing is waited for."""
    if getattr(arguments, "json", False):
        raise UsageError(f"{arguments.command} --json is for a run on this machine; see `finetune get --json`")
    return asyncio.run(_run(arguments))


async def _run(arguments: argparse.Namespace) -> int:
    async with connect(arguments) as reach:
        patch, words = VERBS[arguments.command](await reach.found())
        if patch:
            await reach.api.patch(paths.pipeline(reach.key), patch)
        print(f"{reach.key}: {words}")
    return 0


def _retry(found: Object) -> Patch:
    phase = _phase(found)
    if phase in DONE:
        return None, f"has finished ({phase}), and nothing in it failed: there is nothing to start again"
    again = f"starts again at {found['status'].get('stage')}" if phase in {"Failed", "Cancelled"} else "goes on"
    return _annotated(RETRY_ANNOTATION), f"{again}, with fresh budgets"


def _cancel(found: Object) -> Patch:
    if (found.get("status") or {}).get("finishedAt"):
        return None, f"has finished already ({_phase(found)})"
    return _annotated(CANCEL_ANNOTATION), "is being cancelled; `finetune retry` starts it again"


def _suspend(found: Object) -> Patch:
    if found["spec"].get("suspend"):
        return None, "is suspended already"
    return {"spec": {"suspend": True}}, "is being suspended; `finetune resume` lets it go on"


def _resume(found: Object) -> Patch:
    if not found["spec"].get("suspend"):
        return None, "is not suspended"
    return {"spec": {"suspend": False}}, "goes on"


VERBS: dict[str, Callable[[Object], Patch]] = {
    "retry": _retry,
    "cancel": _cancel,
    "suspend": _suspend,
    "resume": _resume,
}


def _phase(found: Object) -> str:
    return str((found.get("status") or {}).get("phase") or "Pending")


def _annotated(annotation: str) -> Object:
    now = datetime.now(UTC)  # noqa: TID251  an edge
    return {"metadata": {"annotations": {annotation: now.isoformat()}}}
