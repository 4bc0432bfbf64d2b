from collections.abc import Iterator

import pytest

from e2e.cluster.provider import Provider
from e2e.pipelines.chart import Operator


@pytest.fixture(scope="session")
def operator(cluster: Provider) -> Iterator[Operator]:
    """The operator in two replicas, installed through its chart."""
    installed = Operator(cluster.kube)
    installed.install()
    yield installed
    print(installed.logs())
