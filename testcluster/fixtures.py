"""Clusters for pytest fixtures; each is named after its test process and deleted after use."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2s
from pathlib import Path

from testcluster import cluster_state, providers
from testcluster.nodes import parse
from testcluster.provider import (
    USUAL_CONTROL_PLANE,
    ClusterSpec,
    ControlPlaneOptions,
    Provider,
)

PROVIDER = os.environ.get("FINETUNE_PROVIDER") or (
    "linux-namespaces" if os.geteuid() == 0 else None
)
"""Root's tests run on Linux namespaces, which can add nodes, even where a Docker engine answers."""
NODE_IMAGE = os.environ.get("FINETUNE_KIND_NODE_IMAGE")


def cluster_name(purpose: str) -> str:
    """Return a cluster name with the process id of the test run, so that leftovers of a killed run are recognised."""
    return f"t{os.getpid()}-{purpose}"


def namespace_name(test: str) -> str:
    """Return a namespace name for a test: its name, and six hexadecimal digits that distinguish its parameters."""
    plain = re.sub(r"[^a-z0-9]+", "-", test.removeprefix("test_").lower())
    return (
        f"{plain[:50].strip('-')}-{blake2s(test.encode(), digest_size=3).hexdigest()}"
    )


def remove_leftovers() -> None:
    """Delete the clusters of test runs whose process has ended."""
    for folder in cluster_state.clusters().glob("t*-*"):
        owner = re.match(r"t(\d+)-", folder.name)
        if owner and not Path(f"/proc/{owner[1]}").exists():
            for leftover in providers.existing(folder.name):
                leftover.down()


@contextmanager
def cluster(
    purpose: str,
    nodes: str,
    *,
    kwok_nodes: int = 0,
    images: tuple[str, ...] = (),
    control_plane: ControlPlaneOptions = USUAL_CONTROL_PLANE,
) -> Iterator[Provider]:
    """Create a cluster and delete it at the end of the context."""
    remove_leftovers()
    created = providers.choose(cluster_name(purpose), PROVIDER, node_image=NODE_IMAGE)
    created.up(ClusterSpec(parse(nodes), kwok_nodes, images, control_plane))
    try:
        yield created
    finally:
        created.down()
