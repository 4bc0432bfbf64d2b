"""`finetune plan` on a cluster: a server-side dry run of the manifest, then the operator's own assessment of it."""

import argparse
import asyncio
from datetime import UTC, datetime

from rich.console import Console

from finetune_cli.cluster.dry_run import dry_run
from finetune_cli.cluster.pods import read_cache
from finetune_cli.cluster.session import ClusterSession, connect
from finetune_cli.counts import count_lines
from finetune_cli.display import print_forecast, print_forecast_json
from finetune_cli.forecast import KeptWork, forecast
from finetune_cli.placement import placement_lines, read_placement
from finetune_operator.api.status import AttemptStatus, Outcome
from finetune_operator.core.assess import StageAssessment
from finetune_operator.core.observation import Observation
from finetune_operator.core.pipeline import Pipeline
from finetune_operator.kubernetes import paths
from finetune_operator.kubernetes.cluster import KubernetesCluster
from finetune_operator.kubernetes.pipeline_object import parse_pipeline
from finetune_operator.kubernetes.pods.probe import NoProbe
from finetune_operator.kubernetes.pods.progress import NoProgress
from finetune_trainer.contract import PrepareResult


def run(arguments: argparse.Namespace) -> int:
    """Print the forecast."""
    return asyncio.run(_run(arguments))


async def _run(arguments: argparse.Namespace) -> int:
    async with connect(arguments) as session:
        live, after = await _before_and_after(session)
        before = parse_pipeline(live) if live else None
        observed = await _observe(session, live, before) if live and before else Observation()
    now = datetime.now(UTC)  # noqa: TID251  an edge
    planned = forecast(before, after, observed, now, _find_in_attempts)
    defaults = read_placement(arguments.placement) if arguments.placement else None
    places = list(placement_lines(planned, after.spec, defaults, now))
    result = planned.assessment.stages["prepare"].status.result
    counts = count_lines(after.spec, result if isinstance(result, PrepareResult) else None, None)
    if arguments.json:
        print_forecast_json(
            planned.stages,
            notes=planned.notes,
            counts=counts,
            placement=places,
            change=_change(before, after),
        )
        return 0
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{session.key}: {_change(before, after)}", style="dim", markup=False)
    print_forecast(planned.stages, console)
    for line in (*planned.notes, *places, *counts):
        console.print(line, style="dim", markup=False)
    return 0


async def _before_and_after(session: ClusterSession) -> tuple[dict[str, object] | None, Pipeline]:
    if session.manifest is None:
        live = await session.get_object()
        return live, parse_pipeline(live)
    current = await session.api.get(paths.pipeline(session.key))
    return current, parse_pipeline(await dry_run(session, session.manifest, current))


async def _observe(
    session: ClusterSession, live: dict[str, object], pipeline: Pipeline
) -> Observation:
    cluster = KubernetesCluster(
        session.api, await read_cache(session, live, pipeline), NoProgress(), NoProbe()
    )
    return await cluster.observe_children(pipeline)


def _change(before: Pipeline | None, after: Pipeline) -> str:
    if before is None:
        return "would be created"
    return "unchanged" if before.spec == after.spec else "would be changed"


def _find_in_attempts(_name: str, stage: StageAssessment) -> KeptWork | None:
    """Return the kept work as the attempts' status shows it; only pods can read the workspace itself."""
    if stage.spec and stage.spec.runs_server:
        return None  # its result was its server, which no longer runs
    same_identity = [
        attempt for attempt in stage.status.attempts if attempt.identity == stage.status.identity
    ]
    if done := next(
        (attempt for attempt in same_identity if attempt.outcome is Outcome.SUCCEEDED), None
    ):
        return KeptWork("reuse", f"the result of attempt {done.number} is in the workspace")
    latest = next((attempt for attempt in reversed(same_identity) if _has_work(attempt)), None)
    return (
        KeptWork("resume", f"resumes from the work of attempt {latest.number}") if latest else None
    )


def _has_work(attempt: AttemptStatus) -> bool:
    """Whether the attempt has saved work; a running attempt counts, because it saves when it is stopped."""
    running = attempt.outcome is Outcome.RUNNING and attempt.started_at is not None
    return running or bool(attempt.last_step)
