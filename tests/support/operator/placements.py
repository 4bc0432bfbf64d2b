"""Scenarios of a train stage with node classes: the chosen class, full nodes, interrupted attempts."""

from datetime import timedelta
from typing import Any

from support.operator.scenario import Scenario, a_pipeline

from finetune_operator.api.conditions import Reason
from finetune_operator.api.placement import PlacementDefaults
from finetune_operator.api.status import PlacementStatus
from finetune_operator.core.observation import Blocker
from finetune_operator.core.settings import Settings

GPU = {"resources": {"limits": {"nvidia.com/gpu": 1}}}
H100 = (("h100-spot", "Spot", "0.80"), ("h100", "OnDemand", "3.10"))
A100 = (("a100-spot", "Spot", "1.14"), ("a100", "OnDemand", "1.04"))
FULL = Blocker(Reason.WAITING_FOR_CAPACITY, "0/3 nodes are available")


def settings(*classes: tuple[str, str, str | None], **more: Any) -> Settings:
    entries = [
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
    return Settings(
        placement_defaults=PlacementDefaults.model_validate(
            {"nodeClasses": entries, **more}
        )
    )


def training(
    *classes: tuple[str, str, str | None],
    deadline: str | None = None,
    defaults: dict[str, Any] | None = None,
    **train: Any,
) -> Scenario:
    """Return a scenario whose train stage has one GPU and is about to start."""
    more = {"deadline": deadline} if deadline else {}
    spec = a_pipeline(train={"pod": GPU, **train}, **more)
    return Scenario(spec, settings=settings(*classes, **(defaults or {}))).run_before(
        "train"
    )


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
    scenario.cluster.update_job(
        job, blocker=FULL, unschedulable_since=scenario.cluster.now
    )
    scenario.reconcile_until_stable()


def end_stopped(scenario: Scenario) -> None:
    """End the Job that was asked to stop."""
    job = scenario.attempt("train").job
    assert scenario.cluster.jobs[job].asked_to_stop
    scenario.cluster.evict(job, disruption=None)
    scenario.reconcile_until_stable()


def interrupt(
    scenario: Scenario, minutes: float, *, start: int, last: int, saved: int
) -> None:
    """Run the newest attempt for some minutes, at ten steps a minute, and evict it."""
    job = scenario.attempt("train").job
    scenario.cluster.start(job)
    scenario.after(minutes * 60)
    scenario.cluster.progress(
        job, last, start_step=start, saved_step=saved, step_seconds=6.0, total=10_000
    )
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
    scenario.cluster.progress(
        job, step, start_step=0, saved_step=0, step_seconds=6.0, total=10_000
    )
    return scenario, job


def wait_until_moved(
    scenario: Scenario, longest: timedelta = timedelta(days=3)
) -> timedelta | None:
    """Return how long the newest attempt finds no node until it is stopped, or None."""
    find_no_node(scenario)
    for minute in range(1, int(longest / timedelta(minutes=1)) + 1):
        scenario.after(60).reconcile_until_stable()
        if scenario.cluster.jobs[scenario.attempt("train").job].asked_to_stop:
            end_stopped(scenario)
            return timedelta(minutes=minute)
    return None
