"""A simulated kubelet: one Node object, whose pods each behave as a test wants."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from support.faults.api import Api, ApiFailure
from support.faults.ledger import Ledger
from support.faults.pods import (
    Behaviour,
    Ending,
    StagePod,
    ended_status,
    interrupted,
    now,
    running_status,
    succeeded,
)

Object = dict[str, Any]
NODE = "simulated"
TAINT = "finetune.dev/simulated"
STORAGE_CLASS = "simulated"
PROVISIONER = "finetune.dev/simulated"
SELECTED_NODE = "volume.kubernetes.io/selected-node"
HEARTBEAT_SECONDS = 3.0
PODS = 5000
CLAIMS = "/api/v1/persistentvolumeclaims"
VOLUMES = "/api/v1/persistentvolumes"


async def succeed(pod: StagePod) -> Ending:
    """End with a valid result at once; a server runs until it is deleted."""
    return await run_until_deleted(pod) if pod.is_server else succeeded(pod)


async def run_until_deleted(_pod: StagePod) -> Ending:
    """Run until the pod is deleted."""
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


@dataclass
class _Running:
    pod: StagePod
    deleted: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class Kubelet:
    """Runs the pods that the scheduler binds to its node, and provisions the volumes of their claims."""

    def __init__(self, api: Api, address: str) -> None:
        self.api = api
        self.address = address
        self.ledger = Ledger()
        self.behaviours: dict[str, Behaviour] = {}
        """Namespace -> behaviour of its pods; pods without a behaviour succeed at once."""
        self.grace: Callable[[StagePod], float] = lambda _pod: 1.0
        """Seconds from a pod's deletion to the end of its process."""
        self.ending: Callable[[StagePod], Ending] = lambda _pod: interrupted()
        """How the process of a deleted pod ends."""
        self._pods: dict[str, _Running] = {}

    async def register(self) -> None:
        """Create the Node and the StorageClass."""
        taint = {"key": TAINT, "value": "true", "effect": "NoSchedule"}
        node = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": NODE},
            "spec": {"taints": [taint]},
        }
        await self.api.create("/api/v1/nodes", node)
        storage_class = {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {"name": STORAGE_CLASS},
            "provisioner": PROVISIONER,
            "volumeBindingMode": "WaitForFirstConsumer",
        }
        await self.api.create("/apis/storage.k8s.io/v1/storageclasses", storage_class)
        await self._send_heartbeat()

    async def unregister(self) -> None:
        """Delete the Node and the StorageClass."""
        await self.api.delete(f"/api/v1/nodes/{NODE}")
        await self.api.delete(f"/apis/storage.k8s.io/v1/storageclasses/{STORAGE_CLASS}")

    async def run(self) -> None:
        """Simulate until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._send_heartbeats())
            group.create_task(self._follow_pods(group))
            group.create_task(self._follow_claims())
            group.create_task(self._follow_volumes())

    async def _send_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            await self._send_heartbeat()

    async def _send_heartbeat(self) -> None:
        resources = {
            "cpu": "100000",
            "memory": "100000Gi",
            "pods": str(PODS),
            "nvidia.com/gpu": "1000",
        }
        ready = {
            "type": "Ready",
            "status": "True",
            "reason": "Simulated",
            "lastHeartbeatTime": now(),
        }
        status = {
            "conditions": [ready],
            "capacity": resources,
            "allocatable": resources,
        }
        await self.api.patch(
            f"/api/v1/nodes/{NODE}/status", {"status": status}, "strategic-merge-patch"
        )

    # Pods.

    async def _follow_pods(self, group: asyncio.TaskGroup) -> None:
        async for kind, pods in self.api.follow(
            "/api/v1/pods", fieldSelector=f"spec.nodeName={NODE}"
        ):
            if kind == "LISTED":
                for uid in self._pods.keys() - {pod["metadata"]["uid"] for pod in pods}:
                    self._remove(uid)
            for raw in pods:
                if kind == "DELETED":
                    self._remove(raw["metadata"]["uid"])
                else:
                    self._update(StagePod(raw), group)

    def _update(self, pod: StagePod, group: asyncio.TaskGroup) -> None:
        known = self._pods.get(pod.uid)
        if known is None:
            if pod.raw["status"].get("phase") in {"Succeeded", "Failed"}:
                return
            known = self._pods[pod.uid] = _Running(pod)
            known.task = group.create_task(self._run_pod(known))
        if pod.is_being_deleted and not known.deleted.is_set():
            self.ledger.drop_result(pod)
            known.deleted.set()

    def _remove(self, uid: str) -> None:
        """Forget a pod that no longer exists; a pod that was deleted by force stops at once."""
        known = self._pods.pop(uid, None)
        if known:
            self.ledger.drop_result(known.pod)
            known.deleted.set()

    async def _run_pod(self, running: _Running) -> None:
        pod = running.pod
        if not running.deleted.is_set():
            await self._run_process(pod, running.deleted)
        await running.deleted.wait()
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": pod.uid}}
        await self.api.delete(pod.path, **options)

    async def _run_process(self, pod: StagePod, deleted: asyncio.Event) -> None:
        self.ledger.start(pod)
        ending = Ending(137)
        started = now()
        try:
            if await self._patch_status(pod, running_status(pod, self.address)):
                ending = await self._until_ended(pod, deleted)
        finally:
            self.ledger.end(pod, success=ending.exit_code == 0)
        stored = await self._patch_status(pod, ended_status(pod, ending, started))
        if stored and ending.exit_code == 0 and not deleted.is_set():
            self.ledger.keep_result(pod)

    async def _until_ended(self, pod: StagePod, deleted: asyncio.Event) -> Ending:
        """Run the pod's behaviour; when the pod is deleted, wait for its grace period and end as after SIGTERM."""
        behaviour = self.behaviours.get(pod.namespace, succeed)
        process = asyncio.ensure_future(behaviour(pod))
        waiting = asyncio.create_task(deleted.wait())
        await asyncio.wait({process, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if process.done():
            return process.result()
        process.cancel()
        await asyncio.sleep(self.grace(pod))
        return self.ending(pod)

    async def _patch_status(self, pod: StagePod, status: Object) -> bool:
        """Patch the status; return whether this pod still exists."""
        body = {
            "metadata": {"uid": pod.uid},
            "status": status,
        }
        try:
            return bool(
                await self.api.patch(
                    f"{pod.path}/status", body, "strategic-merge-patch"
                )
            )
        except ApiFailure as failure:
            if failure.status in {409, 422}:  # another pod has the name by now
                return False
            raise

    async def evict(self, pod: StagePod) -> None:
        """Evict a pod with the Eviction API, which sets its condition DisruptionTarget and deletes it."""
        meta = {"name": pod.name, "namespace": pod.namespace}
        await self.api.create(
            f"{pod.path}/eviction",
            {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": meta},
        )

    # Volumes.

    async def _follow_claims(self) -> None:
        async for kind, claims in self.api.follow(CLAIMS):
            for claim in claims:
                spec = claim["spec"]
                annotations = claim["metadata"].get("annotations", {})
                waits = not spec.get("volumeName") and SELECTED_NODE in annotations
                if (
                    kind != "DELETED"
                    and waits
                    and spec.get("storageClassName") == STORAGE_CLASS
                ):
                    await self.api.create(VOLUMES, _volume(claim))

    async def _follow_volumes(self) -> None:
        """Delete the volumes whose claims are gone."""
        async for kind, volumes in self.api.follow(VOLUMES):
            for volume in volumes:
                released = volume.get("status", {}).get("phase") in {
                    "Released",
                    "Failed",
                }
                if (
                    kind != "DELETED"
                    and released
                    and volume["spec"].get("storageClassName") == STORAGE_CLASS
                ):
                    await self.api.delete(f"{VOLUMES}/{volume['metadata']['name']}")


def _volume(claim: Object) -> Object:
    meta = claim["metadata"]
    reference = {"apiVersion": "v1", "kind": "PersistentVolumeClaim"}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": f"simulated-{meta['uid']}"},
        "spec": {
            "capacity": {"storage": claim["spec"]["resources"]["requests"]["storage"]},
            "accessModes": claim["spec"]["accessModes"],
            "storageClassName": STORAGE_CLASS,
            "persistentVolumeReclaimPolicy": "Retain",
            "hostPath": {"path": "/nowhere"},
            "claimRef": {
                **reference,
                "namespace": meta["namespace"],
                "name": meta["name"],
                "uid": meta["uid"],
            },
        },
    }


@asynccontextmanager
async def running_kubelet(api: Api, address: str) -> AsyncIterator[Kubelet]:
    """Run a simulated kubelet; delete its Node at the end."""
    kubelet = Kubelet(api, address)
    await kubelet.register()
    simulation = asyncio.create_task(kubelet.run())
    try:
        yield kubelet
        if simulation.done():
            simulation.result()  # raises what ended the simulation
    finally:
        simulation.cancel()
        await asyncio.gather(simulation, return_exceptions=True)
        await kubelet.unregister()
