"""`finetune plan` on a cluster: a server-side dry run of the manifest, then the operator's own assessment of it."""

import argparse
import asyncio
from datetime import UTC, datetime

from finetune_cli.cluster.apply import DRY_RUN, apply
from finetune_cli.cluster.pods import read_cache
from finetune_cli.cluster.session import ClusterSession, Object, connect
from finetune_cli.forecast.counts import count_lines
from finetune_cli.forecast.forecast import KeptWork, PipelineForecast, forecast
from finetune_cli.forecast.learning_rate import learning_rate_line
from finetune_cli.forecast.memory import memory_lines
from finetune_cli.forecast.placement import placement_lines, read_placement
from finetune_cli.forecast.training_time import time_line
from finetune_cli.output.forecast_lines import PlanReport, print_plan
from finetune_operator.api.placement import PlacementDefaults
from finetune_operator.api.status import AttemptStatus, Outcome
from finetune_operator.core.assessment import StageAssessment
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
    defaults = None
    if arguments.placement:
        defaults = read_placement(arguments.placement)
    async with connect(arguments) as session:
        report = await plan(session, defaults)
    if not arguments.json:
        print(f"{session.key}: {report.change}")
    print_plan(report, as_json=arguments.json)
    return 0


async def plan(
    session: ClusterSession, defaults: PlacementDefaults | None = None
) -> PlanReport:
    """Return what applying the session's manifest would do, or without a manifest what remains to be done."""
    live, after = await _before_and_after(session)
    before = None
    observed = Observation()
    if live:
        before = parse_pipeline(live)
        observed = await _observe(session, live, before)
    now = datetime.now(UTC)  # noqa: TID251  an edge
    planned = forecast(before, after, observed, now, _find_in_attempts)
    prepared = _prepared(planned)
    warning = learning_rate_line(after.spec)
    return PlanReport(
        planned.stages,
        notes=[*planned.notes, *filter(None, [warning])],
        placement=list(placement_lines(planned, after.spec, defaults, now)),
        counts=count_lines(after.spec, prepared, None),
        estimates=_estimates(before, after, prepared),
        change=_change(before, after),
    )


def _estimates(
    before: Pipeline | None, after: Pipeline, prepared: PrepareResult | None
) -> list[str]:
    """Return what is known of memory and time; the model's files cannot be read from here."""
    lines = list(memory_lines(after.spec, None, None))
    time = time_line(after.spec, before, prepared.train_rows if prepared else None)
    return [*lines, time] if time else lines


def _prepared(planned: PipelineForecast) -> PrepareResult | None:
    result = planned.assessment.stages["prepare"].status.result
    if isinstance(result, PrepareResult):
        return result
    return None


async def _before_and_after(session: ClusterSession) -> tuple[Object | None, Pipeline]:
    """Return the live object, None if there is none, and the pipeline after applying the manifest."""
    if session.manifest is None:
        # Without a manifest, nothing changes: the forecast shows what remains to be done.
        live = await session.get_object()
        return live, parse_pipeline(live)
    current = await session.api.get(paths.pipeline(session.key))
    applied = await apply(session, session.manifest, current, **DRY_RUN)
    return current, parse_pipeline(applied)


async def _observe(
    session: ClusterSession, live: Object, pipeline: Pipeline
) -> Observation:
    cache = await read_cache(session, live, pipeline)
    # A forecast needs no progress, and probing a server would need a place inside the cluster.
    cluster = KubernetesCluster(session.api, cache, NoProgress(), NoProbe())
    return await cluster.observe_children(pipeline)


def _change(before: Pipeline | None, after: Pipeline) -> str:
    if before is None:
        return "would be created"
    if before.spec == after.spec:
        return "unchanged"
    return "would be changed"


def _find_in_attempts(_name: str, stage: StageAssessment) -> KeptWork | None:
    """Return the kept work as the attempts' status shows it; only pods can read the workspace itself."""
    # The result of such a stage was its server, which no longer runs.
    if stage.spec and stage.spec.runs_server:
        return None
    status = stage.status
    same_work = [
        attempt for attempt in status.attempts if attempt.identity == status.identity
    ]
    for attempt in same_work:
        if attempt.outcome is Outcome.SUCCEEDED:
            reason = f"the result of attempt {attempt.number} is in the workspace"
            return KeptWork("reuse", reason)
    for attempt in reversed(same_work):
        if _has_work(attempt):
            return KeptWork(
                "resume", f"resumes from the work of attempt {attempt.number}"
            )
    return None


def _has_work(attempt: AttemptStatus) -> bool:
    """Return whether the attempt has saved work; a running attempt counts, because it saves when it is stopped."""
    running = attempt.outcome is Outcome.RUNNING and attempt.started_at is not None
    return running or bool(attempt.last_step)
