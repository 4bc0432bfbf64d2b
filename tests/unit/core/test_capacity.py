"""Where the attempts of a stage run: scenarios of the whole reconcile loop, with node classes and prices."""

import re
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from support.scenario import START, Scenario, a_pipeline, a_result

from finetune_operator.api.amounts import AMOUNT
from finetune_operator.api.conditions import Reason
from finetune_operator.api.placement import PlacementDefaults
from finetune_operator.api.status import PlacementStatus
from finetune_operator.core.observation import Blocker
from finetune_operator.core.placement import pod_placement
from finetune_operator.core.settings import Settings

GPU = {"resources": {"limits": {"nvidia.com/gpu": 1}}}
H100 = (("h100-spot", "Spot", "0.80"), ("h100", "OnDemand", "3.10"))
A100 = (("a100-spot", "Spot", "1.14"), ("a100", "OnDemand", "1.04"))
FULL = Blocker(Reason.WAITING_FOR_CAPACITY, "0/3 nodes are available")


def settings(*classes: tuple[str, str, str | None], **more: Any) -> Settings:
    found = [
        {
            "name": name,
            "capacity": capacity,
            "accelerator": "nvidia.com/gpu",
            "nodeSelector": {"class": name},
            "price": price,
            "priceDate": "2029-12-01",
        }
        for name, capacity, price in classes
    ]
    return Settings(placement_defaults=PlacementDefaults.model_validate({"nodeClasses": found, **more}))


def training(*classes: tuple[str, str, str | None], deadline: str | None = None, **train: Any) -> Scenario:
    """Return a scenario whose train stage has one GPU and is about to start."""
    more = {"deadline": deadline} if deadline else {}
    spec = a_pipeline(train={"pod": GPU, **train}, **more)
    return Scenario(spec, settings=settings(*classes)).run_before("train")


def placed(scenario: Scenario) -> tuple[str | None, str | None]:
    attempt = scenario.attempt("train")
    return attempt.capacity, attempt.node_class


def choice(scenario: Scenario) -> PlacementStatus:
    placement = scenario.stage("train").placement
    assert placement
    return placement


def find_no_node(scenario: Scenario) -> None:
    """Make the pod of the newest attempt wait for a node from now on."""
    job = scenario.attempt("train").job
    scenario.cluster.update_job(job, blocker=FULL, unschedulable_since=scenario.cluster.now)
    scenario.reconcile_until_stable()


def end_stopped(scenario: Scenario) -> None:
    """End the Job that was asked to stop."""
    job = scenario.attempt("train").job
    assert scenario.cluster.jobs[job].asked_to_stop
    scenario.cluster.evict(job, why=None)
    scenario.reconcile_until_stable()


def interrupt(scenario: Scenario, minutes: float, *, start: int, last: int, saved: int) -> None:
    """Run the newest attempt for some minutes, at ten steps a minute, and evict it."""
    job = scenario.attempt("train").job
    scenario.cluster.start(job)
    scenario.after(minutes * 60)
    scenario.cluster.progress(job, last, start_step=start, saved_step=saved, step_seconds=6.0, total=10_000)
    scenario.reconcile()
    scenario.cluster.evict(job, last, saved)
    scenario.reconcile()
    scenario.after((scenario.requeue_after or timedelta()).total_seconds())
    scenario.reconcile_until_stable()


def running_on_demand(*, step: int) -> tuple[Scenario, str]:
    """Return a scenario whose training runs on on-demand nodes because there were no others, and its Job."""
    scenario = training(*H100)
    find_no_node(scenario)
    scenario.after(600).reconcile_until_stable()
    end_stopped(scenario)
    job = scenario.attempt("train").job
    scenario.cluster.start(job)
    scenario.cluster.progress(job, step, start_step=0, saved_step=0, step_seconds=6.0, total=10_000)
    return scenario, job


def test_cheaper_spot_is_chosen_with_its_numbers():
    scenario = training(*H100, placement={"expectedSeconds": 4 * 3600})
    assert placed(scenario) == ("Spot", "h100-spot")
    assert choice(scenario).message == (
        "Spot (h100-spot): 0.80 against 3.10 USD an hour on OnDemand, 0.05 interruptions of Spot an hour cost 6m"
        " each: expected 3.22 USD against 12.40 USD (prices of 2029-12-01, 31 days old)"
    )
    assert "CapacityChosen" in scenario.events
    assert scenario.condition("Trained") == ("Unknown", "Progressing")
    selector = scenario.cluster.jobs[scenario.attempt("train").job].template.placement.node_selector
    assert selector == {"class": "h100-spot"}


def test_dearer_spot_is_not_chosen():
    scenario = training(*A100)
    assert placed(scenario) == ("OnDemand", "a100")
    assert choice(scenario).message.startswith("OnDemand (a100): 1.04 against 1.14 USD an hour on Spot")


def test_requested_spot_that_costs_more_is_warned_about():
    scenario = training(*A100, placement={"capacity": "Spot"})
    assert placed(scenario) == ("Spot", "a100-spot")
    warning = next(event for _, event in scenario.cluster.emitted if event.reason == "SpotCostsMore")
    assert warning.type == "Warning"
    assert "1.14 USD an hour against 1.04 on OnDemand" in warning.message
    job = scenario.attempt("train").job
    scenario.cluster.start(job)
    scenario.reconcile_until_stable()
    condition = next(one for one in scenario.status.conditions if one.type == "Trained")
    assert "costs more than OnDemand" in condition.message


@pytest.mark.parametrize("classes", [(), (("h100-spot", "Spot", None), H100[1]), (H100[0], ("h100", "OnDemand", None))])
def test_missing_price_stops_nothing(classes):
    scenario = training(*classes)
    assert placed(scenario)[0] == "Spot"
    scenario.finish()
    assert scenario.status.phase == "Succeeded"


def test_short_stage_runs_on_demand():
    assert placed(training(*H100, placement={"expectedSeconds": 1200})) == ("OnDemand", "h100")


@pytest.mark.parametrize(("hours", "capacity"), [(4.2, "OnDemand"), (6, "Spot")])
def test_deadline_decides_whether_there_is_time_for_spot(hours, capacity):
    deadline = (START + timedelta(hours=hours)).isoformat()
    scenario = training(*H100, deadline=deadline, placement={"expectedSeconds": 4 * 3600})
    assert placed(scenario)[0] == capacity


def test_deadline_with_unknown_duration_runs_on_demand():
    scenario = training(*H100, deadline=(START + timedelta(hours=9)).isoformat())
    assert placed(scenario)[0] == "OnDemand"
    assert "set placement.expectedSeconds" in choice(scenario).message


def test_full_spot_class_is_left_for_the_next_and_then_on_demand():
    scenario = training(("b", "Spot", "0.90"), *H100)
    assert placed(scenario) == ("Spot", "h100-spot")
    for expected in (("Spot", "b"), ("OnDemand", "h100")):
        find_no_node(scenario)
        assert scenario.requeue_after == timedelta(minutes=5)  # the poll interval is shorter than the limit
        scenario.after(599).reconcile_until_stable()
        assert not scenario.cluster.jobs[scenario.attempt("train").job].asked_to_stop
        assert scenario.requeue_after == timedelta(seconds=1)
        scenario.after(1).reconcile_until_stable()
        end_stopped(scenario)
        assert placed(scenario) == expected
    assert choice(scenario).message == "OnDemand (h100): no Spot node was found within 10m"
    assert (scenario.status.interruptions, scenario.stage("train").failures) == (0, 0)


def test_full_spot_classes_wait_in_turns_while_deadline_allows():
    classes = (("b", "Spot", "0.90"), ("dear", "Spot", "1.60"), *H100)
    deadline = (START + timedelta(hours=6)).isoformat()
    scenario = training(*classes, deadline=deadline, placement={"expectedSeconds": 4 * 3600})
    chosen = []
    while len(chosen) < 12 and placed(scenario)[0] == "Spot":
        chosen.append(placed(scenario)[1])
        find_no_node(scenario)
        while not scenario.cluster.jobs[scenario.attempt("train").job].asked_to_stop:
            scenario.after(60).reconcile_until_stable()
        end_stopped(scenario)
    # 52 minutes to spare: 120 less a reserve of a quarter of the work, two restarts and a checkpoint.
    assert chosen == ["h100-spot", "b", "h100-spot", "b", "dear"]
    assert placed(scenario) == ("OnDemand", "h100")


def test_last_allowed_interruption_leads_to_on_demand():
    """With much time to spare, quick interruptions are no reason to leave: the budget of the stage is."""
    deadline = (START + timedelta(hours=300)).isoformat()
    scenario = training(*H100, deadline=deadline, maxInterruptions=3, placement={"expectedSeconds": 60_000})
    for number in range(3):
        assert placed(scenario)[0] == "Spot"
        interrupt(scenario, 5, start=50 * number, last=50 * number + 50, saved=50 * number + 50)
    assert placed(scenario) == ("OnDemand", "h100")
    assert choice(scenario).message == (
        "OnDemand (h100): one more interruption would fail the stage: maxInterruptions is used up"
        " (prices of 2029-12-01, 31 days old)"
    )
    scenario.cluster.start(scenario.attempt("train").job)
    scenario.after(7200).reconcile_until_stable()
    assert not scenario.cluster.jobs[scenario.attempt("train").job].asked_to_stop


@pytest.mark.parametrize(("minutes", "capacity"), [(4, "Spot"), (25, "OnDemand")])
def test_attempt_without_a_step_shows_how_long_a_start_takes(minutes, capacity):
    """Of 6:10 h, 4 h are work and 1 h the reserve of an estimate: three starts do not fit into the rest."""
    deadline = (START + timedelta(hours=6, minutes=10)).isoformat()
    scenario = training(*H100, deadline=deadline, placement={"expectedSeconds": 4 * 3600})
    assert placed(scenario)[0] == "Spot"
    job = scenario.start("train")
    scenario.after(minutes * 60)
    scenario.lose_node(job)
    scenario.pass_interruption_backoff()
    assert placed(scenario)[0] == capacity


def test_requested_spot_waits_where_there_is_no_other_class():
    scenario = training(*H100, placement={"capacity": "Spot", "fallback": {"afterPendingSeconds": 60}})
    find_no_node(scenario)
    scenario.after(3600).reconcile_until_stable()
    assert not scenario.cluster.jobs[scenario.attempt("train").job].asked_to_stop


def test_wait_for_quota_is_no_lack_of_capacity():
    scenario = training(*H100)
    job = scenario.attempt("train").job
    blocker = Blocker(Reason.WAITING_FOR_QUOTA, "exceeded quota")
    scenario.cluster.update_job(job, blocker=blocker, unschedulable_since=scenario.cluster.now)
    scenario.after(3600).reconcile_until_stable()
    assert not scenario.cluster.jobs[job].asked_to_stop


def test_three_quick_interruptions_lead_to_on_demand():
    scenario = training(*H100)
    for number in range(3):
        assert placed(scenario)[0] == "Spot"
        interrupt(scenario, 10, start=100 * number, last=100 * number + 100, saved=100 * number + 100)
    assert placed(scenario) == ("OnDemand", "h100")
    assert choice(scenario).cause == "Interruptions"


def test_interruptions_after_hours_stay_on_spot():
    scenario = training(*H100)
    for number in range(5):
        interrupt(scenario, 90, start=900 * number, last=900 * number + 900, saved=900 * number + 900)
    assert placed(scenario)[0] == "Spot"


def test_attempts_without_a_durable_step_lead_to_on_demand():
    scenario = training(*H100, placement={"fallback": {"afterInterruptions": 9, "afterFruitlessAttempts": 2}})
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
    assert (scenario.status.interruptions, scenario.stage("train").failures) == (0, 0)


def test_evicted_attempt_whose_job_has_not_ended_is_not_moved():
    """The pod has ended, and its Job ends a second later: the eviction must count as one."""
    scenario, job = running_on_demand(step=10)
    scenario.after(1800)
    scenario.cluster.update_job(job, exit_code=75, disruption="evicted")
    scenario.reconcile_until_stable()
    assert scenario.attempt("train").stopping is None
    scenario.cluster.evict(job, 100, 100)
    scenario.reconcile()
    assert [one.outcome for one in scenario.stage("train").attempts][-2:] == ["Interrupted", "Running"]


def test_on_demand_attempt_that_is_nearly_done_stays():
    scenario, job = running_on_demand(step=9_990)
    scenario.after(7200).reconcile_until_stable()
    assert not scenario.cluster.jobs[job].asked_to_stop


def test_own_node_selector_excludes_other_classes():
    scenario = training(*H100, *A100, pod={**GPU, "nodeSelector": {"class": "a100"}})
    assert placed(scenario) == ("Spot", None)  # no spot class has that label, so that the price of Spot is not known
    scenario = training(*H100, *A100, pod={**GPU, "nodeSelector": {"zone": "b"}})
    assert placed(scenario) == ("Spot", "h100-spot")


def test_stage_without_accelerator_uses_no_class_that_has_one():
    scenario = training(*H100)
    prepare = scenario.stage("prepare").attempts[0]
    assert (prepare.capacity, prepare.node_class, prepare.price) == ("OnDemand", None, None)


def test_price_counts_every_accelerator():
    eight = {"resources": {"limits": {"nvidia.com/gpu": 8}}, "image": "own", "command": ["train"]}
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
    assert (placement.capacity, placement.node_selector) == ("Spot", {"class": "h100-spot"})


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


def test_many_full_spot_classes_lead_to_on_demand():
    """Each wait takes ten minutes: the first class must not be tried again before on-demand nodes are."""
    scenario = training(*((f"s{number}", "Spot", f"0.8{number}") for number in range(5)), H100[1])
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
    scenario.cluster.progress(job, 510, start_step=500, saved_step=500, step_seconds=6.0, total=10_000)
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
    assert [one.node_class for one in scenario.stage("train").attempts] == ["od0", "od1", "od2", "od0"]


def test_used_up_estimate_keeps_the_cheaper_capacity():
    scenario = training(*A100, placement={"expectedSeconds": 7200})
    assert placed(scenario) == ("OnDemand", "a100")
    job = scenario.start("train")
    scenario.after(7300)
    scenario.lose_node(job)
    scenario.pass_interruption_backoff()
    assert placed(scenario) == ("OnDemand", "a100")


def test_program_that_saves_nothing_is_not_moved():
    scenario = training(*H100, pod={**GPU, "image": "own", "command": ["train"]}, placement={"expectedSeconds": 90_000})
    find_no_node(scenario)
    scenario.after(600).reconcile_until_stable()
    end_stopped(scenario)
    assert placed(scenario) == ("OnDemand", "h100")
    job = scenario.start("train")
    scenario.after(7200).reconcile_until_stable()
    assert not scenario.cluster.jobs[job].asked_to_stop


def test_first_step_does_not_decide_about_a_deadline():
    deadline = (START + timedelta(hours=4.5)).isoformat()
    scenario = training(*H100, deadline=deadline, placement={"expectedSeconds": 4 * 3600})
    job = scenario.start("train")
    scenario.cluster.progress(job, 1, start_step=0, saved_step=0, step_seconds=3.0, total=2400)
    scenario.after(30).reconcile_until_stable()
    assert not scenario.cluster.jobs[job].asked_to_stop


def test_capacity_of_another_version_stops_nothing():
    placement = pod_placement(a_pipeline().train, "Reserved", "r", PlacementDefaults())
    assert placement.node_selector == {}


@pytest.mark.parametrize("price", ["8E+1", "2e1", 1e6, "0.80", 0])
def test_price_is_written_without_an_exponent(price):
    found = settings(("h100", "OnDemand", price)).placement_defaults
    assert found
    assert re.fullmatch(AMOUNT, str(found.node_classes[0].price))
