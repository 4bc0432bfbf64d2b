"""The reconcile loop, and the file to read first: observe → assess → plan → report → apply.

`reconcile` is level-triggered. It compares what the user wants with what it observes, and never relies on having
seen an event. It keeps nothing in memory between two calls, so the process may be killed between any two lines.
The next call continues from the pipeline's status and from what it observes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from finetune_operator.api.status import PipelineStatus
from finetune_operator.cluster import Cluster
from finetune_operator.core.assess import assess
from finetune_operator.core.events import events_between
from finetune_operator.core.observation import Observation
from finetune_operator.core.pipeline import Key, Pipeline
from finetune_operator.core.planning.plan import Plan, plan_next
from finetune_operator.core.report import report, with_refusals
from finetune_operator.core.settings import Settings
from finetune_operator.core.write_delay import time_until_write


@dataclass(frozen=True)
class ReconcileResult:
    """When to reconcile the pipeline again, if no change triggers it earlier."""

    requeue_after: timedelta | None
    """None: only when something changes."""
    gone: bool = False
    """The pipeline no longer exists."""
    refusals: tuple[str, ...] = ()
    """Why the API server refused requests, which are to be repeated with backoff."""


async def reconcile(
    key: Key, cluster: Cluster, settings: Settings, now: datetime
) -> ReconcileResult:
    """Move one pipeline towards its spec.

    Raises ClusterError if the cluster fails. Calling again is always safe and repeats what was left undone.
    """
    pipeline = await cluster.read(key)
    if pipeline is None:
        return ReconcileResult(requeue_after=None, gone=True)
    before = pipeline.status
    # All reading: facts about Jobs, servers and the claim.
    observation = await cluster.observe(pipeline)
    # Pure: the actions to take, and the status to write.
    plan, status = _decide(pipeline, observation, settings, now)
    wait = time_until_write(before, status, settings.write_delay, now)
    # The status comes before the actions. An attempt's number must be durable before its Job exists: otherwise an
    # operator that is killed in between would not know that the Job is its own.
    if wait == timedelta():
        pipeline = await cluster.write_status(pipeline, status)
    try:
        # All acting: idempotent under deterministic names.
        refused = await cluster.apply(pipeline, plan.actions)
    finally:
        # Events come after the status that they describe, and also after a failed action: the next call compares with
        # the status written above and would not find them again.
        if not wait:
            events = events_between(before, status, settings.troubleshooting_url)
            await cluster.emit_events(pipeline, events)
    # A refusal is remembered in the status only: it is not an observed fact before the request is sent.
    with_new_refusals = with_refusals(pipeline.status, refused)
    if with_new_refusals != pipeline.status:
        changed = replace(pipeline, status=with_new_refusals)
        _, status = _decide(changed, observation, settings, now)
        pipeline = await cluster.write_status(pipeline, status)
    times = []
    # Zero: the status was written above, so there is nothing to come back for.
    if wait:
        times.append(wait)
    if plan.requeue_after is not None:
        times.append(plan.requeue_after)
    # Only a time to live begins with the end; everything else was decided above.
    has_ttl = pipeline.spec.ttl_seconds_after_finished is not None
    if has_ttl and pipeline.status.finished_at and pipeline.status != before:
        times += _times_after_end(pipeline, observation, settings, now)
    refusals = tuple(blocker.message for blocker in refused.values())
    return ReconcileResult(min(times, default=None), refusals=refusals)


def _decide(
    pipeline: Pipeline, observation: Observation, settings: Settings, now: datetime
) -> tuple[Plan, PipelineStatus]:
    settings = settings.below(observation.defaults)
    # The state of every stage and attempt.
    assessment = assess(pipeline, observation, now)
    plan = plan_next(pipeline, assessment, settings, now)
    return plan, report(pipeline, assessment, plan, now, settings.troubleshooting_url)


def _times_after_end(
    pipeline: Pipeline, observation: Observation, settings: Settings, now: datetime
) -> Iterator[timedelta]:
    """Yield when a pipeline that has just finished expires: what was just written decides it."""
    plan, _ = _decide(pipeline, observation, settings, now)
    if plan.actions:
        yield timedelta()
    elif plan.requeue_after is not None:
        yield plan.requeue_after
