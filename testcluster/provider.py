"""The interface that both providers implement: `linux_namespaces` and `kind`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from testcluster.kube import Kube
from testcluster.nodes import Node

Pressure = Literal["memory", "disk", "pids"]

DEFAULT_THRESHOLDS = {
    "memory.available": "100Mi",
    "nodefs.available": "1Gi",
    "nodefs.inodesFree": "1%",
    "imagefs.available": "1Gi",
    "pid.available": "1%",
}
"""Hard eviction thresholds of a kubelet without pressure."""
EXCEEDED_THRESHOLDS: dict[Pressure, dict[str, str]] = {
    "memory": {"memory.available": "99.99%"},
    "disk": {"nodefs.available": "99.99%"},
    "pids": {"pid.available": "99.99%"},
}
"""Thresholds that even an idle machine exceeds. The kubelet then does everything that it does under real pressure."""


AUDIT_LOG = "audit.log"
"""The API server's audit log in the cluster's folder, where an audit policy is set: one JSON object a line."""


@dataclass(frozen=True)
class ControlPlaneOptions:
    """What differs from the usual control plane. Only linux-namespaces implements it."""

    flags: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Flags by program, without dashes; they replace the usual values."""
    audit_policy: Mapping[str, Any] | None = None
    """An audit Policy; the API server writes `AUDIT_LOG` by it. None: no audit log."""
    kubernetes: str = ""
    """One of `go_modules.OLDER_KUBERNETES`, for a cluster without nodes: no kubelet may be newer than its API server.
    Empty: the version of the nodes."""
    provisions_volumes: bool = True
    """Whether the volume provisioner runs. It lists all claims after each change of a claim."""


USUAL_CONTROL_PLANE = ControlPlaneOptions()


@dataclass(frozen=True)
class ClusterSpec:
    """What `up` creates."""

    nodes: Sequence[Node]
    kwok_nodes: int = 0
    images: Sequence[str] = ()
    """Images to load onto every node before it is Ready: names that a local engine knows, or paths of archives."""
    control_plane: ControlPlaneOptions = USUAL_CONTROL_PLANE


class Provider(Protocol):
    """A cluster by name. Every verb returns when its effect is in place, and every verb may be repeated."""

    name: str
    folder: Path

    @property
    def kube(self) -> Kube:
        """Return a client of the cluster's API with administrator rights."""

    @property
    def kubeconfig(self) -> Path:
        """Return the path of the administrator's kubeconfig."""

    @property
    def registry(self) -> str:
        """Return host:port of the cluster's OCI registry. The host and every node reach it by this name."""

    def exists(self) -> bool:
        """Check whether anything of this cluster exists, complete or not."""

    def nodes(self) -> list[Node]:
        """Return every node that was ever created, running or not; a deleted node can be revived."""

    def up(self, spec: ClusterSpec) -> None:
        """Create the cluster and wait until its nodes are Ready. Raises UsageError with nothing left behind."""

    def down(self) -> None:
        """Delete the cluster, including what an `up` that crashed left behind."""

    def add(self, node: Node) -> None:
        """Create one more node and wait until it is Ready."""

    def kill(self, node: str) -> None:
        """Power a node off: no process on it gets a signal that it could handle. The Node object stays."""

    def revive(self, node: str) -> None:
        """Power a node on and wait until it is Ready. No container of it has survived."""

    def delete(self, node: str) -> None:
        """Kill a node and delete its Node object, as a cloud does. `revive` then creates a fresh machine."""

    def pause(self, node: str) -> None:
        """Freeze every process of a node, as when a node hangs."""

    def resume(self, node: str) -> None:
        """Thaw the processes of a paused node."""

    def partition(self, node: str) -> None:
        """Disconnect a node from the network; its processes keep running."""

    def heal(self, node: str) -> None:
        """Connect a partitioned node to the network again."""

    def apply_pressure(self, node: str, pressure: Pressure) -> None:
        """Make the node's kubelet detect a shortage of memory, disk or pids, so that it evicts pods by itself."""

    def clear_pressure(self, node: str) -> None:
        """Restore the default eviction thresholds."""

    def load(self, images: Sequence[str]) -> None:
        """Load images onto every running node, without a registry."""
