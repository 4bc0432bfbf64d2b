"""`finetune wait`."""

import argparse
import asyncio

from finetune_cli.arguments import parse_timeout
from finetune_cli.cluster.session import POLL_SECONDS, ClusterSession, connect, refresh
from finetune_cli.exit_codes import (
    FAILED,
    exit_code,
    has_finished,
    is_up_to_date,
    ready_message,
)
from finetune_operator.api.conditions import FINISHED, READY, STALLED
from finetune_operator.core.pipeline import Pipeline
from finetune_operator.errors import ClusterError


def run(arguments: argparse.Namespace) -> int:
    """Wait and return the exit code, which is FAILED on a timeout."""
    return asyncio.run(_run(arguments, parse_timeout(arguments.timeout)))


async def _run(arguments: argparse.Namespace, timeout_seconds: float | None) -> int:
    async with connect(arguments) as session:
        pipeline = await session.get_pipeline()
        try:
            async with asyncio.timeout(timeout_seconds):
                code = exit_code_of_wait(pipeline, arguments.condition)
                while code is None:
                    await asyncio.sleep(POLL_SECONDS)
                    pipeline = await refresh(session)
                    code = exit_code_of_wait(pipeline, arguments.condition)
        except TimeoutError:
            raise ClusterError(
                f"{_summary(session, pipeline)} (not {arguments.condition} after {arguments.timeout})"
            ) from None
        print(_summary(session, pipeline))
        return code


def exit_code_of_wait(pipeline: Pipeline, condition: str) -> int | None:
    """Return the exit code, or None while the pipeline may still reach the condition."""
    if has_finished(pipeline):
        return exit_code(pipeline.status)
    conditions = pipeline.status.conditions
    true_conditions = {item.type for item in conditions if item.status == "True"}
    if condition == READY and READY in true_conditions and is_up_to_date(pipeline):
        return 0
    # A finished pipeline with a pending retry may be stalled as well, but it will go on.
    if _is_stalled(pipeline) and FINISHED not in true_conditions:
        return FAILED
    return None


def _is_stalled(pipeline: Pipeline) -> bool:
    """Return whether the pipeline does not go on by itself, or the operator cannot read its spec."""
    for condition in pipeline.status.conditions:
        # A condition of an older generation says nothing about the spec of now.
        if (
            condition.type == STALLED
            and condition.observed_generation == pipeline.generation
        ):
            return True
    return False


def _summary(session: ClusterSession, pipeline: Pipeline) -> str:
    message = ready_message(pipeline.status) or "not yet reconciled by the operator"
    return f"{session.key}: {pipeline.status.phase}: {message}"
