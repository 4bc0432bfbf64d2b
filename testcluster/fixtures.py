"""Clusters as pytest fixtures: one for the whole run, and as many of one's own as a test wants."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2s
from pathlib import Path

from testcluster import providers, state
from testcluster.nodes import parse
from testcluster.provider import ClusterSpec, Provider

PROVIDER = os.environ.get("FINETUNE_PROVIDER")
NODE_IMAGE = os.environ.get("FINETUNE_KIND_NODE_IMAGE")
Make = Callable[..., Provider]


def cluster_name(what: str) -> str:
    """Name a cluster after the process that tests, so that what a killed run left can be told from what runs."""
    return f"t{os.getpid()}-{what}"


def namespace_name(test: str) -> str:
    """Make a namespace's name of a test's: its words, and a few letters that tell its parameters apart."""
    plain = re.sub(r"[^a-z0-9]+", "-", test.removeprefix("test_").lower())
    return f"{plain[:50].strip('-')}-{blake2s(test.encode(), digest_size=3).hexdigest()}"


def remove_leftovers() -> None:
    """Take away the clusters of test runs that are no more."""
    for folder in state.clusters().glob("t*-*"):
        owner = re.match(r"t(\d+)-", folder.name)
        if owner and not Path(f"/proc/{owner[1]}").exists():
            for cluster in providers.existing(folder.name):
                cluster.down()


@contextmanager
def cluster(what: str, nodes: str, *, fake_nodes: int = 0, images: tuple[str, ...] = ()) -> Iterator[Provider]:
    """Have a cluster for a while."""
    remove_leftovers()
    made = providers.choose(cluster_name(what), PROVIDER, node_image=NODE_IMAGE)
    made.up(ClusterSpec(parse(nodes), fake_nodes, images))
    try:
        yield made
    finally:
        made.down()
