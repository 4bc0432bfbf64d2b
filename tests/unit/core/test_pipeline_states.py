"""The verbs that Argo CD offers in each state, against what the operator makes of them."""

from typing import Any

import pytest
from support.operator.pipeline_objects import Object, stored_object
from support.operator.pipeline_states import STATES

VERBS = {
    "cancel": lambda scenario: scenario.cancel("another"),
    "resume": lambda scenario: scenario.edit(suspend=False),
    "retry": lambda scenario: scenario.retry("another"),
    "suspend": lambda scenario: scenario.edit(suspend=True),
}
OFFERED = [(name, verb) for name, state in STATES.items() for verb in state.actions]


def outcome(scenario: Any) -> tuple[Object, list[str]]:
    """Return the status without what was only read, and every change of the cluster."""
    status = stored_object(scenario.reconcile_until_stable())["status"]
    status.pop("observedAnnotations", None)
    del status["observedGeneration"]
    for condition in status["conditions"]:
        del condition["observedGeneration"]
    return status, scenario.cluster.applied


@pytest.mark.parametrize(("state", "verb"), OFFERED)
def test_offered_action_changes_what_the_operator_does(state: str, verb: str) -> None:
    build = STATES[state].build
    assert outcome(VERBS[verb](build())) != outcome(build())
