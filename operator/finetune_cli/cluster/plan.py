"""`finetune plan` on a cluster: a dry run of the manifest on the server, and then the operator's own judgement."""

import argparse
import asyncio
from datetime import UTC, datetime

from rich.console import Console

from finetune_cli.cluster.dry_run import dry_run
from finetune_cli.cluster.pods import list_pods
from finetune_cli.cluster.session import ClusterSession, connect
from finetune_cli.commands.plan import print_json, show
from finetune_cli.forecast import KeptWork, forecast
from finetune_operator.api.status import AttemptStatus, Outcome
from finetune_operator.core.assess import StageAssessment
from finetune_operator.core.observation import Observation
from finetune_operator.core.pipeline import Pipeline
from finetune_operator.kubernetes import paths
from finetune_operator.kubernetes.cluster import KubernetesCluster, parse_pipeline
from finetune_operator.kubernetes.pods.probe import NoProbe
from finetune_operator.kubernetes.pods.progress import NoProgress


def run(arguments: argparse.Namespace) -> int:
    """Print the forecast."""
    return asyncio.run(_run(arguments))


async def _run(arguments: argparse.Namespace) -> int:
    async with connect(arguments) as reach:
        live, after = await _before_and_after(reach)
        before = parse_pipeline(live) if live else None
        observed = await _observed(reach, before) if before else Observation()
    now = datetime.now(UTC)  # noqa: TID251  an edge
    stages = forecast(before, after, observed, now, _in_attempts)
    if arguments.json:
        print_json(stages, change=_change(before, after))
        return 0
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{reach.key}: {_change(before, after)}", style="dim", markup=False)
    show(stages, console)
    return 0


async def _before_and_after(reach: ClusterSession) -> tuple[dict[str, object] | None, Pipeline]:
    if reach.manifest is None:
        found = await reach.found()
        return found, parse_pipeline(found)
    live = await reach.api.get(paths.pipeline(reach.key))
    return live, parse_pipeline(await dry_run(reach, reach.manifest, live))


async def _observed(reach: ClusterSession, pipeline: Pipeline) -> Observation:
    return await KubernetesCluster(reach.api, await list_pods(reach), NoProgress(), NoProbe()).observe_children(
        pipeline
    )


def _change(before: Pipeline | None, after: Pipeline) -> str:
    if before is None:
        return "would be created"
    return "unchanged" if before.spec == after.spec else "would be changed"


def _in_attempts(_name: str, stage: StageAssessment) -> KeptWork | None:
    """Tell from the attempts what the workspace holds, for nobody but its pods can look into it."""
    if stage.spec and stage.spec.runs_server:
        return None  # its result was its server, and that is gone
    mine = [attempt for attempt in stage.status.attempts if attempt.identity == stage.status.identity]
    if done := next((attempt for attempt in mine if attempt.outcome is Outcome.SUCCEEDED), None):
        return KeptWork("reuse", f"attempt {done.number} made it: its result is in the workspace")
    worked = next((attempt for attempt in reversed(mine) if _has_work(attempt)), None)
    return KeptWork("resume", f"goes on from what attempt {worked.number} has kept") if worked else None


def _has_work(attempt: AttemptStatus) -> bool:
    """Whether it got anywhere; one that is still running saves when it is asked to stop."""
    running = attempt.outcome is Outcome.RUNNING and attempt.started_at is not None
    return running or bool(attempt.last_step)
