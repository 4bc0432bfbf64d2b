"""Conditions, generations, times, the derived kstatus, and events."""

from datetime import timedelta

import pytest
from support.operator.kstatus import kstatus, kstatus_of
from support.operator.pipeline_states import STATES
from support.operator.scenario import START, Scenario, a_pipeline


def summary_condition_types(scenario: Scenario) -> set[str]:
    return {condition.type for condition in scenario.status.conditions} & {
        "Ready",
        "Reconciling",
        "Stalled",
        "Finished",
    }


def between_attempts() -> Scenario:
    scenario = Scenario()
    scenario.cluster.fail(scenario.start("prepare"), 70)
    return scenario.reconcile_until_stable()


def failed() -> Scenario:
    return built("failed")


def built(state: str) -> Scenario:
    scenario = STATES[state].build()
    assert isinstance(scenario, Scenario)
    return scenario


IN_PROGRESS = {"Ready", "Reconciling", "Finished"}
STALLED = {"Ready", "Stalled", "Finished"}
SITUATIONS = {
    "queued": (IN_PROGRESS, "False", "False"),
    "running": (IN_PROGRESS, "False", "False"),
    "between two attempts": (IN_PROGRESS, "False", "False"),
    "suspended": ({"Ready", "Finished"}, "False", "False"),
    "succeeded": ({"Ready", "Finished"}, "True", "True"),
    "below its gate": (STALLED, "False", "True"),
    "failed": (STALLED, "False", "True"),
    "cancelled": (STALLED, "False", "True"),
}


@pytest.mark.parametrize(
    ("state", "present", "ready", "finished"), [(s, *x) for s, x in SITUATIONS.items()]
)
def test_summary_conditions_in_each_state(state, present, ready, finished):
    scenario = built(state)
    assert summary_condition_types(scenario) == present
    statuses = {kind: scenario.condition(kind) for kind in ("Ready", "Finished")}
    assert {kind: status[0] for kind, status in statuses.items() if status} == {
        "Ready": ready,
        "Finished": finished,
    }
    assert all(
        c.status == "True"
        for c in scenario.status.conditions
        if c.type in {"Reconciling", "Stalled"}
    )
    assert {c.observed_generation for c in scenario.status.conditions} == {
        scenario.generation
    }


@pytest.mark.parametrize("state", STATES.values(), ids=STATES.keys())
def test_kstatus_of_each_state_is_that_of_the_table(state):
    assert kstatus_of(state.object()) == state.kstatus


def test_kstatus_of_a_pipeline_between_attempts_is_in_progress():
    assert kstatus(between_attempts()) == "InProgress"


def test_edit_is_in_progress_until_observed():
    scenario = Scenario().finish()
    scenario.cluster.edit(scenario.key, a_pipeline(seed=7))
    assert kstatus(scenario) == "InProgress"
    scenario.reconcile_until_stable()
    assert scenario.status.observed_generation == scenario.generation == 2
    assert {c.observed_generation for c in scenario.status.conditions} == {2}


def test_condition_keeps_its_last_transition_time():
    scenario = Scenario()
    scenario.reconcile()
    scenario.after(500).finish()
    times = {c.type: c.last_transition_time - START for c in scenario.status.conditions}
    assert times["Prepared"] == timedelta(seconds=560)
    assert (
        times["Deployed"]
        == times["Ready"]
        == times["Finished"]
        == timedelta(seconds=800)
    )
    scenario.after(500).edit(evaluate={"gates": [{"task": "exam", "value": 0.1}]})
    assert {
        c.type: c.last_transition_time - START for c in scenario.status.conditions
    } == times


def test_finished_at_is_set_only_while_finished():
    scenario = Scenario().finish()
    status = scenario.status
    assert status.finished_at
    assert status.started_at
    assert status.finished_at - status.started_at == timedelta(seconds=300)
    scenario.after(100).edit(seed=7)
    assert scenario.status.finished_at is None
    assert scenario.finish().status.finished_at == scenario.cluster.now


def test_every_stage_has_a_condition():
    scenario = Scenario(a_pipeline(deploy=None)).run("prepare").run("train")
    assert [
        scenario.condition(kind)
        for kind in ("Prepared", "Trained", "Evaluated", "Pushed", "Deployed")
    ] == [
        ("True", "StageSucceeded"),
        ("True", "StageSucceeded"),
        ("Unknown", "Progressing"),
        ("Unknown", "DependencyNotReady"),
        ("False", "NotRequested"),
    ]


def test_each_change_emits_one_event():
    scenario = Scenario(a_pipeline(push=None, deploy=None))
    scenario.cluster.fail(scenario.start("prepare"), 70, "no space")
    scenario.reconcile_until_stable().after(10).run("prepare")
    scenario.lose_node(scenario.start("train"))
    scenario.reconcile_until_stable().finish()
    assert scenario.events == [
        "AttemptStarted",
        "AttemptFailed",
        "AttemptStarted",
        "StageSucceeded",
        "AttemptStarted",
        "AttemptInterrupted",
        "AttemptStarted",
        "StageSucceeded",
        "AttemptStarted",
        "StageSucceeded",
        "PipelineSucceeded",
    ]
    assert len(set(scenario.cluster.emitted)) == len(scenario.cluster.emitted)
    assert scenario.cluster.emitted[1][1].message == "prepare attempt 1: no space"


@pytest.mark.parametrize(
    ("state", "last"),
    [
        ("failed", "PipelineFailed"),
        ("cancelled", "PipelineCancelled"),
        ("below its gate", "PipelineBelowThreshold"),
    ],
)
def test_last_event_names_the_outcome(state, last):
    assert built(state).events[-1] == last


def test_gate_edit_that_changes_the_outcome_emits_an_event():
    scenario = Scenario(
        a_pipeline(
            evaluate={"gates": [{"task": "exam", "metric": "f1", "value": 0.6}]},
            push=None,
            deploy=None,
        )
    ).finish()
    assert scenario.events[-1] == "PipelineFailed"
    scenario.edit(evaluate={"gates": [{"task": "exam", "value": 0.6}]})
    assert scenario.events[-1] == "PipelineSucceeded"


def test_second_failure_after_retry_emits_a_second_event():
    scenario = failed().retry("1")
    scenario.cluster.fail(scenario.start("prepare"), 65)
    assert scenario.reconcile_until_stable().events.count("PipelineFailed") == 2
