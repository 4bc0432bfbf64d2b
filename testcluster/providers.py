"""Which provider makes or made a cluster."""

from __future__ import annotations

from collections.abc import Callable

from testcluster import state
from testcluster.errors import UsageError
from testcluster.images.engines import ENGINES
from testcluster.kind.provider import Kind
from testcluster.linux_namespaces.provider import LinuxNamespaces
from testcluster.provider import Provider

PROVIDERS: dict[str, Callable[..., Provider]] = {"bare": LinuxNamespaces, "kind": Kind}


def choose(name: str, wanted: str | None, *, node_image: str | None = None) -> Provider:
    """Choose for a new cluster: what is asked for, else kind where a Docker engine answers, else bare."""
    provider = wanted or ("kind" if ENGINES["docker"].there() else "bare")
    if provider == "kind":
        return Kind(name, node_image=node_image)
    if node_image:
        raise UsageError("--node-image is kind's; nodes without Docker have no image")
    return LinuxNamespaces(name)


def find(name: str, wanted: str | None = None) -> Provider:
    """Find the cluster of that name. Raises Refused when there is none."""
    for cluster in existing(name, wanted):
        return cluster
    known = sorted(folder.name for folder in state.clusters().glob("*") if folder.is_dir())
    others = f"; there are: {', '.join(known)}" if known else ""
    raise UsageError(f"there is no cluster {name}{others}; `python -m testcluster --name {name} up` makes one")


def existing(name: str, wanted: str | None = None) -> list[Provider]:
    """Give whatever there is under that name, whole or in pieces."""
    offered = (make(name) for key, make in PROVIDERS.items() if wanted in (None, key))
    return [cluster for cluster in offered if cluster.exists()]


def known(cluster: Provider, node: str) -> None:
    """Raise Refused for a node that the cluster has not."""
    names = sorted(one.name for one in cluster.nodes())
    if node not in names:
        raise UsageError(f"no node {node!r} in cluster {cluster.name}; there are {', '.join(names)}")
