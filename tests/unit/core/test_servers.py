"""A stage that leaves a server running, on a cluster that keeps it."""

from dataclasses import replace

import pytest
from support.scenario import ORDER, Scenario, a_result

from finetune_operator.api.conditions import Reason
from finetune_operator.core.observation import Blocker


@pytest.fixture
def scenario():
    return Scenario().run_before("deploy")


def answered(scenario):
    """Let the newest server answer, and give the attempt's name."""
    job = scenario.start("deploy")
    scenario.after(20).complete("deploy", long_running=True)
    return job


def standing(scenario):
    return {job: server.current for job, server in scenario.cluster.servers.items()}


def test_requests_go_to_a_server_only_when_it_has_answered(scenario):
    job = scenario.start("deploy")
    assert "route" not in " ".join(scenario.cluster.applied)
    scenario.complete("deploy", long_running=True)
    assert standing(scenario) == {job: True}
    assert scenario.condition("Deployed") == ("True", "StageSucceeded")
    assert scenario.status.phase == "Succeeded"
    assert scenario.status.model.endpoint == "http://demo/v1"


def test_it_is_not_called_deployed_before_requests_are_sent_to_it(scenario):
    job = scenario.start("deploy")
    scenario.cluster.complete(job, a_result("deploy", scenario.attempt("deploy").identity, long_running=True))
    scenario.reconcile()
    assert scenario.condition("Deployed") == ("Unknown", "Progressing")
    assert scenario.condition("Finished") == ("False", "Progressing")
    scenario.reconcile()
    assert scenario.condition("Deployed") == ("True", "StageSucceeded")


@pytest.mark.parametrize("changes", [{"deploy": {"replicas": 2}}, {"seed": 5}, {"deploy": {"engine": "vllm"}}])
def test_the_old_server_stays_until_the_new_one_has_answered(scenario, changes):
    old = answered(scenario)
    scenario.edit(**changes)
    for stage in ORDER[:-1]:
        if scenario.running == stage:
            scenario.run(stage)
    new = scenario.start("deploy")
    assert standing(scenario) == {old: True}
    scenario.complete("deploy", long_running=True)
    assert standing(scenario) == {new: True}
    deeds = scenario.cluster.applied
    assert deeds.index(f"route to {new}") < deeds.index(f"stop the server of {old}")


def test_a_new_server_that_fails_goes_and_the_old_one_stays(scenario):
    old = answered(scenario)
    scenario.edit(deploy={"replicas": 2, "retries": {"failures": 0}})
    new = scenario.start("deploy")
    scenario.cluster.servers[new] = replace(scenario.cluster.servers[old], current=False)
    scenario.cluster.fail(new, 1, "no room for the model")
    scenario.reconcile_until_stable()
    assert standing(scenario) == {old: True}
    assert scenario.status.phase == "Failed"


def test_a_model_below_the_gate_leaves_the_old_one_where_it_is(scenario):
    old = answered(scenario)
    scenario.edit(seed=5)
    for stage, result in {
        "prepare": {},
        "train": {},
        "evaluate": {"scores": {"exam": {"acc": {"value": 0.1}}}},
    }.items():
        scenario.run(stage, **result)
    scenario.finish()
    assert scenario.states["deploy"] == "Skipped"
    assert standing(scenario) == {old: True}


def test_a_server_that_somebody_deleted_is_started_again(scenario):
    old = answered(scenario)
    del scenario.cluster.servers[old]
    scenario.reconcile_until_stable()
    assert scenario.running == "deploy"
    new = answered(scenario)
    assert standing(scenario) == {new: True}
    assert new != old


def test_a_server_that_is_down_is_told_of_and_again_when_it_is_back(scenario):
    job = answered(scenario)
    well = scenario.cluster.servers[job]
    scenario.cluster.servers[job] = replace(well, problem=Blocker(Reason.SERVER_NOT_READY, "none of 1 is ready"))
    scenario.reconcile_until_stable()
    assert scenario.condition("Deployed") == ("False", "ServerNotReady")
    assert (scenario.condition("Ready"), scenario.condition("Finished")[0]) == (("False", "ServerNotReady"), "True")
    assert scenario.status.phase == "Degraded"
    assert scenario.events[-1] == "PipelineDegraded"
    scenario.cluster.servers[job] = well
    scenario.reconcile_until_stable()
    assert (scenario.status.phase, scenario.condition("Deployed")[0]) == ("Succeeded", "True")


def test_without_deploy_in_the_spec_no_server_stays(scenario):
    answered(scenario)
    scenario.edit(deploy=None)
    assert standing(scenario) == {}


@pytest.mark.parametrize("verb", ["suspend", "cancel"])
def test_a_server_that_answers_outlives_suspending_and_cancelling(scenario, verb):
    job = answered(scenario)
    if verb == "suspend":
        scenario.edit(suspend=True)
    else:
        scenario.cancel("now")
    assert standing(scenario) == {job: True}


def test_a_service_that_somebody_deleted_is_put_back_in_front_of_the_old_server(scenario):
    old = answered(scenario)
    scenario.edit(deploy={"replicas": 2})
    new = scenario.start("deploy")
    scenario.cluster.servers[old] = replace(scenario.cluster.servers[old], current=False)
    scenario.reconcile_until_stable()
    assert standing(scenario) == {old: True}
    scenario.complete("deploy", long_running=True)
    assert standing(scenario) == {new: True}


def test_an_old_server_that_is_down_is_told_of_while_a_new_one_is_made(scenario):
    old = answered(scenario)
    scenario.edit(seed=5)
    down = Blocker(Reason.SERVER_NOT_READY, "none of 1 is ready")
    scenario.cluster.servers[old] = replace(scenario.cluster.servers[old], problem=down)
    scenario.reconcile_until_stable()
    assert scenario.stage("deploy").message == "waits for push; meanwhile none of 1 is ready"
