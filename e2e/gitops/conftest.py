from collections.abc import Iterator

import pytest

from testcluster import fixtures
from testcluster.provider import Provider


@pytest.fixture(scope="module")
def own_cluster() -> Iterator[Provider]:
    """A cluster of one node with the operator's image, which no other test file uses."""
    with fixtures.cluster("gitops", "ondemand", images=("finetune-operator:dev",)) as created:
        yield created
