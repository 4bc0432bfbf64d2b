"""What `status` prints."""

from __future__ import annotations

from testcluster.errors import TimedOut
from testcluster.kube import is_ready
from testcluster.nodes import NAME
from testcluster.provider import Provider


def report(cluster: Provider) -> str:
    """Say what runs: the API, each node, the registry; and how to use it."""
    lines = [f"cluster {cluster.name}: {_api(cluster)}", *_nodes(cluster)]
    lines.append(f"registry: {cluster.registry}")
    lines.append(f"export KUBECONFIG={cluster.kubeconfig} PATH={cluster.kube.kubectl.parent}:$PATH")
    return "\n".join(lines)


def _api(cluster: Provider) -> str:
    return "the API answers" if cluster.kube.is_ready() else "the API does not answer"


def _nodes(cluster: Provider) -> list[str]:
    try:
        found = {node["metadata"]["name"]: node for node in cluster.kube.json("get", "nodes")["items"]}
        seen = {node["metadata"]["labels"].get(NAME, name): is_ready(node) for name, node in found.items()}
    except TimedOut:
        seen = {}
    own = [node.name for node in cluster.nodes()]
    words = {True: "Ready", False: "not Ready", None: "no Node object"}
    lines = [f"  {name:<16}{words[seen.get(name)]}" for name in own]
    fakes = sum(1 for name in seen if name.startswith("fake-"))
    return [*lines, *([f"  and {fakes} nodes on paper"] if fakes else [])]
