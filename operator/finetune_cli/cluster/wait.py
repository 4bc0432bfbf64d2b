"""`finetune wait`."""

import argparse
import asyncio
import re

from finetune_cli.cluster.session import POLL_SECONDS, ClusterSession, connect, refresh
from finetune_cli.diagnostics import UsageError
from finetune_cli.exit_codes import FAILED
from finetune_cli.pipeline_status import exit_code, has_finished, is_up_to_date, ready_message
from finetune_operator.api.conditions import FINISHED, READY, STALLED
from finetune_operator.core.pipeline import Pipeline
from finetune_operator.errors import ClusterError

UNITS = {"h": 3600, "m": 60, "s": 1}


def run(arguments: argparse.Namespace) -> int:
    """Wait, and say in a number how it ended; 1 where time was up before."""
    return asyncio.run(_run(arguments, _seconds(arguments.timeout)))


async def _run(arguments: argparse.Namespace, seconds: float | None) -> int:
    async with connect(arguments) as reach:
        pipeline = await reach.pipeline()
        try:
            async with asyncio.timeout(seconds):
                while (code := _verdict(pipeline, arguments.condition)) is None:
                    await asyncio.sleep(POLL_SECONDS)
                    pipeline = await refresh(reach)
        except TimeoutError:
            raise ClusterError(
                f"{_matches(reach, pipeline)} (not {arguments.condition} after {arguments.timeout})"
            ) from None
        print(_matches(reach, pipeline))
        return code


def _verdict(pipeline: Pipeline, condition: str) -> int | None:
    """Give the exit code, or None while there is something to wait for."""
    true = {one.type for one in pipeline.status.conditions if one.status == "True"}
    if has_finished(pipeline):
        return exit_code(pipeline.status)
    if condition == READY and READY in true and is_up_to_date(pipeline):
        return 0
    return FAILED if _is_refused(pipeline) and FINISHED not in true else None


def _is_refused(pipeline: Pipeline) -> bool:
    """Whether the operator cannot use the object as it is now; of that only the conditions tell, not the status."""
    told = pipeline.status.conditions
    return any(one.type == STALLED and one.observed_generation == pipeline.generation for one in told)


def _matches(reach: ClusterSession, pipeline: Pipeline) -> str:
    said = ready_message(pipeline.status) or "the operator has not looked at it yet"
    return f"{reach.key}: {pipeline.status.phase}: {said}"


def _seconds(text: str | None) -> float | None:
    """Read 90s, 30m or 1h30m; raises Refused."""
    if text is None:
        return None
    found = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text)
    if not text or not found:
        raise UsageError(f"--timeout {text!r}: write it as 90s, 30m or 1h30m")
    return sum(int(number) * unit for number, unit in zip(found.groups("0"), UNITS.values(), strict=True))
