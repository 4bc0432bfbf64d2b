"""The deploy stage on a cluster, where its server keeps running."""

from dataclasses import replace

import pytest
from support.operator.scenario import ORDER, Scenario, a_result

from finetune_operator.api.conditions import Reason
from finetune_operator.core.observation import Blocker


@pytest.fixture
def scenario():
    return Scenario().run_before("deploy")


def start_server(scenario):
    """Start a server that answers, and return the name of its Job."""
    job = scenario.start("deploy")
    scenario.after(20).complete("deploy", long_running=True)
    return job


def servers(scenario):
    return {job: server.current for job, server in scenario.cluster.servers.items()}


def test_traffic_is_switched_only_after_the_answer(scenario):
    job = scenario.start("deploy")
    assert "route" not in " ".join(scenario.cluster.applied)
    scenario.complete("deploy", long_running=True)
    assert servers(scenario) == {job: True}
    assert scenario.condition("Deployed") == ("True", "StageSucceeded")
    assert scenario.status.phase == "Succeeded"
    assert scenario.status.model.endpoint == "http://demo/v1"


def test_deployed_is_true_only_after_the_switch(scenario):
    job = scenario.start("deploy")
    scenario.cluster.complete(
        job, a_result("deploy", scenario.attempt("deploy").identity, long_running=True)
    )
    scenario.reconcile()
    assert scenario.condition("Deployed") == ("Unknown", "Progressing")
    assert scenario.condition("Finished") == ("False", "Progressing")
    scenario.reconcile()
    assert scenario.condition("Deployed") == ("True", "StageSucceeded")


@pytest.mark.parametrize(
    "changes",
    [
        {"deploy": {"pod": {"env": [{"name": "A", "value": "1"}]}}},
        {"seed": 5},
        {"deploy": {"engine": "VLLM"}},
    ],
)
def test_old_server_stays_until_new_one_has_answered(scenario, changes):
    old = start_server(scenario)
    scenario.edit(**changes)
    for stage in ORDER[:-1]:
        if scenario.running == stage:
            scenario.run(stage)
    new = scenario.start("deploy")
    assert servers(scenario) == {old: True}
    scenario.complete("deploy", long_running=True)
    assert servers(scenario) == {new: True}
    changes = scenario.cluster.applied
    assert changes.index(f"route to {new}") < changes.index(f"stop the server of {old}")


def test_server_is_scaled_in_place(scenario):
    job = start_server(scenario)
    identity = scenario.stage("deploy").identity
    scenario.edit(deploy={"replicas": 3})
    scenario.reconcile_until_stable()
    assert {name: s.replicas for name, s in scenario.cluster.servers.items()} == {
        job: 3
    }
    assert scenario.stage("deploy").identity == identity
    assert scenario.status.phase == "Succeeded"
    server = scenario.status.server
    assert server.replicas == 3
    assert server.selector == f"finetune.dev/server={job}"


def test_both_servers_are_scaled_while_the_new_one_starts(scenario):
    old = start_server(scenario)
    scenario.edit(deploy={"engine": "VLLM"})
    scenario.start("deploy")
    scenario.edit(deploy={"replicas": 2})
    scenario.reconcile_until_stable()
    assert scenario.cluster.servers[old].replicas == 2
    assert scenario.running == "deploy"
    assert scenario.attempt("deploy").stopping is None


def test_refused_scaling_is_reported_and_repeated(scenario):
    job = start_server(scenario)
    scenario.cluster.refusals[job] = Blocker(Reason.DEPENDENCY_NOT_READY, "no patch")
    scenario.edit(deploy={"replicas": 2})
    scenario.reconcile_until_stable()
    assert "no patch" in scenario.stage("deploy").message
    del scenario.cluster.refusals[job]
    scenario.reconcile_until_stable()
    assert scenario.cluster.servers[job].replicas == 2
    assert scenario.status.phase == "Succeeded"


@pytest.mark.parametrize("level", ["podDefaults", "deploy"])
def test_annotations_and_labels_start_no_server(scenario, level):
    job = start_server(scenario)
    pod = {"annotations": {"team": "a"}, "labels": {"team": "a"}}
    scenario.edit(**{level: pod if level == "podDefaults" else {"pod": pod}})
    scenario.finish()
    assert servers(scenario) == {job: True}


def test_failed_new_server_is_deleted_and_old_one_stays(scenario):
    old = start_server(scenario)
    scenario.edit(deploy={"engine": "VLLM", "maxFailures": 0})
    new = scenario.start("deploy")
    scenario.cluster.servers[new] = replace(
        scenario.cluster.servers[old], current=False
    )
    scenario.cluster.fail(new, 1, "no room for the model")
    scenario.reconcile_until_stable()
    assert servers(scenario) == {old: True}
    assert scenario.status.phase == "Failed"


def test_model_below_the_gate_keeps_the_old_server(scenario):
    old = start_server(scenario)
    scenario.edit(seed=5)
    for stage, result in {
        "prepare": {},
        "train": {},
        "evaluate": {"scores": {"exam": {"acc": {"value": 0.1}}}},
    }.items():
        scenario.run(stage, **result)
    scenario.finish()
    assert scenario.states["deploy"] == "Skipped"
    assert servers(scenario) == {old: True}


def test_deleted_server_is_started_again(scenario):
    old = start_server(scenario)
    del scenario.cluster.servers[old]
    scenario.reconcile_until_stable()
    assert scenario.running == "deploy"
    new = start_server(scenario)
    assert servers(scenario) == {new: True}
    assert new != old


def test_server_outage_is_reported_until_it_ends(scenario):
    job = start_server(scenario)
    healthy = scenario.cluster.servers[job]
    scenario.cluster.servers[job] = replace(
        healthy, problem=Blocker(Reason.SERVER_NOT_READY, "none of 1 is ready")
    )
    scenario.reconcile_until_stable()
    assert scenario.condition("Deployed") == ("False", "ServerNotReady")
    assert (scenario.condition("Ready"), scenario.condition("Finished")[0]) == (
        ("False", "ServerNotReady"),
        "True",
    )
    assert scenario.status.phase == "Degraded"
    assert scenario.events[-1] == "PipelineDegraded"
    scenario.cluster.servers[job] = healthy
    scenario.reconcile_until_stable()
    assert (scenario.status.phase, scenario.condition("Deployed")[0]) == (
        "Succeeded",
        "True",
    )


def test_removing_deploy_deletes_the_server(scenario):
    start_server(scenario)
    scenario.edit(deploy=None)
    assert servers(scenario) == {}


@pytest.mark.parametrize("command", ["suspend", "cancel"])
def test_server_survives_suspend_and_cancel(scenario, command):
    job = start_server(scenario)
    if command == "suspend":
        scenario.edit(suspend=True)
    else:
        scenario.cancel("now")
    assert servers(scenario) == {job: True}


def test_deleted_service_gets_back_the_old_server(scenario):
    old = start_server(scenario)
    scenario.edit(deploy={"engine": "VLLM"})
    new = scenario.start("deploy")
    scenario.cluster.servers[old] = replace(
        scenario.cluster.servers[old], current=False
    )
    scenario.reconcile_until_stable()
    assert servers(scenario) == {old: True}
    scenario.complete("deploy", long_running=True)
    assert servers(scenario) == {new: True}


def test_outage_of_old_server_is_reported_during_rollout(scenario):
    old = start_server(scenario)
    scenario.edit(seed=5)
    down = Blocker(Reason.SERVER_NOT_READY, "none of 1 is ready")
    scenario.cluster.servers[old] = replace(scenario.cluster.servers[old], problem=down)
    scenario.reconcile_until_stable()
    assert (
        scenario.stage("deploy").message
        == "waits for push; meanwhile none of 1 is ready"
    )
