"""The effect of every node verb, as the API and a watch of pods observe it."""

import os
import threading
from collections.abc import Iterator
from functools import partial

import pytest

from testcluster import fixtures
from testcluster.errors import TimedOut, UsageError
from testcluster.kube import is_ready
from testcluster.kube_namespace import (
    KubeNamespace,
    pod,
    temporary_namespace,
    until,
    watch_pods,
)
from testcluster.nodes import NAME, parse
from testcluster.provider import Provider
from testcluster.reclaim import reclaim

SAVES_ON_SIGTERM = 'trap "echo step 17 > /dev/termination-log; exit 75" TERM; while true; do busybox sleep 0.1; done'
NODE_LOST = 60
"""Seconds within which a silent node must be not Ready; the grace period of the cluster is 16 s."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Provider]:
    with fixtures.cluster("nodes", "ondemand,spot:3,gpu", kwok_nodes=2) as created:
        yield created


@pytest.fixture
def namespace(
    cluster: Provider, request: pytest.FixtureRequest
) -> Iterator[KubeNamespace]:
    with temporary_namespace(
        cluster.kube, fixtures.namespace_name(request.node.name)
    ) as created:
        yield created


def ready(cluster: Provider, node: str) -> bool | None:
    """Return whether a node is Ready, or None when it has no Node object."""
    objects = cluster.kube.find_nodes(node)
    return is_ready(objects[0]) if objects else None


def is_lost(cluster: Provider, node: str) -> bool:
    return ready(cluster, node) is False


def test_gpu_node_advertises_a_gpu(cluster: Provider, namespace: KubeNamespace):
    gpu_pod = pod("wants", "echo got it", selector={"workload": "training"})
    gpu_pod["spec"]["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    gpu_pod["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": "1"}}
    namespace.create(gpu_pod)
    namespace.wait_phase("wants", "Succeeded")
    node = namespace.get("node", namespace.get("pod", "wants")["spec"]["nodeName"])
    assert node["metadata"]["labels"][NAME] == "gpu-1"


def test_pods_run_on_kwok_nodes(cluster: Provider, namespace: KubeNamespace):
    simulated = pod("simulated", "true", selector={"type": "kwok"})
    simulated["spec"]["tolerations"] = [{"operator": "Exists"}]
    namespace.create(simulated)
    assert namespace.wait_phase("simulated", "Running", seconds=30) == "Running"
    assert namespace.get("pod", "simulated")["spec"]["nodeName"].startswith("fake-")


def test_killed_paused_and_partitioned_nodes_recover(
    cluster: Provider, namespace: KubeNamespace
):
    namespace.create(
        *(
            pod(f"on-{node}", SAVES_ON_SIGTERM, node=node)
            for node in ("spot-1", "spot-2", "spot-3")
        )
    )
    for node in ("spot-1", "spot-2", "spot-3"):
        namespace.wait_phase(f"on-{node}", "Running")
    cluster.kill("spot-1")
    cluster.pause("spot-2")
    cluster.partition("spot-3")
    for node in ("spot-1", "spot-2", "spot-3"):
        until(
            partial(is_lost, cluster, node),
            NODE_LOST,
            f"{node} is still Ready",
        )
        # The API keeps the last status that the silent kubelet reported.
        assert namespace.phase(f"on-{node}") == "Running"
    cluster.revive("spot-1")
    cluster.resume("spot-2")
    cluster.heal("spot-3")
    for node in ("spot-1", "spot-2", "spot-3"):
        until(partial(ready, cluster, node), 60, f"{node} is not Ready again")
    # Pods on the paused and on the partitioned node go on; the pod on the killed node ended with it.
    assert (
        namespace.wait_phase("on-spot-1", "Failed", "Succeeded", seconds=60) == "Failed"
    )
    assert namespace.phase("on-spot-2") == "Running"
    assert namespace.phase("on-spot-3") == "Running"


@pytest.mark.parametrize("by", ["taint", "drain"])
def test_watch_sees_the_termination_of_a_reclaimed_pod(cluster: Provider, by: str):
    """Afterwards the pod is deleted, so only a watch can see its termination message."""
    with (
        temporary_namespace(cluster.kube, f"reclaimed-by-{by}") as namespace,
        watch_pods(namespace) as watched,
    ):
        namespace.create(pod("saves", SAVES_ON_SIGTERM, node="spot-1", grace=20))
        namespace.wait_phase("saves", "Running")
        reclaiming = threading.Thread(
            target=reclaim, args=(cluster, "spot-1", 20.0, by)
        )
        reclaiming.start()
        until(
            lambda: watched.is_deleted("saves"),
            60,
            lambda: f"no deletion was observed: {watched.termination('saves')}",
        )
        assert watched.termination("saves")["code"] == 75
        assert watched.termination("saves")["message"] == "step 17\n"
        assert watched.termination("saves")["disruption"] == (
            "DeletionByTaintManager" if by == "taint" else "EvictionByEvictionAPI"
        )
        assert namespace.phase("saves") == ""
        reclaiming.join()
        assert ready(cluster, "spot-1") is None
        cluster.revive("spot-1")
        assert ready(cluster, "spot-1")


@pytest.mark.skipif(
    os.environ.get("FAULTS") != "all", reason="waits a minute; set FAULTS=all"
)
def test_pod_of_a_deleted_node_leaves_no_termination(cluster: Provider):
    with (
        temporary_namespace(cluster.kube, "lost-without-notice") as namespace,
        watch_pods(namespace) as watched,
    ):
        namespace.create(pod("unaware", SAVES_ON_SIGTERM, node="spot-2"))
        namespace.wait_phase("unaware", "Running")
        cluster.delete("spot-2")
        until(
            lambda: watched.is_deleted("unaware"),
            120,
            "the pod of the deleted node still exists",
        )
        assert watched.termination("unaware") == {"disruption": "DeletionByPodGC"}
        cluster.revive("spot-2")
        assert ready(cluster, "spot-2")


def test_kubelet_under_pressure_evicts_and_recovers(cluster: Provider):
    with (
        temporary_namespace(cluster.kube, "pressed") as namespace,
        watch_pods(namespace) as watched,
    ):
        namespace.create(pod("squeezed", SAVES_ON_SIGTERM, node="spot-3"))
        namespace.wait_phase("squeezed", "Running")
        cluster.apply_pressure("spot-3", "memory")
        until(
            lambda: (
                namespace.get("pod", "squeezed")["status"].get("reason") == "Evicted"
            ),
            60,
            "the pod was not evicted",
        )
        # The restarted kubelet may evict the pod, or reject it at its start, which sets no condition.
        assert (
            watched.termination("squeezed").get("disruption", "TerminationByKubelet")
            == "TerminationByKubelet"
        )
        # The kubelet evicts before the node controller has seen its condition and added the taint.
        until(
            lambda: has_pressure(cluster, "spot-3"),
            60,
            "the pressure taint is not there",
        )
        cluster.clear_pressure("spot-3")
        until(
            lambda: not has_pressure(cluster, "spot-3"),
            60,
            "the pressure taint is still there",
        )


def has_pressure(cluster: Provider, node: str) -> bool:
    [node_object] = cluster.kube.find_nodes(node)
    taints = node_object["spec"].get("taints", [])
    return any(taint["key"].endswith("-pressure") for taint in taints)


def test_added_node_is_ready_under_a_new_name(cluster: Provider):
    [more] = parse("spot", frozenset(node.name for node in cluster.nodes()))
    cluster.add(more)
    assert ready(cluster, more.name)
    assert more.name == "spot-4"


def test_unknown_node_is_refused_with_the_known_ones(cluster: Provider):
    with pytest.raises(UsageError, match=r"no node 'spot-9'.*ondemand-1.*spot-1"):
        cluster.kill("spot-9")


def test_error_of_kubectl_is_raised(cluster: Provider):
    with pytest.raises(TimedOut, match="not found"):
        cluster.kube.json("get", "node", "spot-9")
