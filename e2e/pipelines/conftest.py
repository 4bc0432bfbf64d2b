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
    with suppress(TimedOut):  # a replica that an upgrade has just replaced may end while its log is read
        print(release.logs())


@pytest.fixture
def terminal(namespace: KubeNamespace, tmp_path: Path) -> Terminal:
    """The command line of the cluster's administrator, in the namespace of the test."""
    return Terminal(namespace, tmp_path)
