"""Node classes without a free node: how long an attempt waits for one, and where it goes then."""

import re
from datetime import timedelta

import pytest
from support.operator.placements import (
    H100,
    choice,
    end_stopped,
    find_no_node,
    interrupt,
    placed,
    training,
    wait_until_moved,
)
from support.operator.scenario import START

from finetune_operator.api.conditions import Reason
from finetune_operator.core.observation import Blocker

MINUTE = timedelta(minutes=1)


def test_full_spot_class_is_left_for_the_next_and_then_on_demand():
    scenario = training(("b", "Spot", "0.90"), *H100)
    assert placed(scenario) == ("Spot", "h100-spot")
    for expected in (("Spot", "b"), ("OnDemand", "h100")):
        find_no_node(scenario)
        assert scenario.requeue_after == timedelta(
            minutes=5
        )  # the poll interval is shorter than the limit
        scenario.after(599).reconcile_until_stable()
        assert not scenario.cluster.jobs[scenario.attempt("train").job].asked_to_stop
        assert scenario.requeue_after == timedelta(seconds=1)
        scenario.after(1).reconcile_until_stable()
        end_stopped(scenario)
        assert placed(scenario) == expected
    assert (
        choice(scenario).message == "OnDemand (h100): no Spot node was found within 10m"
    )
    assert scenario.status.interruptions == 0
    assert scenario.stage("train").failures == 0


def test_full_spot_classes_wait_in_turns_while_deadline_allows():
    classes = (("b", "Spot", "0.90"), ("dear", "Spot", "1.60"), *H100)
    deadline = (START + timedelta(hours=6)).isoformat()
    scenario = training(
        *classes, deadline=deadline, placement={"expectedSeconds": 4 * 3600}
    )
    chosen: list[str | None] = []
    while len(chosen) < 12 and placed(scenario)[0] == "Spot":
        chosen.append(placed(scenario)[1])
        find_no_node(scenario)
        while not scenario.cluster.jobs[scenario.attempt("train").job].asked_to_stop:
            scenario.after(60).reconcile_until_stable()
        end_stopped(scenario)
    # 52 minutes to spare: 120 less a reserve of a quarter of the work, two restarts and a checkpoint.
    assert chosen == ["h100-spot", "b", "h100-spot", "b", "dear"]
    assert placed(scenario) == ("OnDemand", "h100")


def test_requested_spot_waits_where_there_is_no_other_class():
    scenario = training(
        *H100, placement={"capacity": "Spot", "fallback": {"afterPendingSeconds": 60}}
    )
    find_no_node(scenario)
    scenario.after(3600).reconcile_until_stable()
    assert not scenario.cluster.jobs[scenario.attempt("train").job].asked_to_stop


def test_wait_for_quota_is_no_lack_of_capacity():
    scenario = training(*H100)
    job = scenario.attempt("train").job
    blocker = Blocker(Reason.WAITING_FOR_QUOTA, "exceeded quota")
    scenario.cluster.update_job(
        job, blocker=blocker, unschedulable_since=scenario.cluster.now
    )
    scenario.after(3600).reconcile_until_stable()
    assert not scenario.cluster.jobs[job].asked_to_stop


def test_many_full_spot_classes_lead_to_on_demand():
    """Each wait takes ten minutes: the first class must not be tried again before on-demand nodes are."""
    scenario = training(
        *((f"s{number}", "Spot", f"0.8{number}") for number in range(5)), H100[1]
    )
    for number in range(5):
        assert placed(scenario) == ("Spot", f"s{number}")
        find_no_node(scenario)
        scenario.after(600).reconcile_until_stable()
        end_stopped(scenario)
    assert placed(scenario) == ("OnDemand", "h100")


def test_waits_do_not_push_out_the_attempt_that_knows_the_steps():
    scenario = training(*H100, placement={"fallback": {"afterPendingSeconds": 60}})
    interrupt(scenario, 56, start=0, last=560, saved=500)
    for _ in range(11):
        find_no_node(scenario)
        scenario.after(60).reconcile_until_stable()
        if not scenario.cluster.jobs[scenario.attempt("train").job].asked_to_stop:
            break
        end_stopped(scenario)
        scenario.edit(train={"maxFailures": scenario.attempt("train").number})
        scenario.after(4000).reconcile_until_stable()
    train = scenario.stage("train")
    assert train.attempts[0].number == 1
    job = scenario.attempt("train").job
    scenario.cluster.start(job)
    scenario.cluster.progress(
        job, 510, start_step=500, saved_step=500, step_seconds=6.0, total=10_000
    )
    scenario.reconcile_until_stable()
    assert scenario.status.lost_steps == 60


def test_full_on_demand_classes_are_tried_once_each():
    classes = tuple((f"od{number}", "OnDemand", f"3.1{number}") for number in range(3))
    scenario = training(*classes, placement={"capacity": "OnDemand"})
    for _ in range(6):
        find_no_node(scenario)
        scenario.after(600).reconcile_until_stable()
        if scenario.cluster.jobs[scenario.attempt("train").job].asked_to_stop:
            end_stopped(scenario)
    assert [attempt.node_class for attempt in scenario.stage("train").attempts] == [
        "od0",
        "od1",
        "od2",
        "od0",
    ]


def test_full_nodes_of_both_capacities_wait_longer_each_time():
    """Nothing is lost by trying another class while there is no node, and a node may need long to boot."""
    scenario = training(("b", "Spot", "0.90"), *H100)
    waits = []
    for _ in range(15):
        node_class = placed(scenario)[1]
        waits.append((node_class, wait_until_moved(scenario)))
    minutes = [(name, round(wait / MINUTE)) for name, wait in waits if wait]
    assert minutes[:6] == [
        ("h100-spot", 10),
        ("b", 10),
        ("h100", 10),
        ("h100-spot", 20),
        ("b", 20),
        ("h100", 20),
    ]
    assert [wait for _, wait in minutes[6:]] == [40, 40, 40, 80, 80, 80, 120, 120, 120]
    assert scenario.status.interruptions == 0


@pytest.mark.parametrize(
    "spec",
    [
        {"placement": {"expectedSeconds": 1200}},
        {"maxInterruptions": 0},
        {
            "placement": {"expectedSeconds": 14400},
            "deadline": (START + timedelta(hours=4.9)).isoformat(),
        },
    ],
    ids=["short stage", "last interruption", "deadline"],
)
def test_stage_without_on_demand_nodes_runs_on_spot(spec):
    """Whatever speaks against spot nodes: without a node it never ends."""
    scenario = training(*H100, **spec)
    assert placed(scenario)[0] == "OnDemand"
    assert wait_until_moved(scenario) == timedelta(minutes=10)
    assert placed(scenario) == ("Spot", "h100-spot")
    assert choice(scenario).message.startswith(
        "Spot (h100-spot): no OnDemand node was found within 10m"
    )
    assert wait_until_moved(scenario) == timedelta(
        minutes=10
    )  # an autoscaler needs minutes for a node


@pytest.mark.parametrize("classes", [2, 11])
def test_history_does_not_hide_that_spot_classes_are_full(classes):
    """The status lists ten attempts: more waits, or runs before them, must not make the operator forget the waits."""
    scenario = training(
        *((f"s{number:02}", "Spot", f"0.{80 + number}") for number in range(classes)),
        H100[1],
    )
    for number in range(9):
        interrupt(
            scenario,
            90,
            start=900 * number,
            last=900 * number + 900,
            saved=900 * number + 900,
        )
    for number in range(classes):
        assert placed(scenario) == ("Spot", f"s{number:02}")
        assert wait_until_moved(scenario)
    assert placed(scenario) == ("OnDemand", "h100")


def test_choice_says_why_a_cheaper_class_was_left():
    scenario = training(("b", "Spot", "0.90"), *H100)
    wait_until_moved(scenario)
    assert choice(scenario).message.startswith(
        "Spot (b): h100-spot had no node; 0.90 against 3.10 USD an hour"
    )


def test_requested_class_that_was_left_is_no_warning():
    scenario = training(("b", "Spot", "0.90"), *H100, placement={"capacity": "Spot"})
    wait_until_moved(scenario)
    assert choice(scenario).message == "Spot (b): h100-spot had no node"
    assert "SpotCostsMore" not in scenario.events


def test_limit_of_the_user_is_said():
    deadline = (START + timedelta(hours=100)).isoformat()
    placement = {"expectedSeconds": 14400, "fallback": {"afterPendingSeconds": 120}}
    scenario = training(*H100, deadline=deadline, placement=placement)
    assert wait_until_moved(scenario) == timedelta(minutes=2)
    expected = (
        "OnDemand (h100): no Spot node was found within 2m or in time for the deadline"
    )
    assert choice(scenario).message == expected


@pytest.mark.parametrize("hours", [0.1, 20])
def test_time_in_a_queue_is_no_start(hours):
    """It costs nothing, and says nothing of the next start."""
    deadline = (START + timedelta(hours=100)).isoformat()
    scenario = training(*H100, deadline=deadline, placement={"expectedSeconds": 60_000})
    scenario.after(hours * 3600).reconcile_until_stable()
    interrupt(scenario, 60, start=0, last=590, saved=590)
    assert placed(scenario) == ("Spot", "h100-spot")
    assert re.search("an hour cost [56]m", choice(scenario).message)


def test_requested_spot_tries_dearer_class_before_a_full_one():
    placement = {"capacity": "Spot", "expectedSeconds": 14400}
    classes = (("b", "Spot", "0.90"), ("dear", "Spot", "1.60"), *H100)
    scenario = training(*classes, placement=placement)
    chosen = [(placed(scenario)[1], wait_until_moved(scenario)) for _ in range(5)]
    minutes = [(name, round(wait / MINUTE)) for name, wait in chosen if wait]
    assert minutes == [
        ("h100-spot", 10),
        ("b", 10),
        ("dear", 10),
        ("h100-spot", 20),
        ("b", 20),
    ]


def test_interrupted_on_demand_class_is_no_full_one():
    """The node was drained three times: there is one, and the last interruption is not risked on spot nodes."""
    scenario = training(*H100, maxInterruptions=3, placement={"expectedSeconds": 1200})
    for number in range(3):
        interrupt(
            scenario,
            5,
            start=50 * number,
            last=50 * number + 50,
            saved=50 * number + 50,
        )
    assert placed(scenario) == ("OnDemand", "h100")


def test_waits_do_not_hide_the_measured_speed():
    """Ten classes are full after one attempt has run: the deadline needs its steps, which no estimate has."""
    classes = tuple(
        (f"s{number:02}", "Spot", f"0.{80 + number}") for number in range(10)
    )
    deadline = (START + timedelta(hours=100)).isoformat()
    scenario = training(
        *classes,
        H100[1],
        deadline=deadline,
        placement={"fallback": {"afterPendingSeconds": 600}},
    )
    interrupt(scenario, 56, start=0, last=560, saved=560)
    for _ in range(10):
        wait_until_moved(scenario)
    assert "duration is not known" not in choice(scenario).message
    assert any(attempt.step_seconds for attempt in scenario.stage("train").attempts)


def test_wait_between_two_attempts_keeps_the_steps_of_the_first():
    scenario = training(*H100)
    job = scenario.start("train")
    scenario.after(900)
    scenario.cluster.progress(
        job, 100, start_step=0, saved_step=100, step_seconds=6.0, total=10_000
    )
    scenario.reconcile()
    scenario.lose_node(job)
    scenario.pass_interruption_backoff()
    wait_until_moved(scenario)
    job = scenario.start("train")
    scenario.cluster.progress(
        job, 150, start_step=140, saved_step=140, step_seconds=6.0, total=10_000
    )
    scenario.reconcile_until_stable()
    assert [attempt.steps for attempt in scenario.stage("train").attempts][:2] == [
        140,
        None,
    ]


def test_waits_on_on_demand_nodes_do_not_delay_the_return():
    """Spot and on-demand nodes were full in turns; then an on-demand attempt runs, and spot is free again."""
    scenario = training(*H100)
    for _ in range(4):
        wait_until_moved(scenario)
    wait_until_moved(scenario)
    assert placed(scenario)[0] == "OnDemand"
    job = scenario.start("train")
    scenario.cluster.progress(
        job, 10, start_step=0, saved_step=0, step_seconds=6.0, total=100_000
    )
    scenario.after(1799).reconcile_until_stable()
    assert not scenario.cluster.jobs[job].asked_to_stop
    scenario.after(1).reconcile_until_stable()
    assert scenario.cluster.jobs[job].asked_to_stop
