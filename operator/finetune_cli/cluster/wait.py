"""`finetune wait`."""

import argparse
import asyncio

from finetune_cli.arguments import parse_timeout
from finetune_cli.cluster.session import POLL_SECONDS, connect, refresh
from finetune_cli.outcome import exit_code_of_wait, ready_message
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
                f"{summary(pipeline)} (not {arguments.condition} after {arguments.timeout})"
            ) from None
        print(summary(pipeline))
        return code


def summary(pipeline: Pipeline) -> str:
    """Return the state of a pipeline in a line."""
    message = ready_message(pipeline.status) or "not yet reconciled by the operator"
    return f"{pipeline.key}: {pipeline.status.phase}: {message}"
