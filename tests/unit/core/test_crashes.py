"""Fault injection: the operator is killed, or its cluster fails, before and after every request."""

import contextlib
import itertools
import json
from collections.abc import Callable
from functools import partial

import pytest
from support.operator.scenario import Scenario, run_coroutine

from finetune_operator.errors import ClusterError
from finetune_operator.reconcile import reconcile

REQUESTS = ("read", "observe", "write_status", "apply", "emit_events")


class Killed(BaseException):
    """Simulates the death of the operator's process."""


class Fault:
    """Raises an error once, at the n-th moment from now on."""

    def __init__(self, moment: int = 0, error: type[BaseException] = Killed) -> None:
        self.remaining = moment
        self.error = error
        self.moments: list[str] = []

    def __call__(self, moment: str) -> None:
        self.moments.append(moment)
        self.remaining -= 1
        if self.remaining == 0:
            raise self.error(moment)

    def retry(self, reconcile: Callable[[], None]) -> None:
        """Reconcile, and once more if the fault ended the first try."""
        try:
            reconcile()
        except (Killed, ClusterError):
            reconcile()


class FaultAtEveryMoment(Fault):
    """Ends each reconcile at its first moment, the retry at its second, and so on until one completes."""

    def retry(self, reconcile: Callable[[], None]) -> None:
        for moment in itertools.count(1):
            self.remaining = moment
            with contextlib.suppress(Killed):
                reconcile()
                if self.remaining > 0:
                    return


def run_pipeline(fault: Fault) -> Scenario:
    """Run a whole pipeline with an eviction, a failure, a suspension and an edit during training."""
    scenario = Scenario()
    scenario.cluster.inject_fault = fault
    scenario.reconcile = partial(fault.retry, scenario.reconcile)
    scenario.run("prepare")
    scenario.cluster.evict(scenario.start("train"), step=70, saved=70)
    job = scenario.start("train")
    scenario.cluster.progress(job, step=90, start_step=70, step_seconds=2.0)
    scenario.reconcile_until_stable()
    scenario.lose_node(job)
    job = scenario.start("train")
    scenario.cluster.progress(job, step=75, start_step=70, step_seconds=2.0)
    scenario.edit(train={"pod": {"resources": {"limits": {"memory": "32Gi"}}}})
    scenario.cluster.evict(job, disruption=None)
    scenario.reconcile_until_stable().edit(suspend=True)
    scenario.cluster.evict(scenario.attempt("train").job, disruption=None)
    scenario.reconcile_until_stable().edit(suspend=False)
    scenario.cluster.fail(scenario.start("train"), 70)
    return scenario.reconcile_until_stable().after(10).finish()


def outcome(scenario: Scenario) -> str:
    """Return all applied changes and the final status as JSON."""
    status = scenario.status.model_dump(mode="json", exclude_none=True)
    return json.dumps([scenario.cluster.applied, status], sort_keys=True)


@pytest.fixture(scope="module")
def without_faults() -> tuple[Scenario, list[str]]:
    """The same pipeline without a fault, and the names of all its moments."""
    no_fault = Fault()
    return run_pipeline(no_fault), no_fault.moments


def same_outcome(scenario: Scenario, expected: Scenario) -> bool:
    events = scenario.cluster.emitted
    assert len(events) == len(set(events)), "an event was emitted twice"
    assert set(events) <= set(expected.cluster.emitted)
    return outcome(scenario) == outcome(expected)


def test_kill_at_every_moment_of_each_reconcile_changes_nothing(without_faults):
    fault = FaultAtEveryMoment()
    assert same_outcome(run_pipeline(fault), without_faults[0])
    assert {
        f"{when} {request}" for request in REQUESTS for when in ("before", "after")
    } == set(fault.moments)


def test_single_fault_does_not_change_the_outcome(without_faults):
    expected, moments = without_faults
    # 41 is coprime with the number of moments in a reconcile, so that every kind of moment is among them.
    for moment in range(1, len(moments), 41):
        error = Killed if moment % 2 else ClusterError
        assert same_outcome(run_pipeline(Fault(moment, error)), expected), (
            f"{error.__name__} {moments[moment - 1]}"
        )


def test_events_are_emitted_when_apply_fails():
    scenario = Scenario()
    scenario.cluster.inject_fault = Fault(7, ClusterError)
    with pytest.raises(ClusterError, match="before apply"):
        scenario.reconcile()
    assert scenario.events == ["AttemptStarted"]
    assert scenario.reconcile_until_stable().events == ["AttemptStarted"]


def test_failed_status_write_applies_and_emits_nothing():
    scenario = Scenario()
    scenario.cluster.inject_fault = Fault(5, ClusterError)
    with pytest.raises(ClusterError, match="before write_status"):
        scenario.reconcile()
    assert scenario.cluster.applied == []
    assert scenario.cluster.emitted == []
    assert scenario.status.stages == {}


def test_concurrent_edit_is_a_conflict_and_is_not_overwritten():
    scenario = Scenario()
    edits = iter([scenario.spec.model_copy(update={"seed": 7})])

    def edit_before_write(moment: str) -> None:
        if moment != "before write_status":
            return
        for spec in edits:
            scenario.cluster.edit(scenario.key, spec)

    scenario.cluster.inject_fault = edit_before_write
    with pytest.raises(ClusterError, match="changed since"):
        run_coroutine(
            reconcile(
                scenario.key, scenario.cluster, scenario.settings, scenario.cluster.now
            )
        )
    assert scenario.cluster.applied == []
    assert scenario.reconcile_until_stable().status.observed_generation == 2


def test_second_of_two_actions_is_applied_after_a_kill():
    scenario = Scenario()
    kills = iter([Killed])

    def kill_after_first_action(moment: str) -> None:
        if moment != "after apply":
            return
        for kill in kills:
            raise kill

    scenario.cluster.inject_fault = kill_after_first_action
    with pytest.raises(Killed):
        scenario.reconcile()
    assert scenario.cluster.claims == {"team/demo-workspace": None}
    assert scenario.created_jobs == []
    scenario.reconcile_until_stable()
    assert scenario.created_jobs == ["prepare-a1"]
