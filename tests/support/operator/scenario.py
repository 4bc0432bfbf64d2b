"""A test scenario: one pipeline, a MemoryCluster, a clock that the test moves, and short methods for both."""

from collections.abc import Coroutine, Mapping
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any

from support.operator.memory_cluster import MemoryCluster

from finetune_operator.api.conditions import Reason
from finetune_operator.api.group import CANCEL_ANNOTATION, RETRY_ANNOTATION
from finetune_operator.api.spec import STAGES, PipelineSpec
from finetune_operator.api.status import (
    AttemptStatus,
    Outcome,
    PipelineStatus,
    StageStatus,
)
from finetune_operator.core.observation import Blocker
from finetune_operator.core.pipeline import Key
from finetune_operator.core.settings import Settings
from finetune_operator.reconcile import ReconcileResult, reconcile
from finetune_trainer.contract import AnyResult, TerminationMessage, parse_config

START = datetime(2030, 1, 1, tzinfo=UTC)
UID = "0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0"
ORDER = tuple(kind.name for kind in STAGES)

ALL_STAGES: dict[str, Any] = {
    "model": {"uri": "hf://org/base"},
    "datasets": [{"uri": "hf://org/data/train.jsonl"}],
    "evaluate": {
        "tasks": [{"name": "exam"}],
        "gates": [{"task": "exam", "value": 0.6}],
    },
    "push": {"targets": [{"uri": "pvc://models/demo"}]},
    "deploy": {},
}

RESULTS: dict[str, dict[str, Any]] = {
    "prepare": {
        "records": 100,
        "invalid": 0,
        "truncated": 0,
        "dropped": 0,
        "trainRows": 40,
        "validationRows": 2,
        "trainTokens": 40_000,
        "dataDigest": "sha256:d",
    },
    "train": {
        "steps": 1000,
        "loss": 0.5,
        "validationLoss": 0.6,
        "bestStep": 900,
        "tokens": 1_000_000,
    },
    "evaluate": {
        "scores": {
            "exam": {"acc": {"value": 0.7, "stderr": 0.02}, "acc_norm": {"value": 0.4}}
        }
    },
    "push": {
        "published": [
            {
                "target": "pvc://models/demo",
                "uri": "pvc://models/demo",
                "format": "Merged",
                "digest": "sha256:push",
                "size": 1_000_000,
            }
        ]
    },
    "deploy": {"url": "http://demo/v1", "answer": "hello", "secondsToReady": 2.5},
}


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with the changes applied as a JSON merge patch: None removes a field."""
    result = dict(base)
    for name, value in changes.items():
        if value is None:
            result.pop(name, None)
        elif isinstance(value, Mapping):
            result[name] = merged(result.get(name) or {}, value)
        else:
            result[name] = value
    return result


def a_pipeline(**changes: Any) -> PipelineSpec:
    """Return a spec with all five stages and a gate for deploy. Changes use the names in YAML; None removes a field."""
    return PipelineSpec.model_validate(merged(ALL_STAGES, changes))


def scores(
    value: float, stderr: float | None = None, metric: str = "acc"
) -> dict[str, Any]:
    """Return the scores of the only task, for a result of evaluate."""
    score = {"value": value} if stderr is None else {"value": value, "stderr": stderr}
    return {"scores": {"exam": {metric: score}}}


def a_result(stage: str, identity: str, **changes: Any) -> AnyResult:
    """Return a valid result of the stage, with changes by the names in JSON."""
    data = {
        "stage": stage,
        "identity": identity,
        "digest": f"sha256:{stage}",
        **RESULTS[stage],
        **changes,
    }
    result = TerminationMessage.model_validate({"result": data}).result
    assert result
    return result


@lru_cache(maxsize=8)
def read_status(text: str) -> PipelineStatus:
    return PipelineStatus.model_validate_json(text)


def run_coroutine(coroutine: Coroutine[Any, Any, ReconcileResult]) -> ReconcileResult:
    """Run a coroutine that never suspends, without the cost of an event loop."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: ReconcileResult = stop.value
        return result
    raise AssertionError("the coroutine suspended; a MemoryCluster never does")


class Scenario:
    """One pipeline, its cluster and the clock."""

    def __init__(
        self,
        spec: PipelineSpec | None = None,
        name: str = "demo",
        settings: Settings | None = None,
        cluster: MemoryCluster | None = None,
        uid: str = UID,
    ) -> None:
        self.key = Key("team", name)
        self.settings = settings or Settings()
        self.cluster = cluster or MemoryCluster(START)
        self.spec = spec or a_pipeline()
        self.cluster.submit(self.key, self.spec, uid)
        self.requeue_after: timedelta | None = None
        self.operator_ahead = timedelta()
        """By how much the operator's clock is ahead of the kubelet's, which is the cluster's."""

    # Reconciling, and reading the status.

    def reconcile(self) -> None:
        now = self.cluster.now + self.operator_ahead
        self.requeue_after = run_coroutine(
            reconcile(self.key, self.cluster, self.settings, now)
        ).requeue_after

    def reconcile_until_stable(self) -> "Scenario":
        """Reconcile until another reconcile changes nothing: no byte of the object, no Job, no event."""
        for _ in range(8):
            before = self.change_counts
            self.reconcile()
            if self.change_counts == before:
                assert self.requeue_after is None or self.requeue_after > timedelta(), (
                    "it would requeue in a hot loop"
                )
                return self
        raise AssertionError(f"it does not become stable: {self.cluster.applied[-8:]}")

    @property
    def change_counts(self) -> tuple[int, int, int]:
        """Version of the object, number of applied changes, number of emitted events."""
        stored = self.cluster.pipelines[self.key]
        return stored.version, len(self.cluster.applied), len(self.cluster.emitted)

    @property
    def status(self) -> PipelineStatus:
        return read_status(self.cluster.pipelines[self.key].status)

    @property
    def generation(self) -> int:
        return self.cluster.pipelines[self.key].generation

    @property
    def states(self) -> dict[str, str]:
        return {name: str(stage.state) for name, stage in self.status.stages.items()}

    @property
    def events(self) -> list[str]:
        return [event.reason for _, event in self.cluster.emitted]

    @property
    def created_jobs(self) -> list[str]:
        """Stage and attempt of all created Jobs in order, for example train-a1."""
        names = [
            change.split()[1]
            for change in self.cluster.applied
            if change.startswith("create")
        ]
        return ["-".join(name.split("-")[-2:]) for name in names]

    def stage(self, name: str) -> StageStatus:
        return self.status.stages[name]

    def attempt(self, stage: str) -> AttemptStatus:
        attempt = self.stage(stage).last_attempt
        assert attempt, f"{stage} has not been attempted"
        return attempt

    def config(self, stage: str) -> Any:
        """Return the config that the stage's newest attempt received."""
        job = self.cluster.jobs[self.attempt(stage).job]
        return parse_config(job.template.env["FINETUNE_CONFIG"])

    def condition(self, kind: str) -> tuple[str, str] | None:
        """Return status and reason of a condition, or None if it is absent."""
        for condition in self.status.conditions:
            if condition.type == kind:
                return condition.status, str(condition.reason)
        return None

    @property
    def running(self) -> str | None:
        """The first stage with a running attempt, or None."""
        for name, stage in self.status.stages.items():
            if stage.last_attempt and stage.last_attempt.outcome == Outcome.RUNNING:
                return name
        return None

    # Events: time passes, Jobs change, the user edits.

    def after(self, seconds: float) -> "Scenario":
        self.cluster.now += timedelta(seconds=seconds)
        return self

    def hold(self, job: str, message: str) -> None:
        """Leave the Job's pod unschedulable."""
        self.cluster.update_job(
            job, blocker=Blocker(Reason.WAITING_FOR_CAPACITY, message)
        )

    def lose_node(self, job: str, reason: str = "its node is gone") -> None:
        """Lose the Job's node, so that its exit code is never observed."""
        self.cluster.fail(job, None, disruption=reason)

    def run_out_of_memory(self, job: str) -> None:
        self.cluster.fail(job, 137, out_of_memory=True)

    def edit(self, **changes: Any) -> "Scenario":
        data = self.spec.model_dump(mode="json", by_alias=True, exclude_none=True)
        self.spec = PipelineSpec.model_validate(merged(data, changes))
        self.cluster.edit(self.key, self.spec)
        return self.reconcile_until_stable()

    def retry(self, token: str) -> "Scenario":
        self.cluster.annotate(self.key, RETRY_ANNOTATION, token)
        return self.reconcile_until_stable()

    def cancel(self, token: str) -> "Scenario":
        self.cluster.annotate(self.key, CANCEL_ANNOTATION, token)
        return self.reconcile_until_stable()

    def pass_interruption_backoff(self) -> "Scenario":
        """Reconcile, and let the time pass for which the next attempt waits after an interruption."""
        stages = self.reconcile_until_stable().status.stages.values()
        ended = [
            stage.last_attempt for stage in stages if stage.reason is Reason.RETRYING
        ]
        if self.requeue_after and any(
            last and last.outcome is Outcome.INTERRUPTED for last in ended
        ):
            self.after(self.requeue_after.total_seconds()).reconcile_until_stable()
        return self

    def start(self, stage: str) -> str:
        """Start the process of the stage's Job and return the Job's name."""
        job = self.pass_interruption_backoff().attempt(stage).job
        self.cluster.start(job)
        self.reconcile_until_stable()
        return job

    def complete(self, stage: str, **result: Any) -> "Scenario":
        attempt = self.attempt(stage)
        self.cluster.complete(attempt.job, a_result(stage, attempt.identity, **result))
        return self.reconcile_until_stable()

    def run(self, stage: str, **result: Any) -> "Scenario":
        """Start the stage's Job, and complete it 60 seconds later."""
        self.start(stage)
        return self.after(60).complete(stage, **result)

    def run_before(self, stage: str) -> "Scenario":
        """Run every stage before this stage."""
        for name in ORDER[: ORDER.index(stage)]:
            self.run(name)
        return self

    def finish(self, **results: dict[str, Any]) -> "Scenario":
        """Run every Job to success until none is running."""
        stage = self.pass_interruption_backoff().running
        while stage:
            job = self.attempt(stage).job
            if self.cluster.jobs[job].asked_to_stop:
                self.cluster.evict(job, disruption=None)
                self.reconcile_until_stable()
            else:
                if not self.cluster.jobs[job].observed.started_at:
                    self.cluster.start(job)
                self.after(60).complete(stage, **results.get(stage, {}))
            stage = self.pass_interruption_backoff().running
        return self
