"""The output of `status`."""

from __future__ import annotations

from testcluster.errors import TimedOut
from testcluster.kube import is_ready
from testcluster.nodes import NAME
from testcluster.provider import Provider


def report(cluster: Provider) -> str:
    """Return the state of the API, of each node and of the registry, and the line that sets KUBECONFIG."""
    lines = [f"cluster {cluster.name}: {_api(cluster)}", *_nodes(cluster)]
    lines.append(f"registry: {cluster.registry}")
    lines.append(
        f"export KUBECONFIG={cluster.kubeconfig} PATH={cluster.kube.kubectl.parent}:$PATH"
    )
    return "\n".join(lines)


def _api(cluster: Provider) -> str:
    return (
        "the API server is ready"
        if cluster.kube.is_ready()
        else "the API server is not ready"
    )


def _nodes(cluster: Provider) -> list[str]:
    try:
        objects = {
            node["metadata"]["name"]: node
            for node in cluster.kube.json("get", "nodes")["items"]
        }
        ready = {
            node["metadata"]["labels"].get(NAME, name): is_ready(node)
            for name, node in objects.items()
        }
    except TimedOut:
        ready = {}
    texts = {True: "Ready", False: "not Ready", None: "no Node object"}
    lines = [
        f"  {node.name:<16}{texts[ready.get(node.name)]}" for node in cluster.nodes()
    ]
    kwok_nodes = sum(1 for name in ready if name.startswith("fake-"))
    return [*lines, *([f"  and {kwok_nodes} KWOK nodes"] if kwok_nodes else [])]
