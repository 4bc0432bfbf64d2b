"""The page to read first: observe → assess → plan → report → apply.

Everything the operator does to a pipeline is this function, called again and again. It keeps nothing in
memory between two calls, so it may be killed between any two lines.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta

from finetune_operator.cluster import Cluster
from finetune_operator.core.assess import assess
from finetune_operator.core.events import events_between
from finetune_operator.core.pipeline import Key
from finetune_operator.core.plan import plan_next
from finetune_operator.core.report import report
from finetune_operator.core.settings import Settings


@dataclass(frozen=True)
class ReconcileResult:
    """When to call `reconcile` again, unless something happens before."""

    requeue_after: timedelta | None
    """None: only when something changes."""
    gone: bool = False
    """The pipeline does not exist any more."""


async def reconcile(key: Key, cluster: Cluster, settings: Settings, now: datetime) -> ReconcileResult:
    """Bring one pipeline a step on; raises what the cluster raises, and then nothing is lost."""
    pipeline = await cluster.read(key)
    if pipeline is None:
        return ReconcileResult(requeue_after=None, gone=True)
    observation = await cluster.observe(pipeline)  # facts, no judgement
    assessment = assess(pipeline, observation, now)  # pure: what every attempt and stage is
    plan = plan_next(pipeline, assessment, settings, now)  # pure: what to do about it
    status = report(pipeline, assessment, plan, now)  # pure: what to write about it
    await cluster.write_status(pipeline, status)  # an attempt's number is durable before its Job exists
    try:
        await cluster.apply(pipeline, plan.actions)  # each idempotent under a deterministic name
    finally:
        # Also after an error: the status is written, so these events would never be found again.
        await cluster.emit_events(pipeline, events_between(pipeline.status, status))
    return ReconcileResult(plan.requeue_after)
