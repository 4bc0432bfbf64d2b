import os
from collections.abc import Iterator

import pytest

from e2e.pipelines.chart import Operator
from testcluster.provider import Provider


@pytest.fixture(scope="session")
def operator(cluster: Provider) -> Iterator[Operator]:
    """The operator in two replicas, installed through its chart; or, to try things out, whatever runs already."""
    installed = Operator(cluster.kube)
    if os.environ.get("FINETUNE_OPERATOR") == "running":
        yield installed
        return
    installed.install()
    yield installed
    print(installed.logs())
