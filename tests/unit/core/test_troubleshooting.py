"""Messages of conditions and events name the section of the documentation that has the fix."""

import pytest
from support.operator.pipeline_states import STATES
from support.operator.scenario import Scenario, a_pipeline

from finetune_operator.api.conditions import NOTHING_TO_FIX
from finetune_operator.core.settings import Settings

PAGE = "https://wiki.example/finetune"
SUMMARIES = ("Ready", "Reconciling", "Stalled", "Finished")


def failed() -> Scenario:
    scenario = Scenario(settings=Settings(troubleshooting_url=PAGE))
    scenario.cluster.fail(scenario.start("prepare"), 65, "line 3 is not JSON")
    return scenario.reconcile_until_stable()


@pytest.mark.parametrize("state", STATES.values(), ids=STATES.keys())
def test_condition_links_to_its_reason_if_there_is_a_fix(state):
    conditions = state.object()["status"].get("conditions", [])
    for condition in conditions:
        linked = (
            f"(see docs/guides/troubleshooting.md#{condition['reason'].lower()})"
            in condition["message"]
        )
        expected = (
            condition["type"] in SUMMARIES and condition["reason"] not in NOTHING_TO_FIX
        )
        assert linked is expected, condition


def test_condition_links_to_the_page_of_the_settings():
    message = next(
        condition.message
        for condition in failed().status.conditions
        if condition.type == "Ready"
    )
    assert message == f"prepare: line 3 is not JSON (see {PAGE}#datainvalid)"


def test_local_run_names_the_command_that_explains():
    scenario = Scenario(settings=Settings(troubleshooting_url=""))
    scenario.cluster.fail(scenario.start("prepare"), 65, "line 3 is not JSON")
    conditions = scenario.reconcile_until_stable().status.conditions
    messages = [item.message for item in conditions if item.type == "Ready"]
    assert messages == [
        "prepare: line 3 is not JSON (see `finetune explain DataInvalid`)"
    ]


def test_events_of_a_failure_link_to_its_reason():
    events = {event.reason: event for _, event in failed().cluster.emitted}
    for reason in ("AttemptFailed", "StageFailed", "PipelineFailed"):
        assert events[reason].link == f" (see {PAGE}#datainvalid)"
        assert events[reason].message.endswith("line 3 is not JSON")
    assert events["AttemptStarted"].link == ""


def test_events_of_an_eviction_and_of_success_have_no_link():
    scenario = Scenario(a_pipeline(push=None, deploy=None)).run("prepare")
    scenario.cluster.evict(scenario.start("train"))
    scenario.reconcile_until_stable().finish()
    assert "AttemptInterrupted" in scenario.events
    assert {event.link for _, event in scenario.cluster.emitted} == {""}
