"""Training with several processes and nodes: what identifies it, what it costs, and nodes for only some of its pods."""

from datetime import timedelta
from decimal import Decimal

import pytest
from pydantic import ValidationError
from support.operator.placements import (
    FULL,
    H100,
    choice,
    end_stopped,
    placed,
    settings,
    training,
)
from support.operator.scenario import Scenario, a_pipeline

from finetune_operator.api.conditions import Reason
from finetune_operator.core.capacity.nodes import offers
from finetune_operator.core.observation import Blocker

SHARED = {"workspace": {"accessMode": "ReadWriteMany"}}
MINUTE = timedelta(minutes=1)
QUOTA = Blocker(Reason.WAITING_FOR_QUOTA, "exceeded quota")


def gpus(count, **more):
    return {"resources": {"limits": {"nvidia.com/gpu": count}}, **more}


def recipe_and_identity(**train):
    scenario = Scenario(a_pipeline(**SHARED, train=train)).run_before("train")
    return scenario.config("train").recipe, scenario.stage("train").identity


# Processes.


@pytest.mark.parametrize(
    ("train", "per_node", "processes"),
    [
        ({}, None, 1),
        ({"pod": gpus(1)}, None, 1),
        ({"pod": gpus(4)}, 4, 4),
        ({"pod": gpus(4), "processesPerNode": 4}, 4, 4),
        ({"nodes": 2}, None, 2),
        ({"nodes": 2, "pod": gpus(8)}, 8, 16),
        ({"processesPerNode": 3}, 3, 3),
        ({"nodes": 2, "pod": gpus(8, command=["torchrun"])}, None, 2),
    ],
)
def test_each_accelerator_gets_a_process(train, per_node, processes):
    recipe, _ = recipe_and_identity(**train)
    assert recipe.processes_per_node == per_node
    assert recipe.processes == processes
    assert a_pipeline(**SHARED, train=train).train.processes == processes


def test_one_process_has_one_identity_however_it_is_written():
    _, absent = recipe_and_identity()
    assert {
        recipe_and_identity(**same)[1]
        for same in ({"processesPerNode": 1}, {"pod": gpus(1)}, {"nodes": 1})
    } == {absent}


def test_number_of_processes_is_part_of_the_identity():
    """Other processes see other rows, and add gradients in another order."""
    identities = [
        recipe_and_identity(**train)[1]
        for train in ({}, {"pod": gpus(2)}, {"nodes": 2}, {"processesPerNode": 4})
    ]
    assert len(set(identities)) == 4


def test_gpus_of_the_pod_defaults_count():
    spec = a_pipeline(podDefaults=gpus(1), train={"processesPerNode": 1})
    assert Scenario(spec).run_before("train").config("train").recipe.processes == 1


@pytest.mark.parametrize("count", [1, 8])
def test_processes_must_be_as_many_as_accelerators(count):
    with pytest.raises(
        ValidationError, match=r"processesPerNode: is not the number of accelerators"
    ):
        a_pipeline(train={"processesPerNode": 2, "pod": gpus(count)})
    own = a_pipeline(
        train={
            "processesPerNode": 2,
            "pod": gpus(count, command=["torchrun"]),
        }
    )
    assert own.train.pod.resources.accelerators == count


@pytest.mark.parametrize(
    ("workspace", "is_valid"),
    [
        ({}, False),
        ({"accessMode": "ReadWriteOncePod"}, False),
        ({"accessMode": "ReadWriteMany"}, True),
        ({"existingClaim": "shared"}, True),
    ],
)
def test_several_nodes_need_a_shared_workspace(workspace, is_valid):
    if is_valid:
        assert a_pipeline(train={"nodes": 2}, workspace=workspace).train.pods == 2
    else:
        with pytest.raises(
            ValidationError, match=r"train.nodes: all nodes mount the workspace"
        ):
            a_pipeline(train={"nodes": 2}, workspace=workspace)


# Money.


def several(*classes, nodes=2, **train):
    """Return a scenario whose train stage has nodes of one GPU each and is about to start."""
    spec = a_pipeline(
        **SHARED,
        train={
            "pod": gpus(1),
            "nodes": nodes,
            **train,
        },
    )
    return Scenario(spec, settings=settings(*classes)).run_before("train")


def test_price_and_cost_count_every_node():
    scenario = several(*H100, nodes=4, pod=gpus(8), placement={"capacity": "OnDemand"})
    assert scenario.attempt("train").price == Decimal("3.10") * 32
    scenario.cluster.start(scenario.attempt("train").job)
    scenario.after(1800).complete("train").reconcile()
    assert scenario.stage("train").attempts[0].cost == Decimal("49.6000")


def test_more_nodes_are_interrupted_more_often():
    single, four = (several(*H100, nodes=nodes) for nodes in (1, 4))
    rates = [
        [
            offer.interruptions_per_hour
            for offer in offers(
                scenario.spec.train, "Spot", scenario.settings.placement_defaults
            )
        ]
        for scenario in (single, four)
    ]
    assert rates == [[None], [0.2]]
    assert "0.2 interruptions of Spot an hour" in choice(four).message


# Nodes for all pods, or for none.


def find_nodes_for_some(scenario, blocker=FULL):
    """Make the newest attempt hold nodes for some of its pods from now on."""
    job = scenario.attempt("train").job
    now = scenario.cluster.now
    since = {"unschedulable_since": now} if blocker is FULL else {}
    scenario.cluster.update_job(job, blocker=blocker, incomplete_since=now, **since)
    scenario.reconcile_until_stable()


def is_stopped(scenario):
    return scenario.cluster.jobs[scenario.attempt("train").job].asked_to_stop


def test_incomplete_attempt_falls_back_to_on_demand():
    scenario = several(*H100)
    find_nodes_for_some(scenario)
    assert (scenario.stage("train").state, scenario.stage("train").reason) == (
        "Queued",
        "WaitingForCapacity",
    )
    scenario.after(599).reconcile_until_stable()
    assert not is_stopped(scenario)
    assert scenario.requeue_after == timedelta(seconds=1)
    scenario.after(1).reconcile_until_stable()
    end_stopped(scenario)
    scenario.after(10).reconcile_until_stable()
    assert placed(scenario) == ("OnDemand", "h100")
    assert (
        scenario.stage("train").interruptions,
        scenario.stage("train").failures,
    ) == (0, 0)


def test_incomplete_attempt_gives_up_nodes_it_can_only_get_again():
    """Two attempts that hold half of the nodes each would wait for each other for ever."""
    scenario = several(H100[1], placement={"capacity": "OnDemand"})
    waits = []
    for _ in range(3):
        find_nodes_for_some(scenario)
        began = scenario.cluster.now
        while not is_stopped(scenario):
            scenario.after(60).reconcile_until_stable()
        held = scenario.cluster.now - began
        end_stopped(scenario)
        assert scenario.stage("train").running_attempt is None
        waits.append((held, scenario.requeue_after))
        scenario.after(scenario.requeue_after.total_seconds()).reconcile_until_stable()
    assert [(held / MINUTE, pause.total_seconds()) for held, pause in waits] == [
        (10, 10),
        (20, 20),
        (20, 40),
    ]
    assert scenario.stage("train").running_attempt.number == 4


def test_attempt_without_any_node_waits_for_its_only_class():
    scenario = several(H100[1], placement={"capacity": "OnDemand"})
    job = scenario.attempt("train").job
    scenario.cluster.update_job(
        job, blocker=FULL, unschedulable_since=scenario.cluster.now
    )
    scenario.after(3600).reconcile_until_stable()
    assert not is_stopped(scenario)


def test_quota_for_some_pods_ends_the_attempt_and_no_class():
    """Another class of nodes would not help, and costs more."""
    scenario = several(*H100)
    find_nodes_for_some(scenario, QUOTA)
    scenario.after(600).reconcile_until_stable()
    assert scenario.attempt("train").stopping is Reason.WAITING_FOR_QUOTA
    end_stopped(scenario)
    scenario.after(10).reconcile_until_stable()
    assert placed(scenario) == ("Spot", "h100-spot")


def test_started_attempt_is_never_given_up_for_a_missing_node():
    """A pod that is lost has evidence, and its end counts as an interruption."""
    scenario = several(*H100)
    job = scenario.attempt("train").job
    scenario.cluster.start(job)
    scenario.reconcile_until_stable()
    scenario.cluster.update_job(
        job, blocker=FULL, started_at=None, incomplete_since=scenario.cluster.now
    )
    scenario.after(3600).reconcile_until_stable()
    assert not is_stopped(scenario)


def test_suspended_attempt_starts_at_once_when_resumed():
    scenario = several(*H100)
    scenario.edit(suspend=True).reconcile_until_stable()
    end_stopped(scenario)
    scenario.edit(suspend=False).reconcile_until_stable()
    assert scenario.stage("train").running_attempt.number == 2


def test_end_names_the_pod_that_caused_it():
    scenario = several(*H100)
    job = scenario.attempt("train").job
    scenario.cluster.start(job)
    scenario.cluster.update_job(job, pod="pod 1")
    scenario.cluster.evict(job, 40, 40, "evicted on spot-1")
    scenario.reconcile()
    assert (
        scenario.stage("train").attempts[0].message
        == "pod 1: evicted on spot-1; stopped at step 40, saved at step 40"
    )
    assert scenario.stage("train").interruptions == 1


def test_single_pod_starts_again_at_once():
    """What it waits for, it does not hold."""
    scenario = training(("b", "Spot", "0.90"), *H100)
    scenario.cluster.update_job(
        scenario.attempt("train").job,
        blocker=FULL,
        unschedulable_since=scenario.cluster.now,
    )
    scenario.reconcile_until_stable()
    scenario.after(600).reconcile_until_stable()
    end_stopped(scenario)
    attempt = scenario.stage("train").running_attempt
    assert attempt
    assert attempt.number == 2
