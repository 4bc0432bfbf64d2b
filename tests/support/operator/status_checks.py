"""What holds of the status of every pipeline, after any event and at the end."""

from support.operator.kstatus import kstatus
from support.operator.scenario import (
    ORDER,
    Scenario,
)

from finetune_operator.api.conditions import Reason

PHASES = {
    "Pending",
    "Running",
    "Suspended",
    "Succeeded",
    "Failed",
    "Cancelled",
    "BelowThreshold",
}


def check_conditions(scenario: Scenario) -> None:
    status = scenario.status
    if not status.conditions:
        return
    kinds = [c.type for c in status.conditions]
    assert len(kinds) == len(set(kinds))
    assert {
        c.status for c in status.conditions if c.type in {"Reconciling", "Stalled"}
    } <= {"True"}
    assert not {"Reconciling", "Stalled"} <= set(kinds)
    ready = scenario.condition("Ready")
    finished = scenario.condition("Finished")
    assert ready
    assert finished
    assert ready[0] != "True" or finished[0] == "True"
    assert (finished[0] == "True") is (status.finished_at is not None)
    assert {c.observed_generation for c in status.conditions} == {
        status.observed_generation
    }
    assert status.phase in PHASES


def check_end(scenario: Scenario, *, others_suspended: bool) -> None:
    """Check that the pipeline has finished, or waits for a suspended pipeline."""
    ready = scenario.condition("Ready")
    finished = scenario.condition("Finished")
    assert ready
    assert finished
    waits = others_suspended and ready[1] == Reason.WORKSPACE_IN_USE
    assert finished[0] == "True" or scenario.status.phase == "Suspended" or waits
    if finished[0] == "True":
        expected = "Current" if scenario.status.phase == "Succeeded" else "Failed"
        assert kstatus(scenario) == expected
    if scenario.status.phase == "Succeeded":
        assert set(scenario.states.values()) <= {"Succeeded", "Skipped"}
    assert set(scenario.states) == set(ORDER)
