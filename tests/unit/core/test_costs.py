"""What a pipeline costs: each attempt, the sums, and what an interruption has wasted."""

from decimal import Decimal

import pytest
from support.operator.placements import H100, interrupt, running_on_demand, training
from support.operator.scenario import RESULTS, Scenario, a_pipeline, a_result, scores

from finetune_operator.api.conditions import Reason
from finetune_operator.api.costs import PipelineCosts
from finetune_operator.api.placement import PlacementDefaults
from finetune_operator.api.status import ATTEMPTS_KEPT, PipelineStatus
from finetune_operator.controller.metrics import REGISTRY, record_changes
from finetune_operator.core.settings import Settings

PRICES = {
    "nodeClasses": [
        {"name": "cpu", "capacity": "OnDemand", "price": "0.10"},
        *(
            {
                "name": f"{gpu}-{capacity.lower()}",
                "capacity": capacity,
                "accelerator": "nvidia.com/gpu",
                "nodeSelector": {"gpu": gpu},
                "price": price,
            }
            for gpu, capacity, price in (
                ("h100", "Spot", "0.80"),
                ("h100", "OnDemand", "3.10"),
                ("a100", "Spot", "1.14"),
                ("a100", "OnDemand", "1.04"),
            )
        ),
    ]
}
SETTINGS = Settings(placement_defaults=PlacementDefaults.model_validate(PRICES))


def on(gpu: str) -> dict[str, object]:
    return {
        "resources": {"limits": {"nvidia.com/gpu": 1}},
        "nodeSelector": {"gpu": gpu},
    }


def priced() -> Scenario:
    spec = a_pipeline(
        train={"pod": on("h100")}, evaluate={"pod": on("a100")}, deploy=None
    )
    return Scenario(spec, settings=SETTINGS)


def costs(scenario: Scenario) -> PipelineCosts:
    total = scenario.status.costs
    assert total
    return total


def run_for(scenario: Scenario, stage: str, minutes: float) -> None:
    scenario.start(stage)
    scenario.after(60 * minutes).complete(stage)


def test_published_example_sums_to_the_cent():
    """The table of the example: prepare 0.05, train 3.20, evaluate 0.78, push 0.01; 13.24 on demand."""
    scenario = priced()
    for stage, minutes in (
        ("prepare", 30),
        ("train", 240),
        ("evaluate", 45),
        ("push", 5),
    ):
        run_for(scenario, stage, minutes)
    assert scenario.status.phase == "Succeeded"
    spent = {
        name: str(stage.costs.spent)
        for name, stage in scenario.status.stages.items()
        if stage.costs
    }
    assert spent == {
        "prepare": "0.0500",
        "train": "3.2000",
        "evaluate": "0.7800",
        "push": "0.0083",
    }
    assert scenario.status.spent == "4.04 USD"
    total = costs(scenario)
    assert (total.on_demand.quantize(Decimal("0.01")), total.saved) == (
        Decimal("13.24"),
        Decimal("9.2000"),
    )
    assert total.lost == 0
    assert total.unpriced == 0
    assert total.currency == "USD"


def test_interruption_wastes_its_lost_steps_and_its_start():
    """An hour at 0.80: 500 steps of 6 s are kept, 60 steps are lost, and 240 s were no steps at all."""
    scenario = priced()
    scenario.run("prepare")
    job = scenario.start("train")
    scenario.after(3600)
    scenario.cluster.progress(
        job, 560, start_step=0, saved_step=500, step_seconds=6.0, total=1000
    )
    scenario.reconcile()
    scenario.lose_node(job)
    scenario.reconcile_until_stable()
    first = scenario.stage("train").attempts[0]
    assert first.seconds == 3600.0
    assert first.steps == 560
    assert first.cost == Decimal("0.8000")
    assert first.lost_cost == Decimal("0.1333")  # 600 s
    job = scenario.start("train")
    scenario.cluster.progress(
        job, 510, start_step=500, saved_step=500, step_seconds=6.0, total=1000
    )
    scenario.reconcile_until_stable()
    first = scenario.stage("train").attempts[0]
    assert first.lost_steps == 60
    assert first.lost_cost == Decimal("0.1333")
    scenario.after(3000).complete("train")
    train = scenario.stage("train").costs
    assert train
    assert train.attempts == 2
    assert train.seconds == 6600.0
    assert train.lost == Decimal("0.1333")
    assert train.spent == Decimal("0.8000") + Decimal("0.6667")
    assert train.on_demand == Decimal("2.5833") + Decimal("2.5833")  # 3,000 s of each


def test_two_lost_checkpoints_cost_the_steps_of_both_attempts():
    scenario = priced()
    scenario.run("prepare")
    for start, last in ((0, 500), (500, 800)):
        job = scenario.start("train")
        scenario.after(6 * (last - start))
        scenario.cluster.progress(
            job, last, start_step=start, saved_step=last, step_seconds=6.0, total=1000
        )
        scenario.reconcile()
        scenario.lose_node(job)
        scenario.pass_interruption_backoff()
    job = scenario.start("train")
    scenario.cluster.progress(
        job, 10, start_step=0, saved_step=0, step_seconds=6.0, total=1000
    )
    scenario.reconcile_until_stable()
    scenario.after(6000).complete("train")
    train = scenario.stage("train")
    assert [attempt.lost_steps for attempt in train.attempts[:2]] == [500, 300]
    assert train.lost_steps == 800
    assert train.lost_seconds == 4800.0
    assert train.costs
    assert train.costs.lost == Decimal("1.0667")
    assert train.costs.on_demand == Decimal("5.1667")


def test_negative_step_seconds_waste_no_more_than_was_spent():
    scenario = priced()
    scenario.run("prepare")
    job = scenario.start("train")
    scenario.after(3600)
    scenario.cluster.progress(
        job, 10**15, start_step=0, saved_step=10**15, step_seconds=-5.0, total=10**15
    )
    scenario.reconcile()
    scenario.lose_node(job)
    scenario.reconcile_until_stable()
    assert (
        costs(scenario).lost
        == scenario.stage("train").attempts[0].cost
        == Decimal("0.8000")
    )


def test_attempts_that_are_no_longer_listed_still_count():
    scenario = priced()
    scenario.run("prepare")
    for _ in range(ATTEMPTS_KEPT + 4):
        job = scenario.start("train")
        scenario.after(360)
        scenario.cluster.evict(job, 5, 5)
        scenario.pass_interruption_backoff()
    train = scenario.stage("train")
    assert len(train.attempts) == ATTEMPTS_KEPT
    assert train.earlier_costs
    assert train.earlier_costs.attempts == 5
    assert train.costs
    assert train.costs.attempts == ATTEMPTS_KEPT + 4
    by_capacity = {
        "Spot": Decimal("0.0800"),
        "OnDemand": Decimal("0.3100"),
    }
    assert {
        attempt.cost for attempt in train.attempts if attempt.cost is not None
    } <= set(by_capacity.values())
    assert train.costs.spent == train.earlier_costs.spent + sum(
        attempt.cost or 0 for attempt in train.attempts
    )
    assert train.costs.seconds == 360.0 * (ATTEMPTS_KEPT + 4)


def test_edit_keeps_what_was_spent_before_it():
    scenario = priced()
    run_for(scenario, "prepare", 30)
    job = scenario.start("train")
    scenario.after(3600).edit(train={"epochs": 2})
    scenario.cluster.evict(job, disruption=None)
    scenario.reconcile_until_stable()
    assert costs(scenario).spent == Decimal("0.8500")
    run_for(scenario, "train", 60)
    assert costs(scenario).spent == Decimal("1.6500")


def test_costs_without_prices_are_time_only():
    scenario = Scenario().finish()
    assert scenario.status.costs is None
    assert scenario.status.spent == ""
    train = scenario.stage("train").costs
    assert train
    assert (train.attempts, train.unpriced, train.seconds, train.spent) == (
        1,
        1,
        60.0,
        0,
    )


def test_run_on_one_machine_has_time_and_no_node_class():
    scenario = Scenario(settings=Settings(placement_defaults=None)).finish()
    train = scenario.stage("train")
    assert train.placement is None
    assert train.attempts[0].capacity is None
    assert train.attempts[0].seconds == 60.0


def test_repeated_reconciles_and_kills_count_nothing_twice():
    scenario = priced()
    run_for(scenario, "prepare", 30)
    attempt = scenario.attempt("train")
    scenario.cluster.start(attempt.job)
    scenario.after(3600)
    scenario.cluster.complete(
        attempt.job, a_result("train", attempt.identity, **RESULTS["train"])
    )
    for moment in ("before write_status", "after write_status", "after apply"):
        scenario.cluster.inject_fault = kill_at(moment)
        try:
            scenario.reconcile()
        except InterruptedError:
            pass
        else:
            raise AssertionError(f"nothing was killed {moment}")
    scenario.cluster.inject_fault = lambda _moment: None
    scenario.reconcile_until_stable()
    assert costs(scenario).spent == Decimal("0.8500")
    scenario.run("evaluate", **scores(0.9))
    assert costs(scenario).attempts == 3


def kill_at(moment: str):
    def kill(reached: str) -> None:
        if reached == moment:
            raise InterruptedError

    return kill


def test_attempt_that_ends_while_it_is_to_move_is_all_useful():
    scenario, _ = running_on_demand(step=10)
    scenario.after(1800).reconcile_until_stable()
    assert scenario.attempt("train").stopping is Reason.PLACEMENT_CHANGED
    scenario.after(5).complete("train")
    total = costs(scenario)
    assert total.on_demand == total.spent
    assert total.saved == 0


def test_saved_steps_count_though_progress_was_never_read():
    scenario = training(*H100)
    job = scenario.start("train")
    scenario.after(7200)
    scenario.cluster.evict(job, 1100, 1100)
    job = scenario.start("train")
    scenario.cluster.progress(
        job, 1110, start_step=1100, saved_step=1100, step_seconds=6.0, total=5000
    )
    scenario.reconcile_until_stable()
    first = scenario.stage("train").attempts[0]
    assert first.lost_steps == 0
    assert first.cost == Decimal("1.6")
    assert first.lost_cost == 0
    assert costs(scenario).on_demand == Decimal("6.2")


def lose_node_after_steps_that_were_not_read() -> tuple[Scenario, PipelineStatus]:
    """Lose a node four minutes after progress was read; return the status when its attempt had ended."""
    scenario = training(*H100)
    job = scenario.start("train")
    scenario.after(3600)
    scenario.cluster.progress(
        job, 560, start_step=0, saved_step=540, step_seconds=6.0, total=2000
    )
    scenario.reconcile()
    scenario.after(240)
    scenario.lose_node(job)
    ended = scenario.reconcile_until_stable().status
    job = scenario.start("train")
    scenario.cluster.progress(
        job, 600, start_step=595, saved_step=595, step_seconds=6.0, total=2000
    )
    scenario.reconcile_until_stable()
    return scenario, ended


def test_next_attempt_shows_how_far_a_killed_one_came():
    scenario, _ = lose_node_after_steps_that_were_not_read()
    first = scenario.stage("train").attempts[0]
    assert first.last_step == 595
    assert first.steps == 595
    assert first.lost_steps == 0
    assert first.lost_cost == Decimal(
        "0.06"
    )  # 3,840 s at 0.80 an hour, less 595 steps of 6 s


def test_metric_counts_a_loss_when_it_is_known():
    scenario, ended = lose_node_after_steps_that_were_not_read()
    before = lost_to_interruptions()
    record_changes(PipelineStatus(), ended)
    assert lost_to_interruptions() == before
    record_changes(ended, scenario.status)
    record_changes(scenario.status, scenario.status)
    assert lost_to_interruptions() - before == pytest.approx(0.06)


def test_metric_counts_a_loss_once_though_the_stage_is_retried():
    scenario = training(*H100, maxInterruptions=0, placement={"capacity": "Spot"})
    counted = lost_to_interruptions()
    before = PipelineStatus()

    def record() -> None:
        nonlocal before
        record_changes(before, scenario.status)
        before = scenario.status

    interrupt(scenario, 60, start=0, last=560, saved=500)
    assert scenario.status.phase == "Failed"
    record()
    scenario.retry("again")
    record()
    job = scenario.start("train")
    scenario.cluster.progress(
        job, 510, start_step=500, saved_step=500, step_seconds=6.0, total=10_000
    )
    scenario.reconcile_until_stable()
    record()
    assert lost_to_interruptions() - counted == pytest.approx(
        float(costs(scenario).lost), abs=0.001
    )


def lost_to_interruptions() -> float:
    return (
        REGISTRY.get_sample_value(
            "finetune_lost_to_interruptions_total", {"stage": "train"}
        )
        or 0.0
    )
