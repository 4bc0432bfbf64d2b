"""The reconcile loop, and the file to read first: observe → assess → plan → report → apply.

`reconcile` is level-triggered. It compares what the user wants with what it observes, and never relies on having
seen an event. It keeps nothing in memory between two calls, so the process may be killed between any two lines.
The next call continues from the pipeline's status and from what it observes.
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
    """When to reconcile the pipeline again, if no change triggers it earlier."""

    requeue_after: timedelta | None
    """None: only when something changes."""
    gone: bool = False
    """The pipeline no longer exists."""


async def reconcile(key: Key, cluster: Cluster, settings: Settings, now: datetime) -> ReconcileResult:
    """Move one pipeline towards its spec.

    Raises ClusterError if the cluster fails. Calling again is always safe and repeats what was left undone.
    """
    pipeline = await cluster.read(key)
    if pipeline is None:
        return ReconcileResult(requeue_after=None, gone=True)
    observation = await cluster.observe(pipeline)  # facts about Jobs and servers, no decisions
    assessment = assess(pipeline, observation, now)  # pure: the state of every stage and attempt
    plan = plan_next(pipeline, assessment, settings, now)  # pure: the actions to take
    status = report(pipeline, assessment, plan, now)  # pure: the status to write
    # The status comes before the actions. An attempt's number must be durable before its Job exists: otherwise an
    # operator that is killed in between would not know that the Job is its own.
    await cluster.write_status(pipeline, status)
    try:
        await cluster.apply(pipeline, plan.actions)  # each action is idempotent; Job names are deterministic
    finally:
        # Events come after the status that they describe, and also after a failed action: the next call compares with
        # the status written above and would not find them again.
        await cluster.emit_events(pipeline, events_between(pipeline.status, status))
    return ReconcileResult(plan.requeue_after)
