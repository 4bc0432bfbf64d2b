import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from e2e.pipelines.chart import Operator
from e2e.pipelines.terminal import Terminal
from testcluster.errors import TimedOut
from testcluster.kube_namespace import KubeNamespace
from testcluster.provider import Provider


@pytest.fixture(scope="session")
def operator(cluster: Provider) -> Iterator[Operator]:
    """The operator with two replicas, installed with its chart; FINETUNE_OPERATOR=running uses the one installed."""
    release = Operator(cluster.kube)
    if os.environ.get("FINETUNE_OPERATOR") == "running":
        yield release
        return
    release.install()
    yield release
    with suppress(
        TimedOut
    ):  # a replica that an upgrade has just replaced may end while its log is read
        print(release.logs())


@pytest.fixture
def release(operator: Operator, namespace: KubeNamespace) -> Iterator[Operator]:
    """The shared release, for tests that change it; reinstalled with default values after the test."""
    if os.environ.get("FINETUNE_OPERATOR") == "running":
        pytest.skip(
            "FINETUNE_OPERATOR=running: this test would change a release that the test run did not install"
        )
    yield operator
    operator.install()
    operator.wait_settled()


@pytest.fixture
def terminal(namespace: KubeNamespace, tmp_path: Path) -> Terminal:
    """The command line of the cluster's administrator, in the namespace of the test."""
    return Terminal(namespace, tmp_path)


@pytest.fixture
def lost_nodes(cluster: Provider) -> Iterator[list[str]]:
    """The names of nodes that the test takes down; they are revived after it."""
    nodes: list[str] = []
    yield nodes
    for node in nodes:
        cluster.revive(node)
