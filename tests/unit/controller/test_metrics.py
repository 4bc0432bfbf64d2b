"""The counters of attempts: what has ended between two statuses."""

import asyncio
from collections import Counter
from datetime import UTC, datetime

import pytest
from support.operator.cluster_objects import pipeline_object
from support.operator.fake_api import FakeApi
from support.operator.scenario import Scenario, a_pipeline

from finetune_operator.api.conditions import Reason
from finetune_operator.api.status import (
    ATTEMPTS_KEPT,
    AttemptStatus,
    Outcome,
    PipelineStatus,
    StageStatus,
)
from finetune_operator.controller.metrics import (
    FINAL_PHASES,
    REGISTRY,
    AttemptLabels,
    count_changes,
    record_changes,
)
from finetune_operator.core.pipeline import Key, Pipeline
from finetune_operator.errors import Conflict
from finetune_operator.kubernetes.cache.cache import ResourceCache
from finetune_operator.kubernetes.cluster import KubernetesCluster
from finetune_operator.kubernetes.pods.probe import NoProbe
from finetune_operator.kubernetes.pods.progress import NoProgress

INTERRUPTED = AttemptLabels("train", Outcome.INTERRUPTED, Reason.NODE_LOST)


def attempt(
    number: int, outcome: Outcome = Outcome.RUNNING, reason: Reason = Reason.PROGRESSING
) -> AttemptStatus:
    return AttemptStatus(
        number=number,
        job=f"a{number}",
        identity="i",
        execution="e",
        outcome=outcome,
        reason=reason,
    )


def ended(number: int) -> AttemptStatus:
    return attempt(number, INTERRUPTED.outcome, INTERRUPTED.reason)


def status(*attempts: AttemptStatus, stage: str = "train") -> PipelineStatus:
    return PipelineStatus(stages={stage: StageStatus(attempts=attempts)})


@pytest.mark.parametrize(
    ("before", "after", "count"),
    [
        (status(), status(attempt(1)), 0),
        (status(attempt(1)), status(ended(1)), 1),
        (status(attempt(1)), status(ended(1), attempt(2)), 1),
        (status(ended(1)), status(ended(1), attempt(2)), 0),
        (status(ended(1), attempt(2)), status(ended(1), ended(2)), 1),
        (PipelineStatus(), PipelineStatus(), 0),
        (
            status(
                *(ended(number) for number in range(1, ATTEMPTS_KEPT)),
                attempt(ATTEMPTS_KEPT),
            ),
            status(
                *(ended(number) for number in range(2, ATTEMPTS_KEPT + 1)),
                attempt(ATTEMPTS_KEPT + 1),
            ),
            1,
        ),
    ],
    ids=[
        "started",
        "ended",
        "ended and retried",
        "retried",
        "second ended",
        "empty",
        "oldest attempt dropped",
    ],
)
def test_only_attempts_that_have_ended_since_are_counted(before, after, count):
    assert count_changes(before, after) == ({INTERRUPTED: count} if count else {})


def test_stage_that_this_version_does_not_know_is_ignored():
    assert (
        count_changes(status(attempt(1), stage="x"), status(ended(1), stage="x")) == {}
    )


def test_counts_of_all_changes_are_the_attempts_of_the_pipeline():
    scenario = Scenario(a_pipeline())
    counted: Counter[AttemptLabels] = Counter()
    before = scenario.status

    def record():
        nonlocal before
        counted.update(count_changes(before, scenario.status))
        before = scenario.status

    scenario.run("prepare")
    record()
    for _ in range(2):
        scenario.lose_node(scenario.start("train"))
        scenario.reconcile_until_stable().after(600)
        record()
    scenario.run_out_of_memory(scenario.start("train"))
    scenario.reconcile_until_stable()
    record()
    record()
    assert {
        (labels.stage, labels.outcome, labels.reason): count
        for labels, count in counted.items()
    } == {
        ("prepare", Outcome.SUCCEEDED, Reason.STAGE_SUCCEEDED): 1,
        ("train", Outcome.INTERRUPTED, Reason.INTERRUPTED): 2,
        ("train", Outcome.FAILED, Reason.OUT_OF_MEMORY): 1,
    }


def finished(phase: str, *, gates_passed: bool | None = None) -> PipelineStatus:
    return PipelineStatus(
        phase=phase,
        finished_at=datetime(2030, 1, 1, tzinfo=UTC),
        gates_passed=gates_passed,
    )


BELOW_GATE = finished("BelowThreshold", gates_passed=False)


@pytest.mark.parametrize(
    ("before", "after", "count"),
    [
        (PipelineStatus(), BELOW_GATE, 1),
        (PipelineStatus(gates_passed=False), BELOW_GATE, 1),
        (BELOW_GATE, BELOW_GATE, 0),
        (finished("Succeeded", gates_passed=True), BELOW_GATE, 1),
        (finished("Succeeded"), BELOW_GATE, 1),
        (finished("Degraded", gates_passed=True), BELOW_GATE, 1),
        (finished("Failed", gates_passed=False), BELOW_GATE, 1),
        (finished("Degraded"), finished("Succeeded"), 0),
        (BELOW_GATE, finished("Degraded", gates_passed=False), 0),
        (finished("Degraded", gates_passed=False), BELOW_GATE, 0),
        (PipelineStatus(), PipelineStatus(phase="Running"), 0),
        (PipelineStatus(), finished("Another"), 0),
    ],
    ids=[
        "finished",
        "finished after its gate closed",
        "had finished",
        "gate closed later",
        "gate added later",
        "gate closed while its server was down",
        "gate is measured now",
        "server is back",
        "server below its gate is down",
        "server below its gate is back",
        "runs",
        "unknown phase",
    ],
)
def test_pipeline_is_counted_once_it_finishes(before, after, count):
    def counted() -> float:
        return sum(
            REGISTRY.get_sample_value(
                "finetune_pipelines_finished_total", {"phase": phase}
            )
            or 0
            for phase in FINAL_PHASES
        )

    earlier = counted()
    record_changes(before, after)
    assert counted() == earlier + count


def test_series_of_alerts_exist_before_anything_ends():
    """Prometheus' `increase` does not see the step from no series to 1."""
    for stage in ("prepare", "train", "evaluate", "push", "deploy"):
        labels = {"stage": stage, "outcome": "Interrupted", "reason": "Interrupted"}
        assert REGISTRY.get_sample_value("finetune_attempts_total", labels) is not None
        assert (
            REGISTRY.get_sample_value("finetune_lost_steps_total", {"stage": stage})
            is not None
        )
        for capacity in ("", "OnDemand", "Spot"):
            labels = {"stage": stage, "capacity": capacity}
            assert REGISTRY.get_sample_value("finetune_spent_total", labels) is not None
    for outcome in ("error", "bug"):
        assert (
            REGISTRY.get_sample_value("finetune_reconcile_total", {"outcome": outcome})
            is not None
        )


class StatusApi(FakeApi):
    """An API server that accepts or rejects each status."""

    conflicts = False

    async def replace(self, path, body):
        if self.conflicts:
            raise Conflict("changed")
        return pipeline_object(version=2, status=body["status"])

    async def get(self, path):
        return pipeline_object()


def attempts_counted() -> float:
    labels = {"stage": "train", "outcome": "Interrupted", "reason": "NodeLost"}
    return REGISTRY.get_sample_value("finetune_attempts_total", labels) or 0.0


def test_attempt_is_counted_once_its_status_is_written():
    async def scenario():
        api = StatusApi()
        counted = attempts_counted()
        cluster = KubernetesCluster(
            api, ResourceCache(), NoProgress(), NoProbe(), record_changes
        )
        pipeline = Pipeline(
            Key("team", "demo"), "uid", 1, a_pipeline(), status(attempt(1))
        )
        api.conflicts = True
        with pytest.raises(Conflict):
            await cluster.write_status(pipeline, status(ended(1)))
        assert attempts_counted() == counted
        api.conflicts = False
        await cluster.write_status(pipeline, status(ended(1)))
        assert attempts_counted() == counted + 1

    asyncio.run(scenario())
