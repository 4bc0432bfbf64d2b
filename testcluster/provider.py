"""What a cluster is made of, whoever makes it: the one interface of the providers `bare` and `kind`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from testcluster.kube import Kube
from testcluster.nodes import Node

Pressure = Literal["memory", "disk", "pids"]


@dataclass(frozen=True)
class ClusterSpec:
    """What `up` is asked for."""

    nodes: Sequence[Node]
    fake_nodes: int = 0
    images: Sequence[str] = ()
    """Images to be on every node before it is Ready: names the engine here knows, or archives."""


class Provider(Protocol):
    """A cluster by name. Every verb returns when what it says is so; every verb may be repeated."""

    name: str

    @property
    def kube(self) -> Kube:
        """Give the cluster's API, as administrator."""

    @property
    def kubeconfig(self) -> Path:
        """Where kubectl finds the cluster, as its administrator."""

    @property
    def registry(self) -> str:
        """Give host:port of the cluster's OCI registry, under the name by which this host and every node know it."""

    def exists(self) -> bool:
        """Tell whether there is anything of this cluster, whole or in pieces."""

    def nodes(self) -> list[Node]:
        """Name the nodes that were ever made, dead or alive; one that was deleted can be revived."""

    def up(self, wish: ClusterSpec) -> None:
        """Make the cluster; Ready when it returns. Raises Refused with nothing left behind."""

    def down(self) -> None:
        """Take everything away, also what a crashed `up` left."""

    def add(self, node: Node) -> None:
        """Make one more node; Ready when it returns."""

    def kill(self, node: str) -> None:
        """Turn its power off: no signal reaches anybody. The Node object stays, as it does on a real machine."""

    def revive(self, node: str) -> None:
        """Turn it on again, empty of containers."""

    def delete(self, node: str) -> None:
        """Kill it and take its Node object away, as a cloud does; revive makes a fresh one."""

    def pause(self, node: str) -> None:
        """Stop every process on it where it stands: a node that hangs."""

    def resume(self, node: str) -> None:
        """Let it go on."""

    def partition(self, node: str) -> None:
        """Take its network away; what runs on it runs on."""

    def heal(self, node: str) -> None:
        """Give its network back."""

    def apply_pressure(self, node: str, pressure: Pressure) -> None:
        """Make its kubelet see too little memory, disk or pids, so that it evicts pods on its own account."""

    def clear_pressure(self, node: str) -> None:
        """End all pressure."""

    def load(self, images: Sequence[str]) -> None:
        """Bring images to every node that lives, without a registry."""
