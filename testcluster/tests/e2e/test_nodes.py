"""Every verb does to a node what it says, as the API and a pod's watcher see it."""

import threading
from collections.abc import Iterator

import pytest

from testcluster import fixtures
from testcluster.errors import TimedOut, UsageError
from testcluster.kube import is_ready
from testcluster.kube_namespace import KubeNamespace, pod, temporary_namespace, until, watching
from testcluster.nodes import NAME, parse
from testcluster.provider import Provider
from testcluster.reclaim import reclaim

SAVES = 'trap "echo step 17 > /dev/termination-log; exit 75" TERM; while true; do busybox sleep 0.1; done'
NODE_LOST = 60
"""Seconds within which a silent node is called lost; the grace period here is 16."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Provider]:
    with fixtures.cluster("nodes", "ondemand,spot:3,gpu", fake_nodes=2) as made:
        yield made


@pytest.fixture
def namespace(cluster: Provider, request: pytest.FixtureRequest) -> Iterator[KubeNamespace]:
    with temporary_namespace(cluster.kube, fixtures.namespace_name(request.node.name)) as made:
        yield made


def ready(cluster: Provider, node: str) -> bool | None:
    """Give what the API says of a node; None when there is no such object."""
    found = cluster.kube.nodes_called(node)
    return is_ready(found[0]) if found else None


def test_a_gpu_node_offers_what_it_does_not_have(cluster: Provider, namespace: KubeNamespace):
    wants = pod("wants", "echo got it", selector={"workload": "training"})
    wants["spec"]["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    wants["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": "1"}}
    namespace.create(wants)
    namespace.wait_phase("wants", "Succeeded")
    there = namespace.get("node", namespace.get("pod", "wants")["spec"]["nodeName"])
    assert there["metadata"]["labels"][NAME] == "gpu-1"


def test_pods_run_on_nodes_that_are_on_paper_only(cluster: Provider, namespace: KubeNamespace):
    paper = pod("paper", "true", selector={"type": "kwok"})
    paper["spec"]["tolerations"] = [{"operator": "Exists"}]
    namespace.create(paper)
    assert namespace.wait_phase("paper", "Running", seconds=30) == "Running"
    assert namespace.get("pod", "paper")["spec"]["nodeName"].startswith("fake-")


def test_dead_hung_and_cut_off_nodes_are_lost_and_come_back(cluster: Provider, namespace: KubeNamespace):
    namespace.create(*(pod(f"on-{node}", SAVES, node=node) for node in ("spot-1", "spot-2", "spot-3")))
    for node in ("spot-1", "spot-2", "spot-3"):
        namespace.wait_phase(f"on-{node}", "Running")
    cluster.kill("spot-1")
    cluster.pause("spot-2")
    cluster.partition("spot-3")
    for node in ("spot-1", "spot-2", "spot-3"):
        until(lambda node=node: ready(cluster, node) is False, NODE_LOST, f"{node} is still called Ready")
        # The API cannot know better than the last word of a node that says nothing any more.
        assert namespace.phase(f"on-{node}") == "Running"
    cluster.revive("spot-1")
    cluster.resume("spot-2")
    cluster.heal("spot-3")
    for node in ("spot-1", "spot-2", "spot-3"):
        until(lambda node=node: ready(cluster, node), 60, f"{node} does not come back")
    # What hung or was cut off has gone on; what was on the dead node ended with it.
    assert namespace.wait_phase("on-spot-1", "Failed", "Succeeded", seconds=60) == "Failed"
    assert namespace.phase("on-spot-2") == "Running"
    assert namespace.phase("on-spot-3") == "Running"


@pytest.mark.parametrize("by", ["taint", "drain"])
def test_the_last_words_of_a_reclaimed_pod_can_be_seen_by_a_watcher_only(cluster: Provider, by: str):
    with temporary_namespace(cluster.kube, f"reclaimed-by-{by}") as namespace, watching(namespace) as watched:
        namespace.create(pod("saves", SAVES, node="spot-1", grace=20))
        namespace.wait_phase("saves", "Running")
        taking = threading.Thread(target=reclaim, args=(cluster, "spot-1", 8.0, by))
        taking.start()
        until(lambda: watched.gone("saves"), 30, lambda: f"it was not seen to go: {watched.termination('saves')}")
        assert watched.termination("saves")["code"] == 75
        assert watched.termination("saves")["message"] == "step 17\n"
        assert watched.termination("saves")["disruption"] == (
            "DeletionByTaintManager" if by == "taint" else "EvictionByEvictionAPI"
        )
        assert namespace.phase("saves") == ""
        taking.join()
        assert ready(cluster, "spot-1") is None
        cluster.revive("spot-1")
        assert ready(cluster, "spot-1")


def test_a_pod_on_a_machine_that_is_gone_without_notice_is_removed_and_leaves_no_words(cluster: Provider):
    with temporary_namespace(cluster.kube, "lost-without-notice") as namespace, watching(namespace) as watched:
        namespace.create(pod("unaware", SAVES, node="spot-2"))
        namespace.wait_phase("unaware", "Running")
        cluster.delete("spot-2")
        until(lambda: watched.gone("unaware"), 120, "the pod of a machine that is gone is still there")
        assert watched.termination("unaware") == {"disruption": "DeletionByPodGC"}
        cluster.revive("spot-2")
        assert ready(cluster, "spot-2")


def test_a_node_under_pressure_evicts_by_itself_and_recovers(cluster: Provider):
    with temporary_namespace(cluster.kube, "pressed") as namespace, watching(namespace) as watched:
        namespace.create(pod("squeezed", SAVES, node="spot-3"))
        namespace.wait_phase("squeezed", "Running")
        cluster.apply_pressure("spot-3", "memory")
        until(lambda: namespace.get("pod", "squeezed")["status"].get("reason") == "Evicted", 60, "nobody was evicted")
        # Evicted by a kubelet that runs, or turned away by one that has just started: it depends on who is first.
        assert watched.termination("squeezed").get("disruption", "TerminationByKubelet") == "TerminationByKubelet"
        assert pressed(cluster, "spot-3")
        cluster.clear_pressure("spot-3")
        until(lambda: not pressed(cluster, "spot-3"), 60, "the pressure does not end")


def pressed(cluster: Provider, node: str) -> bool:
    [found] = cluster.kube.nodes_called(node)
    taints = found["spec"].get("taints", [])
    return any(taint["key"].endswith("-pressure") for taint in taints)


def test_a_node_that_is_added_is_ready_and_has_a_name_of_its_own(cluster: Provider):
    [more] = parse("spot", frozenset(node.name for node in cluster.nodes()))
    cluster.add(more)
    assert ready(cluster, more.name)
    assert more.name == "spot-4"


def test_a_node_that_there_is_not_is_named_with_those_there_are(cluster: Provider):
    with pytest.raises(UsageError, match=r"no node 'spot-9'.*ondemand-1.*spot-1"):
        cluster.kill("spot-9")


def test_the_api_server_is_asked_nothing_it_cannot_answer(cluster: Provider):
    with pytest.raises(TimedOut, match="not found"):
        cluster.kube.json("get", "node", "spot-9")
