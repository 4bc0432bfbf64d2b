"""Where the attempts of a stage run: scenarios of the whole reconcile loop, with node classes and prices."""

import re
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from support.operator.placements import (
    A100,
    GPU,
    H100,
    choice,
    end_stopped,
    find_no_node,
    interrupt,
    placed,
    running_on_demand,
    settings,
    training,
)
from support.operator.scenario import START, Scenario, a_pipeline, a_result

from finetune_operator.api.amounts import AMOUNT
from finetune_operator.api.conditions import Reason
from finetune_operator.api.placement import PlacementDefaults
from finetune_operator.core.capacity.nodes import pod_placement


def test_cheaper_spot_is_chosen_with_its_numbers():
    scenario = training(*H100, placement={"expectedSeconds": 4 * 3600})
    assert placed(scenario) == ("Spot", "h100-spot")
    assert choice(scenario).message == (
        "Spot (h100-spot): 0.80 against 3.10 USD an hour on OnDemand, 0.05 interruptions of Spot an hour cost 4m30s"
        " each: expected 3.21 USD against 12.40 USD (prices of 2029-12-01, 31 days old)"
    )
    assert "CapacityChosen" in scenario.events
    assert scenario.condition("Trained") == ("Unknown", "Progressing")
    selector = scenario.cluster.jobs[
        scenario.attempt("train").job
    ].template.placement.node_selector
    assert selector == {"class": "h100-spot"}


def test_dearer_spot_is_not_chosen():
    scenario = training(*A100)
    assert placed(scenario) == ("OnDemand", "a100")
    assert choice(scenario).message.startswith(
        "OnDemand (a100): 1.04 against 1.14 USD an hour on Spot"
    )


def test_requested_spot_that_costs_more_is_warned_about():
    scenario = training(*A100, placement={"capacity": "Spot"})
    assert placed(scenario) == ("Spot", "a100-spot")
    warning = next(
        event
        for _, event in scenario.cluster.emitted
        if event.reason == "SpotCostsMore"
    )
    assert warning.type == "Warning"
    assert (
        "costs more than OnDemand: 1.14 against 1.04 USD an hour on OnDemand"
        in warning.message
    )
    job = scenario.attempt("train").job
    scenario.cluster.start(job)
    scenario.reconcile_until_stable()
    conditions = {condition.type: condition for condition in scenario.status.conditions}
    condition = conditions["Trained"]
    assert "costs more than OnDemand" in condition.message


@pytest.mark.parametrize(
    "classes",
    [(), (("h100-spot", "Spot", None), H100[1]), (H100[0], ("h100", "OnDemand", None))],
)
def test_missing_price_stops_nothing(classes):
    scenario = training(*classes)
    assert placed(scenario)[0] == "Spot"
    scenario.finish()
    assert scenario.status.phase == "Succeeded"


def test_short_stage_runs_on_demand():
    assert placed(training(*H100, placement={"expectedSeconds": 1200})) == (
        "OnDemand",
        "h100",
    )


@pytest.mark.parametrize(("hours", "capacity"), [(4.2, "OnDemand"), (6, "Spot")])
def test_deadline_decides_whether_there_is_time_for_spot(hours, capacity):
    deadline = (START + timedelta(hours=hours)).isoformat()
    scenario = training(
        *H100, deadline=deadline, placement={"expectedSeconds": 4 * 3600}
    )
    assert placed(scenario)[0] == capacity


def test_deadline_with_unknown_duration_runs_on_demand():
    scenario = training(*H100, deadline=(START + timedelta(hours=9)).isoformat())
    assert placed(scenario)[0] == "OnDemand"
    assert "set placement.expectedSeconds" in choice(scenario).message


def test_last_allowed_interruption_leads_to_on_demand():
    """With much time to spare, quick interruptions are no reason to leave: the budget of the stage is."""
    deadline = (START + timedelta(hours=300)).isoformat()
    scenario = training(
        *H100,
        deadline=deadline,
        maxInterruptions=3,
        placement={"expectedSeconds": 60_000},
    )
    for number in range(3):
        assert placed(scenario)[0] == "Spot"
        interrupt(
            scenario,
            5,
            start=50 * number,
            last=50 * number + 50,
            saved=50 * number + 50,
        )
    assert placed(scenario) == ("OnDemand", "h100")
    assert choice(scenario).message == (
        "OnDemand (h100): one more interruption would fail the stage, by its maxInterruptions"
    )
    scenario.cluster.start(scenario.attempt("train").job)
    scenario.after(7200).reconcile_until_stable()
    assert not scenario.cluster.jobs[scenario.attempt("train").job].asked_to_stop


@pytest.mark.parametrize(("minutes", "capacity"), [(4, "Spot"), (25, "OnDemand")])
def test_attempt_without_a_step_shows_how_long_a_start_takes(minutes, capacity):
    """Of 6:10 h, 4 h are work and 1 h the reserve of an estimate: three starts do not fit into the rest."""
    deadline = (START + timedelta(hours=6, minutes=10)).isoformat()
    scenario = training(
        *H100, deadline=deadline, placement={"expectedSeconds": 4 * 3600}
    )
    assert placed(scenario)[0] == "Spot"
    job = scenario.start("train")
    scenario.cluster.progress(job, 0, note="loading the model")
    scenario.after(minutes * 60).reconcile_until_stable()
    scenario.lose_node(job)
    scenario.pass_interruption_backoff()
    assert placed(scenario)[0] == capacity


def test_three_quick_interruptions_lead_to_on_demand():
    scenario = training(*H100)
    for number in range(3):
        assert placed(scenario)[0] == "Spot"
        interrupt(
            scenario,
            10,
            start=100 * number,
            last=100 * number + 100,
            saved=100 * number + 100,
        )
    assert placed(scenario) == ("OnDemand", "h100")
    assert choice(scenario).cause == "Interruptions"


def test_interruptions_after_hours_stay_on_spot():
    scenario = training(*H100)
    for number in range(5):
        interrupt(
            scenario,
            90,
            start=900 * number,
            last=900 * number + 900,
            saved=900 * number + 900,
        )
    assert placed(scenario)[0] == "Spot"


def test_attempts_without_a_durable_step_lead_to_on_demand():
    scenario = training(
        *H100,
        placement={"fallback": {"afterInterruptions": 9, "afterFruitlessAttempts": 2}},
    )
    for _ in range(2):
        interrupt(scenario, 10, start=0, last=100, saved=0)
    assert placed(scenario)[0] == "OnDemand"
    assert choice(scenario).cause == "NoProgress"


def test_on_demand_attempt_returns_to_spot_where_that_pays():
    scenario, job = running_on_demand(step=10)
    scenario.after(1799).reconcile_until_stable()
    assert not scenario.cluster.jobs[job].asked_to_stop
    assert scenario.requeue_after == timedelta(seconds=1)
    scenario.after(1).reconcile_until_stable()
    assert scenario.attempt("train").stopping is Reason.PLACEMENT_CHANGED
    end_stopped(scenario)
    assert placed(scenario) == ("Spot", "h100-spot")
    assert scenario.status.interruptions == 0
    assert scenario.stage("train").failures == 0


def test_evicted_attempt_whose_job_has_not_ended_is_not_moved():
    """The pod has ended, and its Job ends a second later: the eviction must count as one."""
    scenario, job = running_on_demand(step=10)
    scenario.after(1800)
    scenario.cluster.update_job(job, exit_code=75, disruption="evicted")
    scenario.reconcile_until_stable()
    assert scenario.attempt("train").stopping is None
    scenario.cluster.evict(job, 100, 100)
    scenario.reconcile()
    assert [attempt.outcome for attempt in scenario.stage("train").attempts][-2:] == [
        "Interrupted",
        "Running",
    ]


def test_on_demand_attempt_that_is_nearly_done_stays():
    scenario, job = running_on_demand(step=9_990)
    scenario.after(7200).reconcile_until_stable()
    assert not scenario.cluster.jobs[job].asked_to_stop


def test_own_node_selector_excludes_other_classes():
    scenario = training(*H100, *A100, pod={**GPU, "nodeSelector": {"class": "a100"}})
    assert placed(scenario) == (
        "Spot",
        None,
    )  # no spot class has that label, so that the price of Spot is not known
    scenario = training(*H100, *A100, pod={**GPU, "nodeSelector": {"zone": "b"}})
    assert placed(scenario) == ("Spot", "h100-spot")


def test_stage_without_accelerator_uses_no_class_that_has_one():
    scenario = training(*H100)
    prepare = scenario.stage("prepare").attempts[0]
    assert (prepare.capacity, prepare.node_class, prepare.price) == (
        "OnDemand",
        None,
        None,
    )


def test_price_counts_every_accelerator():
    eight = {
        "resources": {"limits": {"nvidia.com/gpu": 8}},
        "image": "own",
        "command": ["train"],
    }
    assert training(*H100, pod=eight).attempt("train").price == Decimal("6.40")


def test_job_is_created_on_the_recorded_nodes():
    """The operator is killed between the write of the status and the creation of the Job, and the prices change."""
    scenario = Scenario(a_pipeline(train={"pod": GPU}), settings=settings(*H100))
    scenario.start("prepare")
    attempt = scenario.attempt("prepare")
    scenario.cluster.complete(attempt.job, a_result("prepare", attempt.identity))
    scenario.cluster.inject_fault = kill_before_apply
    with pytest.raises(InterruptedError):
        scenario.reconcile()
    scenario.cluster.inject_fault = lambda _moment: None
    assert placed(scenario) == ("Spot", "h100-spot")
    scenario.settings = settings(("h100-spot", "Spot", "9.00"), H100[1])
    scenario.reconcile_until_stable()
    placement = scenario.cluster.jobs[scenario.attempt("train").job].template.placement
    assert (placement.capacity, placement.node_selector) == (
        "Spot",
        {"class": "h100-spot"},
    )


def kill_before_apply(moment: str) -> None:
    if moment == "before apply":
        raise InterruptedError


def test_change_of_expectations_stops_no_attempt():
    scenario = training(*H100)
    job = scenario.attempt("train").job
    scenario.cluster.start(job)
    scenario.edit(train={"placement": {"expectedSeconds": 90_000}})
    scenario.reconcile_until_stable()
    assert not scenario.cluster.jobs[job].asked_to_stop
    scenario.edit(train={"placement": {"capacity": "OnDemand"}})
    scenario.reconcile_until_stable()
    assert scenario.cluster.jobs[job].asked_to_stop


def test_used_up_estimate_keeps_the_cheaper_capacity():
    scenario = training(*A100, placement={"expectedSeconds": 7200})
    assert placed(scenario) == ("OnDemand", "a100")
    job = scenario.start("train")
    scenario.after(7300)
    scenario.lose_node(job)
    scenario.pass_interruption_backoff()
    assert placed(scenario) == ("OnDemand", "a100")


def test_program_that_saves_nothing_is_not_moved():
    scenario = training(
        *H100,
        pod={**GPU, "image": "own", "command": ["train"]},
        placement={"expectedSeconds": 90_000},
    )
    find_no_node(scenario)
    scenario.after(600).reconcile_until_stable()
    end_stopped(scenario)
    assert placed(scenario) == ("OnDemand", "h100")
    job = scenario.start("train")
    scenario.after(7200).reconcile_until_stable()
    assert not scenario.cluster.jobs[job].asked_to_stop


def test_first_step_does_not_decide_about_a_deadline():
    deadline = (START + timedelta(hours=4.5)).isoformat()
    scenario = training(
        *H100, deadline=deadline, placement={"expectedSeconds": 4 * 3600}
    )
    job = scenario.start("train")
    scenario.cluster.progress(
        job, 1, start_step=0, saved_step=0, step_seconds=3.0, total=2400
    )
    scenario.after(30).reconcile_until_stable()
    assert not scenario.cluster.jobs[job].asked_to_stop


def test_capacity_of_another_version_stops_nothing():
    placement = pod_placement(a_pipeline().train, "Reserved", "r", PlacementDefaults())
    assert placement.node_selector == {}


@pytest.mark.parametrize("price", ["8E+1", "2e1", 1e6, "0.80", 0])
def test_price_is_written_without_an_exponent(price):
    defaults = settings(("h100", "OnDemand", price)).placement_defaults
    assert defaults
    assert re.fullmatch(AMOUNT, str(defaults.node_classes[0].price))


def test_deadline_that_has_passed_is_said():
    deadline = (START - timedelta(days=3)).isoformat()
    scenario = training(*H100, deadline=deadline, placement={"expectedSeconds": 14400})
    assert (
        choice(scenario).message
        == "OnDemand (h100): the deadline was 3d ago, and 4h of work are left"
    )


def test_few_steps_say_more_than_a_used_up_estimate():
    deadline = (START + timedelta(hours=1000)).isoformat()
    scenario = training(*H100, deadline=deadline, placement={"expectedSeconds": 3600})
    job = scenario.start("train")
    scenario.after(4000)
    scenario.cluster.progress(
        job, 9, start_step=0, saved_step=9, step_seconds=420.0, total=100
    )
    scenario.reconcile()
    scenario.cluster.evict(job, 9, 9)
    scenario.pass_interruption_backoff()
    assert placed(scenario)[0] == "Spot"
    assert choice(scenario).cause == "LowerCost"


def test_program_that_saves_nothing_loses_all_of_its_work():
    """Ten hours may be lost just before the end: the deadline must leave the time to do them again."""
    own: dict[str, Any] = {
        "pod": {**GPU, "image": "own", "command": ["train"]},
        "placement": {"expectedSeconds": 36_000},
    }
    for hours, capacity in ((18, "OnDemand"), (24, "Spot")):
        deadline = (START + timedelta(hours=hours)).isoformat()
        assert placed(training(*H100, deadline=deadline, **own))[0] == capacity


def test_estimate_of_later_stages_keeps_a_reserve():
    later = {"evaluate": {"placement": {"expectedSeconds": 14400}}}
    for minutes, capacity in ((600, "OnDemand"), (680, "Spot")):
        train = {"pod": GPU, "placement": {"expectedSeconds": 14400}}
        spec = {
            "deadline": (START + timedelta(minutes=minutes)).isoformat(),
            "train": train,
            **later,
        }
        scenario = Scenario(a_pipeline(**spec), settings=settings(*H100)).run_before(
            "train"
        )
        assert placed(scenario)[0] == capacity
