"""Faults of the node under a pod: taken away with notice, by the scheduler, or without a word."""

from __future__ import annotations

import time
from pathlib import Path

from e2e.pipelines.faults.fault import INTERRUPTED, SUCCEEDED, Fault
from e2e.pipelines.faults.scene import STEPS, Scene, wait_gone
from testcluster.kube_namespace import pod
from testcluster.linux_namespaces import cgroups
from testcluster.linux_namespaces.machine import Machine
from testcluster.reclaim import TAINT

ONCE = (INTERRUPTED, SUCCEEDED)
MOST_OF_A_NODE = "1500m"
"""More than half of a node's two processors."""
BRIEFLY = 8.0
"""Seconds; less than the 16 after which a silent node is unreachable."""
USUAL = "0.1"
"""Seconds between two steps."""
SLOW = "3"
"""Seconds between two steps: a pod on a deleted node is deleted after 40 s or more."""


def noexecute_taint(scene: Scene) -> None:
    """Taint the node, as a termination handler does."""
    scene.wait_step(1)
    kube = scene.cluster.kube
    host = scene.host["name"]
    scene.undo.callback(kube.run, "taint", "node", host, f"{TAINT.partition('=')[0]}-")
    scene.strike()
    kube.run("taint", "node", host, TAINT)


def drain(scene: Scene) -> None:
    """Drain the node, as an upgrade does."""
    scene.wait_step(1)
    kube = scene.cluster.kube
    host = scene.host["name"]
    scene.undo.callback(kube.run, "uncordon", host)
    scene.strike()
    kube.run(
        "drain",
        host,
        "--ignore-daemonsets",
        "--delete-emptydir-data",
        "--force",
        "--timeout=60s",
        timeout=90,
    )


def preemption(scene: Scene) -> None:
    """Create a pod of a higher priority that fits on the node only without the training."""
    scene.wait_step(1)
    kube = scene.cluster.kube
    name = "urgent"
    priority = {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": name},
    }
    kube.apply([{**priority, "value": 1000}])
    scene.undo.callback(kube.run, "delete", "priorityclass", name)
    urgent = pod(name, "busybox sleep 600", node=scene.node, grace=1)
    urgent["spec"] |= {"priorityClassName": name}
    urgent["spec"]["containers"][0]["resources"] = {"requests": {"cpu": MOST_OF_A_NODE}}
    scene.undo.callback(
        scene.namespace.run, "delete", "pod", name, "--ignore-not-found"
    )
    scene.strike()
    scene.namespace.create(urgent)


def node_killed(scene: Scene) -> None:
    """Cut the power of the machine, which then starts again: its kubelet finds the pod without its process."""
    scene.wait_step(1)
    node = scene.node
    scene.undo.callback(_revive_if_off, scene, node)
    scene.strike()
    scene.cluster.kill(node)
    scene.cluster.revive(node)


def node_hung_briefly(scene: Scene) -> None:
    """Freeze every process of the machine, for a shorter time than the cluster waits for a node."""
    scene.wait_step(1)
    node = scene.node
    scene.strike()
    scene.cluster.pause(node)
    scene.undo.callback(scene.cluster.resume, node)
    time.sleep(BRIEFLY)
    scene.cluster.resume(node)


def node_hung(scene: Scene) -> None:
    """Freeze every process of the machine until the cluster deletes the pod; then it goes on."""
    scene.workspace.put("pace", "0.3")
    scene.wait_step(1)
    node = scene.node
    name = scene.pod
    scene.strike()
    scene.cluster.pause(node)
    scene.undo.callback(scene.cluster.resume, node)
    scene.driver.until(
        lambda: scene.namespace.get("pod", name)["metadata"].get("deletionTimestamp"),
        180,
    )
    problem = "another attempt was started beside a process that may still write"
    assert len(scene.attempts) == 1, problem  # noqa: S101
    scene.cluster.resume(node)


def node_object_deleted(scene: Scene) -> None:
    """Delete the Node object of a machine that works; its pod is forgotten, and killed while the next pod starts."""
    scene.wait_step(1)
    scene.workspace.put("pace", SLOW)
    node = scene.node
    scene.undo.callback(scene.cluster.revive, node)
    scene.strike()
    scene.cluster.kube.delete_node(scene.host["name"])
    scene.wait_attempt(2, 240)
    scene.workspace.put("pace", USUAL)


def partitioned_zombie(scene: Scene) -> None:
    """Cut a node off and delete its Node object; its process goes on while the next attempt trains.

    The file server has dropped the lock of the silent client, as NFS does after its lease.
    """
    scene.workspace.put("pace", "0.4")
    scene.wait_step(1)
    node = scene.node
    zombie = scene.pod
    machine = scene.cluster.machine(scene.node)
    scene.workspace.put(f"hold-step-{zombie}")
    scene.undo.callback(scene.cluster.revive, node)
    host = scene.host["name"]
    scene.strike()
    scene.cluster.partition(node)
    scene.cluster.kube.delete_node(host)
    identity = scene.driver.stage("train")["identity"]
    scene.workspace.shell(f"busybox rm -f /workspace/train/{identity}/.lock")
    second = scene.wait_attempt(2, 240)
    assert scene.processes(machine, zombie), "the process ended before the next attempt"  # noqa: S101
    scene.wait_step(2, second.get("startStep", 0) + 1)
    scene.workspace.remove(f"hold-step-{zombie}")
    wait_gone(scene, machine, zombie)
    scene.notes.append(_end_of_zombie(scene, zombie))
    scene.cluster.heal(node)


def _end_of_zombie(scene: Scene, zombie: str) -> str:
    """Return how a process ended whose attempt had been replaced. It is a problem if that published an adapter."""
    entries = [entry for entry in scene.workspace.journal() if entry.pod == zombie]
    last = max(entry.value for entry in entries if entry.event == "step")
    codes = [entry.value for entry in entries if entry.event == "exit"]
    how = f"with exit code {codes[0]}" if codes else "by itself"
    ended = f"the zombie ended {how} at step {last}"
    if codes == [0]:
        scene.problems.append(f"{ended} and published an adapter beside its successor")
    return ended if last < STEPS else f"{ended}, which is the last"


def kubelet_restarted(scene: Scene) -> None:
    """Kill the kubelet, which is started again; its pods run on."""
    scene.workspace.put("pace", "0.25")
    scene.wait_step(1)
    machine = scene.cluster.machine(scene.node)
    before = _kubelets(machine)
    scene.strike()
    machine.restart("kubelet")
    scene.driver.until(lambda: _kubelets(machine) - before)


def _kubelets(machine: Machine) -> set[int]:
    return {
        pid for pid in cgroups.members(machine.cgroup) if _name_of(pid) == "kubelet"
    }


def _name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _revive_if_off(scene: Scene, node: str) -> None:
    if scene.cluster.machine(node).pid is None:
        scene.cluster.revive(node)


LARGE = {"train": {"pod": {"resources": {"requests": {"cpu": MOST_OF_A_NODE}}}}}
NODE_FAULTS = (
    Fault(noexecute_taint, ONCE, "DeletionByTaintManager", (75,)),
    Fault(drain, ONCE, "EvictionByEvictionAPI", (75,)),
    Fault(preemption, ONCE, "PreemptionByScheduler", (75,), changes=LARGE),
    Fault(kubelet_restarted, (SUCCEEDED,), "", (0,)),
    Fault(node_killed, ONCE, "the machine may have restarted", (255,), graceful=False),
    Fault(node_hung_briefly, (SUCCEEDED,), "", (0,)),
    Fault(node_hung, ONCE, "DeletionByTaintManager", (75,)),
    # The kubelet may register again, and report the pod's end, before the pod object is gone.
    Fault(node_object_deleted, ONCE, "DeletionByPodGC", (None, 75), graceful=False),
    Fault(partitioned_zombie, ONCE, "DeletionByPodGC", graceful=False),
)
