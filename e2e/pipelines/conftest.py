import os
from collections.abc import Iterator

import pytest

from e2e.pipelines.chart import Operator
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
    print(release.logs())
