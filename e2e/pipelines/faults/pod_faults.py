"""Faults of a pod: evictions at every moment, kills, and resources that run out."""

from __future__ import annotations

import socket
import time

from e2e.pipelines.driver import Object, evict
from e2e.pipelines.faults.fault import FAILED, INTERRUPTED, SUCCEEDED, Fault
from e2e.pipelines.faults.scene import EVERY_STEPS, Scene
from testcluster import binaries

ONCE = (INTERRUPTED, SUCCEEDED)
BY_API = "EvictionByEvictionAPI"
GATE = "finetune.dev/gate"
SLOW_IMAGE = "finetune-trainer-cpu:slow"
SAVE = 2 * EVERY_STEPS
"""The step in whose save a fault happens; the checkpoint before it is durable."""
LIMIT = "1Gi"
DOUBLE = "2Gi"
FILL = "busybox dd if=/dev/zero bs=4k"


def limited(size: str) -> Object:
    """Return the change of the spec that limits the memory of train."""
    return {"pod": {"resources": {"limits": {"memory": size}}}}


def eviction_api(scene: Scene) -> None:
    """Evict the pod, as `kubectl drain` and autoscalers do."""
    scene.wait_step(1)
    scene.strike()
    evict(scene.namespace, scene.pod)


def five_evictions_in_a_row(scene: Scene) -> None:
    """Evict five attempts, each after some steps of its own."""
    scene.workspace.put("pace", "0.25")
    for number in range(1, 6):
        scene.wait_step(number, 6 * number)
        scene.strike()
        evict(scene.namespace, scene.pod)
        scene.wait_ended(number)


def eviction_and_operator_kill(scene: Scene) -> None:
    """Evict the pod and kill the operator's leader at once; another replica leads when the Lease has expired."""
    operator = scene.site.operator
    scene.wait_step(1)
    pod = scene.pod
    leader = operator.leader()
    machine = scene.cluster.machine(
        operator.objects.get("pod", leader)["spec"]["nodeName"]
    )
    scene.strike()
    evict(scene.namespace, pod)
    scene.kill(machine, leader)


def eviction_while_pending(scene: Scene) -> None:
    """Evict a pod that no node accepts; later a node does."""
    scene.wait_attempt(1)
    pod = scene.pod
    scene.driver.until(
        lambda: scene.driver.stage("train").get("reason") == "WaitingForCapacity"
    )
    scene.strike()
    evict(scene.namespace, pod)
    scene.wait_ended(1)
    scene.undo.callback(scene.cluster.kube.run, "label", "node", "spot-1", f"{GATE}-")
    scene.cluster.kube.run("label", "node", "spot-1", f"{GATE}=open")


def eviction_during_image_pull(scene: Scene) -> None:
    """Evict a pod whose image is being pulled from a registry that does not answer.

    Then every node has the image, as after a pull by another pod.
    """
    server = scene.undo.enter_context(socket.create_server(("", 0)))
    host = scene.cluster.registry.partition(":")[0].rpartition(".")[0] + ".1"
    image = f"{host}:{server.getsockname()[1]}/{SLOW_IMAGE}"
    scene.driver.patch(suspend=None, train={"pod": {"image": image}})
    scene.wait_attempt(1)
    pod = scene.driver.until(lambda: _pulling(scene))
    scene.strike()
    evict(scene.namespace, pod)
    _provide_image(scene, image)


def _pulling(scene: Scene) -> str:
    """Return the pod of train whose image is being pulled; empty while there is none."""
    selector = "reason=Pulling,involvedObject.kind=Pod"
    names = "jsonpath={.items[*].involvedObject.name}"
    pods = scene.namespace.run(
        "get", "events", "--field-selector", selector, "-o", names
    ).split()
    job = scene.attempts[-1]["job"]
    for pod in pods:
        if pod.startswith(f"{job}-"):
            return pod
    return ""


def _provide_image(scene: Scene, image: str) -> None:
    """Tag the trainer's image on every spot node."""
    command = [str(binaries.program("ctr")), "--namespace", "k8s.io", "images"]
    for node in scene.cluster.nodes():
        machine = scene.cluster.machine(node.name)
        if node.kind == "spot":
            images = machine.run(*command, "list", "--quiet").split()
            trainer = next(
                name for name in images if name.endswith("finetune-trainer-cpu:dev")
            )
            machine.run(*command, "tag", "--force", trainer, image)


def container_out_of_memory(scene: Scene) -> None:
    """Exceed the memory limit. The stage fails and is not retried; with the limit that its message names it ends."""
    scene.wait_step(1)
    scene.strike()
    scene.workspace.put("eat")
    scene.driver.wait_finished("Failed")
    message = scene.driver.condition("Ready")["message"]
    fix = f"killed at its limit {LIMIT}: raise train.pod.resources.limits.memory to {DOUBLE}"
    assert fix in message, message  # noqa: S101
    assert len(scene.attempts) == 1, "a stage that ran out of memory was retried"  # noqa: S101
    scene.workspace.remove("eat")
    scene.driver.patch(train=limited(DOUBLE))


def sigterm_during_a_save(scene: Scene) -> None:
    """Evict the pod while a checkpoint is being written."""
    scene.workspace.put(f"hold-save-{SAVE}")
    scene.wait_entry(1, "save", SAVE)
    scene.strike()
    evict(scene.namespace, scene.pod)
    time.sleep(1.5)  # the process has received SIGTERM, and waits for its writer
    scene.workspace.remove(f"hold-save-{SAVE}")


def sigkill_during_a_save(scene: Scene) -> None:
    """Kill the process while a checkpoint is being written, as a kernel does; nothing names the cause."""
    scene.workspace.put(f"hold-save-{SAVE}")
    scene.wait_step(1, 1)
    machine = scene.cluster.machine(scene.node)
    pod = scene.pod
    scene.wait_entry(1, "save", SAVE)
    scene.strike()
    scene.kill(machine, pod)
    scene.workspace.remove(f"hold-save-{SAVE}")


def full_disk(scene: Scene) -> None:
    """Fill the volume of the workspace up to some kilobytes for the journal; later there is space again."""
    scene.wait_step(1)
    scene.strike()
    fill = f"{FILL} of=/workspace/reserve count=8; {FILL} of=/workspace/filling; busybox rm /workspace/reserve"
    scene.workspace.shell(f"{fill}; true")
    scene.wait_ended(1)
    scene.workspace.shell("busybox rm /workspace/filling")


POD_FAULTS = (
    Fault(eviction_api, ONCE, BY_API, (75,)),
    Fault(five_evictions_in_a_row, (*[INTERRUPTED] * 5, SUCCEEDED), BY_API, (75,)),
    Fault(eviction_and_operator_kill, ONCE, f"{BY_API}|DisruptionTarget", (75, None)),
    Fault(
        eviction_while_pending,
        ONCE,
        BY_API,
        changes={"train": {"pod": {"nodeSelector": {GATE: "open"}}}},
        seconds=300,
    ),
    Fault(
        eviction_during_image_pull,
        ONCE,
        BY_API,
        (None, 137),
        changes={"suspend": True},
        seconds=300,
    ),
    Fault(
        container_out_of_memory,
        (FAILED, SUCCEEDED),
        "killed at its limit",
        (137,),
        graceful=False,
        changes={"train": limited(LIMIT)},
    ),
    Fault(sigterm_during_a_save, ONCE, BY_API, (75,)),
    Fault(
        sigkill_during_a_save,
        (FAILED, SUCCEEDED),
        "killed by a signal",
        (137,),
        graceful=False,
    ),
)
FULL_DISK = Fault(
    full_disk, (FAILED, SUCCEEDED), "No space left", (69,), graceful=False
)
"""Apart, because it needs a volume of its own."""
