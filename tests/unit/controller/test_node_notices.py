"""Marks of a node that announce its end."""

import tracemalloc

import pytest
from support.operator.noticed_nodes import REBALANCE, SPOT_ITN, Object, node

from finetune_operator.controller.node_watch import NodeNotices
from finetune_operator.kubernetes.translate.node import (
    CONDITIONS,
    LABELS,
    TAINTS,
    notices_of,
)


@pytest.mark.parametrize("key", sorted(TAINTS))
def test_taint_that_announces_the_end_is_a_notice(key: str) -> None:
    assert notices_of(node("spot-1", key)) == {key}


def test_label_or_condition_of_a_cloud_is_a_notice() -> None:
    assert notices_of(node("spot-1", metadata={"labels": dict(LABELS)})) == set(LABELS)
    conditions = [{"type": kind, "status": "True"} for kind in CONDITIONS]
    assert notices_of(node("spot-1", status={"conditions": conditions})) == CONDITIONS


@pytest.mark.parametrize(
    "raw",
    [
        node("spot-1", "node.kubernetes.io/unschedulable", unschedulable=True),
        node(
            "spot-1",
            "node.kubernetes.io/out-of-service",
            "node.kubernetes.io/unreachable",
        ),
        node("spot-1", "DeletionCandidateOfClusterAutoscaler"),
        node("spot-1", metadata={"labels": dict.fromkeys(LABELS, "PENDING")}),
        node(
            "spot-1",
            status={
                "conditions": [{"type": kind, "status": "False"} for kind in CONDITIONS]
            },
        ),
        {"metadata": {"name": "bare"}},
    ],
    ids=["cordon", "lost", "candidate", "label", "condition", "bare"],
)
def test_other_mark_of_a_node_is_no_notice(raw: Object) -> None:
    assert notices_of(raw) == frozenset()


def test_only_new_notices_are_passed_on() -> None:
    seen: list[tuple[str, str]] = []
    cache = NodeNotices(lambda *notice: seen.append(notice))
    for taints in ([], [REBALANCE], [REBALANCE], [REBALANCE, SPOT_ITN]):
        cache.update("nodes", node("spot-1", *taints))
    assert seen == [("spot-1", REBALANCE), ("spot-1", SPOT_ITN)]
    assert cache.notices == {"spot-1": {REBALANCE, SPOT_ITN}}


def test_node_that_is_gone_or_recovers_is_forgotten() -> None:
    cache = NodeNotices(lambda *_: None)
    for name in ("a", "b", "c"):
        cache.update("nodes", node(name, SPOT_ITN))
    cache.update("nodes", node("a"))
    cache.remove("nodes", node("b"))
    assert set(cache.notices) == {"c"}
    assert list(cache.sweep("nodes", {("None", "d")}, 9, None)) == []
    assert cache.notices == {}


def test_thousand_nodes_keep_less_than_ten_kilobytes() -> None:
    cache = NodeNotices(lambda *_: None)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for number in range(1000):
        cache.update(
            "nodes", node(f"node-{number}", *([SPOT_ITN] if number % 100 == 0 else []))
        )
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(cache.notices) == 10
    assert after - before < 10_000
