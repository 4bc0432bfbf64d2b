"""Which provider creates a cluster, and which one created an existing cluster."""

from __future__ import annotations

from collections.abc import Callable

from testcluster import cluster_state
from testcluster.errors import UsageError
from testcluster.images.image_builders import ENGINES
from testcluster.kind.provider import Kind
from testcluster.linux_namespaces.provider import LinuxNamespaces
from testcluster.provider import Provider

PROVIDERS: dict[str, Callable[..., Provider]] = {
    "kind": Kind,
    "linux-namespaces": LinuxNamespaces,
}
"""kind comes first: linux-namespaces takes every folder for its own, and would delete the pids of kind's services."""


def choose(name: str, wanted: str | None, *, node_image: str | None = None) -> Provider:
    """Return a provider for a new cluster.

    The default is kind if a Docker engine answers, else Linux namespaces.
    """
    provider = wanted or (
        "kind" if ENGINES["docker"].is_available() else "linux-namespaces"
    )
    if provider == "kind":
        return Kind(name, node_image=node_image)
    if node_image:
        raise UsageError(
            "--node-image works with --provider kind only; nodes of Linux namespaces have no image"
        )
    return LinuxNamespaces(name)


def find(name: str, wanted: str | None = None) -> Provider:
    """Return the existing cluster of that name. Raises UsageError when there is none."""
    for cluster in existing(name, wanted):
        return cluster
    names = sorted(
        folder.name for folder in cluster_state.clusters().glob("*") if folder.is_dir()
    )
    others = f"; existing clusters: {', '.join(names)}" if names else ""
    raise UsageError(
        f"there is no cluster {name}{others}; `python -m testcluster --name {name} up` creates one"
    )


def existing(name: str, wanted: str | None = None) -> list[Provider]:
    """Return each provider that holds anything under that name, complete or not."""
    candidates = (
        create(name) for key, create in PROVIDERS.items() if wanted in (None, key)
    )
    return [cluster for cluster in candidates if cluster.exists()]


def require_node(cluster: Provider, node: str) -> None:
    """Raise UsageError when the cluster has no such node."""
    names = sorted(existing_node.name for existing_node in cluster.nodes())
    if node not in names:
        raise UsageError(
            f"no node {node!r} in cluster {cluster.name}; its nodes are {', '.join(names)}"
        )
