"""A stage that leaves a server running, on a cluster that keeps it."""

from dataclasses import replace

import pytest
from support.scenario import ORDER, World, a_result

from finetune_operator.api.conditions import Reason
from finetune_operator.core.observation import Waiting


@pytest.fixture
def world():
    return World().run_before("deploy")


def answered(world):
    """Let the newest server answer, and give the attempt's name."""
    job = world.start("deploy")
    world.after(20).complete("deploy", lasting=True)
    return job


def standing(world):
    return {job: server.current for job, server in world.cluster.servers.items()}


def test_requests_go_to_a_server_only_when_it_has_answered(world):
    job = world.start("deploy")
    assert "route" not in " ".join(world.cluster.deeds)
    world.complete("deploy", lasting=True)
    assert standing(world) == {job: True}
    assert world.condition("Deployed") == ("True", "StageSucceeded")
    assert world.status.phase == "Succeeded"
    assert world.status.model.endpoint == "http://demo/v1"


def test_it_is_not_called_deployed_before_requests_are_sent_to_it(world):
    job = world.start("deploy")
    world.cluster.complete(job, a_result("deploy", world.attempt("deploy").identity, lasting=True))
    world.look()
    assert world.condition("Deployed") == ("Unknown", "Progressing")
    assert world.condition("Finished") == ("False", "Progressing")
    world.look()
    assert world.condition("Deployed") == ("True", "StageSucceeded")


@pytest.mark.parametrize("changes", [{"deploy": {"replicas": 2}}, {"seed": 5}, {"deploy": {"engine": "vllm"}}])
def test_the_old_server_stays_until_the_new_one_has_answered(world, changes):
    old = answered(world)
    world.edit(**changes)
    for stage in ORDER[:-1]:
        if world.running == stage:
            world.run(stage)
    new = world.start("deploy")
    assert standing(world) == {old: True}
    world.complete("deploy", lasting=True)
    assert standing(world) == {new: True}
    deeds = world.cluster.deeds
    assert deeds.index(f"route to {new}") < deeds.index(f"stop the server of {old}")


def test_a_new_server_that_fails_goes_and_the_old_one_stays(world):
    old = answered(world)
    world.edit(deploy={"replicas": 2, "retries": {"failures": 0}})
    new = world.start("deploy")
    world.cluster.servers[new] = replace(world.cluster.servers[old], current=False)
    world.cluster.fail(new, 1, "no room for the model")
    world.settle()
    assert standing(world) == {old: True}
    assert world.status.phase == "Failed"


def test_a_model_below_the_gate_leaves_the_old_one_where_it_is(world):
    old = answered(world)
    world.edit(seed=5)
    for stage, result in {
        "prepare": {},
        "train": {},
        "evaluate": {"scores": {"exam": {"acc": {"value": 0.1}}}},
    }.items():
        world.run(stage, **result)
    world.finish()
    assert world.states["deploy"] == "Skipped"
    assert standing(world) == {old: True}


def test_a_server_that_somebody_deleted_is_started_again(world):
    old = answered(world)
    del world.cluster.servers[old]
    world.settle()
    assert world.running == "deploy"
    new = answered(world)
    assert standing(world) == {new: True}
    assert new != old


def test_a_server_that_is_down_is_told_of_and_again_when_it_is_back(world):
    job = answered(world)
    well = world.cluster.servers[job]
    world.cluster.servers[job] = replace(well, trouble=Waiting(Reason.SERVER_NOT_READY, "none of 1 is ready"))
    world.settle()
    assert world.condition("Deployed") == ("False", "ServerNotReady")
    assert (world.condition("Ready"), world.condition("Finished")[0]) == (("False", "ServerNotReady"), "True")
    assert world.status.phase == "Degraded"
    assert world.events[-1] == "PipelineDegraded"
    world.cluster.servers[job] = well
    world.settle()
    assert (world.status.phase, world.condition("Deployed")[0]) == ("Succeeded", "True")


def test_without_deploy_in_the_spec_no_server_stays(world):
    answered(world)
    world.edit(deploy=None)
    assert standing(world) == {}


@pytest.mark.parametrize("verb", ["suspend", "cancel"])
def test_a_server_that_answers_outlives_suspending_and_cancelling(world, verb):
    job = answered(world)
    if verb == "suspend":
        world.edit(suspend=True)
    else:
        world.cancel("now")
    assert standing(world) == {job: True}


def test_a_service_that_somebody_deleted_is_put_back_in_front_of_the_old_server(world):
    old = answered(world)
    world.edit(deploy={"replicas": 2})
    new = world.start("deploy")
    world.cluster.servers[old] = replace(world.cluster.servers[old], current=False)
    world.settle()
    assert standing(world) == {old: True}
    world.complete("deploy", lasting=True)
    assert standing(world) == {new: True}


def test_an_old_server_that_is_down_is_told_of_while_a_new_one_is_made(world):
    old = answered(world)
    world.edit(seed=5)
    down = Waiting(Reason.SERVER_NOT_READY, "none of 1 is ready")
    world.cluster.servers[old] = replace(world.cluster.servers[old], trouble=down)
    world.settle()
    assert world.stage("deploy").message == "waits for push; meanwhile none of 1 is ready"
