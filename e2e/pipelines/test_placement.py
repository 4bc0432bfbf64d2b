"""Auto on real nodes: a spot class without nodes, on-demand nodes meanwhile, and back when spot nodes are there."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal

import pytest

from e2e.pipelines.chart import Operator
from e2e.pipelines.driver import PipelineDriver, pipeline
from testcluster.kube_namespace import KubeNamespace
from testcluster.provider import Provider

CLASS = "finetune.dev/class"
DEAR = "1.04"
CHEAP = "0.10"
DEARER = "1.14"
RETURN_SECONDS = 10


def node_class(
    number: int, name: str, capacity: str, price: str, selector: str
) -> list[str]:
    """Return the values of a node class for --set."""
    path = f"placement.nodeClasses[{number}]"
    return [
        f"{path}.name={name}",
        f"{path}.capacity={capacity}",
        f"{path}.price={price}",
        f"{path}.nodeSelector.{selector}",
    ]


@pytest.fixture(scope="module")
def priced(operator: Operator) -> Iterator[Operator]:
    """Return the operator with prices, and with times that suit a test."""
    operator.install(
        "placement.shortStageSeconds=0",
        "placement.restartSeconds=1",
        f"placement.returnSeconds={RETURN_SECONDS}",
        *node_class(0, "dear", "OnDemand", DEAR, "finetune\\.dev/capacity=on-demand"),
        *node_class(1, "cheap", "Spot", CHEAP, "finetune\\.dev/class=cheap"),
    )
    operator.wait_settled()  # until then, the old leader may place a stage by its own prices
    yield operator
    operator.install()
    operator.wait_settled()


def nodes(cluster: Provider, capacity: str) -> list[str]:
    names = cluster.kube.run(
        "get", "nodes", "-l", f"finetune.dev/capacity={capacity}", "-o", "name"
    )
    return [line.partition("/")[2] for line in names.split()]


@contextmanager
def node_label(cluster: Provider, capacity: str, value: str) -> Iterator[None]:
    """Set the class of the nodes of a capacity, and remove it again."""
    for name in nodes(cluster, capacity):
        cluster.kube.run("label", "node", name, f"{CLASS}={value}", "--overwrite")
    try:
        yield
    finally:
        for name in nodes(cluster, capacity):
            cluster.kube.run("label", "node", name, f"{CLASS}-")


@pytest.mark.skipif(
    os.environ.get("FAULTS") != "all",
    reason="80 s, and tests/unit/core has the choice; set FAULTS=all",
)
def test_full_spot_pool_is_left_and_returned_to(
    priced: Operator, namespace: KubeNamespace, cluster: Provider
):
    auto = {
        "placement": {"expectedSeconds": 900, "fallback": {"afterPendingSeconds": 5}}
    }
    driver = PipelineDriver.start(
        namespace, pipeline("auto", steps={"train": 250}, train=auto)
    )
    driver.until(lambda: driver.stage("train").get("reason") == "WaitingForCapacity")
    driver.until(lambda: len(driver.stage("train").get("attempts", ())) > 1, 60)
    first, second = driver.stage("train")["attempts"]
    assert (first["capacity"], first["nodeClass"], first["outcome"]) == (
        "Spot",
        "cheap",
        "Stopped",
    )
    assert (second["capacity"], second["nodeClass"]) == ("OnDemand", "dear")
    driver.until(lambda: driver.condition("Trained").get("reason") == "Progressing")
    assert (
        driver.condition("Trained")["message"]
        == "OnDemand (dear): no Spot node was found within 5s"
    )
    with node_label(cluster, "spot", "cheap"):
        driver.wait_state("train", "Running")
        time.sleep(RETURN_SECONDS + 2)  # so long the class is not tried again
        namespace.run("delete", driver.pod("train"), "--wait=false")
        status = driver.wait_finished(seconds=180)
    _, second, third = status["stages"]["train"]["attempts"]
    assert (second["outcome"], second["exitCode"]) == ("Interrupted", 75)
    assert (third["capacity"], third["nodeClass"], third["outcome"]) == (
        "Spot",
        "cheap",
        "Succeeded",
    )
    assert third["node"] in nodes(cluster, "spot")
    assert (status["interruptions"], status["stages"]["train"]["failures"]) == (1, 0)
    assert "CapacityChosen" in namespace.run("describe", "ft", "auto")
    check_costs(status, second, third)
    wide = namespace.run("get", "ft", "auto", "-o", "wide")
    assert status["spent"] in wide


def check_costs(status: dict, second: dict, third: dict) -> None:
    """Check that each attempt costs its running time at its price, and that the sums are theirs."""
    for attempt, price in ((second, DEAR), (third, CHEAP)):
        exact = Decimal(price) * Decimal(str(attempt["seconds"])) / 3600
        assert abs(Decimal(attempt["cost"]) - exact) <= Decimal("0.0001")
    attempts = [
        attempt
        for stage in status["stages"].values()
        for attempt in stage.get("attempts", ())
    ]
    spent = sum(Decimal(attempt["cost"]) for attempt in attempts)
    assert Decimal(status["costs"]["spent"]) == spent
    assert status["costs"]["currency"] == "USD"
    assert Decimal(status["costs"]["saved"]) > 0


def test_eviction_is_paid_and_reported(
    priced: Operator, namespace: KubeNamespace, cluster: Provider
):
    with node_label(cluster, "spot", "cheap"):
        auto = {"placement": {"expectedSeconds": 900}}
        driver = PipelineDriver.start(
            namespace, pipeline("paid", steps={"train": 100}, train=auto)
        )
        driver.wait_state("train", "Running")
        namespace.run("delete", driver.pod("train"), "--wait=false")
        status = driver.wait_finished(seconds=120)
    first, second = status["stages"]["train"]["attempts"]
    assert (first["capacity"], second["capacity"]) == ("Spot", "Spot")
    assert first["savedStep"] > 0
    assert (
        Decimal(first["cost"])
        > Decimal(first["lostCost"])
        == Decimal(status["costs"]["lost"])
        == 0
    )


def placements(stage: dict) -> list[tuple[str, str]]:
    """Return the capacity and the node class of each attempt of a stage."""
    return [
        (attempt["capacity"], attempt["nodeClass"]) for attempt in stage["attempts"]
    ]


def test_dearer_spot_is_warned_about_and_not_chosen(
    priced: Operator, namespace: KubeNamespace, cluster: Provider
):
    priced.install(
        "placement.shortStageSeconds=0",
        *node_class(0, "dear", "OnDemand", DEAR, "finetune\\.dev/capacity=on-demand"),
        *node_class(1, "a100-spot", "Spot", DEARER, "finetune\\.dev/class=a100"),
    )
    priced.wait_settled()
    with node_label(cluster, "spot", "a100"):
        auto = PipelineDriver.start(namespace, pipeline("auto-a100"))
        spot = PipelineDriver.start(
            namespace, pipeline("spot-a100", train={"placement": {"capacity": "Spot"}})
        )
        chosen, insisted = (
            driver.wait_finished()["stages"]["train"] for driver in (auto, spot)
        )
    assert placements(chosen) == [("OnDemand", "dear")]
    assert chosen["placement"]["message"].startswith(
        "OnDemand (dear): 1.04 against 1.14 USD an hour on Spot"
    )
    assert placements(insisted) == [("Spot", "a100-spot")]
    assert (
        "costs more than OnDemand: 1.14 against 1.04 USD an hour"
        in insisted["placement"]["message"]
    )
    assert "SpotCostsMore" in namespace.run("describe", "ft", "spot-a100")
