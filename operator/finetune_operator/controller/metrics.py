"""The operator's own Prometheus metrics. Every label has a closed set of values, so that no user can add series."""

from collections import Counter as CountOf
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from finetune_operator.api.conditions import Reason
from finetune_operator.api.costs import Costs
from finetune_operator.api.placement import CAPACITIES
from finetune_operator.api.spec import STAGES
from finetune_operator.api.status import (
    Outcome,
    PipelineStatus,
    StageState,
    StageStatus,
)
from finetune_operator.core.attempts.endings import FAILURES, INTERRUPTIONS

REGISTRY = CollectorRegistry()
RECONCILED = Counter(
    "finetune_reconcile",
    "Reconciles of pipelines, by outcome: done, conflict, error, refused, invalid or bug",
    ["outcome"],
    registry=REGISTRY,
)
RECONCILE_SECONDS = Histogram(
    "finetune_reconcile_seconds",
    "Duration of one reconcile of one pipeline, in seconds, by outcome",
    ["outcome"],
    buckets=(
        0.005,
        0.01,
        0.025,
        0.05,
        0.1,
        0.25,
        0.5,
        1.0,
        2.5,
        5.0,
        10.0,
        30.0,
        60.0,
        120.0,
    ),
    registry=REGISTRY,
)
"""The last bucket ends at the worker's time limit for one reconcile."""
REQUESTS = Counter(
    "finetune_api_requests",
    "Requests to the API server, by HTTP verb and status code (0: no response)",
    ["verb", "code"],
    registry=REGISTRY,
)
WATCHES_RESTARTED = Counter(
    "finetune_watches_restarted",
    "Restarts of the watches after they ended or failed, by kind",
    ["kind"],
    registry=REGISTRY,
)
CACHED_OBJECTS = Gauge(
    "finetune_cache_objects",
    "Objects in the cache of this replica, by kind",
    ["kind"],
    registry=REGISTRY,
)
QUEUE_DEPTH = Gauge(
    "finetune_queue_depth",
    "Pipelines in the work queue that wait for a free worker",
    registry=REGISTRY,
)
QUEUE_OLDEST_SECONDS = Gauge(
    "finetune_queue_oldest_seconds",
    "How long the first pipeline in the work queue has waited for a worker, in seconds",
    registry=REGISTRY,
)
IS_LEADER = Gauge(
    "finetune_leader", "1 if this replica is the leader, else 0", registry=REGISTRY
)
IS_READY = Gauge(
    "finetune_ready",
    "1 if this replica answers /readyz with 200, else 0",
    registry=REGISTRY,
)
PIPELINES = Gauge(
    "finetune_pipelines",
    "Pipelines in the cache of this replica, by phase",
    ["phase"],
    registry=REGISTRY,
)
UNREADABLE_PIPELINES = Gauge(
    "finetune_unreadable_pipelines",
    "Pipelines in the cache of this replica that this version of the operator cannot read",
    registry=REGISTRY,
)
WAITING_STAGES = Gauge(
    "finetune_waiting_stages",
    "Stages whose turn it is and whose process has not started, or whose node does not answer (reason NodeLost), "
    "in the cache of this replica, by stage and reason",
    ["stage", "reason"],
    registry=REGISTRY,
)
WAITING_OLDEST_SECONDS = Gauge(
    "finetune_waiting_oldest_seconds",
    "How long the first of those stages has waited for its process to start, in seconds, by stage and reason",
    ["stage", "reason"],
    registry=REGISTRY,
)
SERVERS_DOWN = Gauge(
    "finetune_servers_down",
    "Pipelines in the cache of this replica whose Service leads to no ready pod, whatever their phase",
    registry=REGISTRY,
)
OLDEST_PRICE = Gauge(
    "finetune_oldest_price_timestamp_seconds",
    "Date of the oldest price of a node class, as Unix time in seconds; -1 if no price has a date",
    registry=REGISTRY,
)
FINISHED = Counter(
    "finetune_pipelines_finished",
    "Pipelines that have finished while this replica was the leader, by phase",
    ["phase"],
    registry=REGISTRY,
)
ATTEMPTS = Counter(
    "finetune_attempts",
    "Attempts that have ended while this replica was the leader, by stage, outcome and reason",
    ["stage", "outcome", "reason"],
    registry=REGISTRY,
)
ATTEMPT_SECONDS = Counter(
    "finetune_attempt_seconds",
    "Running time of attempts that have ended while this replica was the leader, in seconds, by stage and capacity",
    ["stage", "capacity"],
    registry=REGISTRY,
)
SPENT = Counter(
    "finetune_spent",
    "Cost of those attempts in the configured currency, by stage and capacity",
    ["stage", "capacity"],
    registry=REGISTRY,
)
LOST_TO_INTERRUPTIONS = Counter(
    "finetune_lost_to_interruptions",
    "Part of that cost that interruptions have wasted, by stage",
    ["stage"],
    registry=REGISTRY,
)
LOST_STEPS = Counter(
    "finetune_lost_steps",
    "Steps that were repeated after interruptions, by stage",
    ["stage"],
    registry=REGISTRY,
)

OUTCOMES = ("done", "conflict", "error", "refused", "invalid", "bug")
"""Outcomes of a reconcile. Of these, `error` and `bug` are failures that the operator retries."""
FINAL_PHASES = ("Succeeded", "BelowThreshold", "Failed", "Cancelled", "Degraded")
"""Phases in which a pipeline has finished."""


def _create_series() -> None:
    """Create the series that alerts and dashboards compare with their past.

    `increase` does not see the step from no series to its first value.
    """
    for outcome in OUTCOMES:
        RECONCILED.labels(outcome)
    for phase in FINAL_PHASES:
        FINISHED.labels(phase)
    for kind in STAGES:
        ATTEMPTS.labels(kind.name, Outcome.SUCCEEDED, Reason.STAGE_SUCCEEDED)
        for reason in sorted(INTERRUPTIONS):
            ATTEMPTS.labels(kind.name, Outcome.INTERRUPTED, reason)
        for reason in sorted(FAILURES):
            ATTEMPTS.labels(kind.name, Outcome.FAILED, reason)
        # Without a capacity: nodes that belong to no class.
        for capacity in ("", *CAPACITIES):
            ATTEMPT_SECONDS.labels(kind.name, capacity)
            SPENT.labels(kind.name, capacity)
        LOST_TO_INTERRUPTIONS.labels(kind.name)
        LOST_STEPS.labels(kind.name)


_create_series()


@dataclass(frozen=True)
class AttemptLabels:
    """The labels of `finetune_attempts_total`."""

    stage: str
    outcome: Outcome
    reason: Reason


def count_changes(
    before: PipelineStatus, after: PipelineStatus
) -> Mapping[AttemptLabels, int]:
    """Return how many attempts have ended between two statuses of one pipeline."""
    ended_before = _ended_attempts(before)
    new = (
        labels
        for number, labels in _ended_attempts(after).items()
        if number not in ended_before
    )
    return CountOf(new)


def record_changes(before: PipelineStatus, after: PipelineStatus) -> None:
    """Count the ends between two statuses of one pipeline; call it once the later status is written.

    An edited gate that closes after the end counts, too. A server that goes down and comes back does not.
    """
    # A failed pipeline may have a gate that was not measured, which does not pass and is not closed either.
    was_closed = before.gates_passed is False and before.phase in {
        "BelowThreshold",
        "Degraded",
    }
    has_closed = after.phase == "BelowThreshold" and not was_closed
    if (
        after.finished_at
        and (has_closed or not before.finished_at)
        and after.phase in FINAL_PHASES
    ):
        FINISHED.labels(after.phase).inc()
    for labels, count in count_changes(before, after).items():
        ATTEMPTS.labels(labels.stage, labels.outcome, labels.reason).inc(count)
    for kind in STAGES:
        stage = after.stages.get(kind.name)
        if stage:
            _record_costs(kind.name, before.stages.get(kind.name, StageStatus()), stage)


def _record_costs(name: str, before: StageStatus, after: StageStatus) -> None:
    ended = {attempt.number for attempt in before.attempts if attempt.finished_at}
    for attempt in after.attempts:
        if attempt.finished_at and attempt.number not in ended:
            # A status may have any text here, and each new label would be a new series.
            capacity = attempt.capacity if attempt.capacity in CAPACITIES else ""
            ATTEMPT_SECONDS.labels(name, capacity).inc(attempt.seconds or 0.0)
            SPENT.labels(name, capacity).inc(float(attempt.cost or 0))
    # Never negative: a counter cannot go down.
    loss = max(0.0, float(_settled_loss(after) - _settled_loss(before)))
    LOST_TO_INTERRUPTIONS.labels(name).inc(loss)
    LOST_STEPS.labels(name).inc(max(0, after.lost_steps - before.lost_steps))


def _settled_loss(stage: StageStatus) -> Decimal:
    """Return the cost of interruptions, without an interruption if the next attempt has not reported its first step.

    A retry request or an edit does not take back what was counted.
    """
    earlier = (stage.earlier_costs or Costs()).lost
    unsettled = stage.finished_at is None and stage.state is not StageState.FAILED
    loss = earlier
    for attempt in stage.attempts:
        is_reported = attempt.lost_steps is not None or attempt.last_step is None
        if not unsettled or is_reported or not stage.counts(attempt):
            loss += attempt.lost_cost or Decimal()
    return loss


def _ended_attempts(status: PipelineStatus) -> dict[tuple[str, int], AttemptLabels]:
    """Return stage and number of each ended attempt, with its labels; the status of an unknown stage is ignored."""
    ended: dict[tuple[str, int], AttemptLabels] = {}
    for kind in STAGES:
        stage = status.stages.get(kind.name, StageStatus())
        for attempt in stage.attempts:
            if attempt.outcome is not Outcome.RUNNING:
                labels = AttemptLabels(kind.name, attempt.outcome, attempt.reason)
                ended[kind.name, attempt.number] = labels
    return ended
