from collections.abc import Iterator

import pytest

from testcluster import fixtures
from testcluster.provider import Provider


@pytest.fixture(scope="package")
def control_plane() -> Iterator[Provider]:
    """A real control plane (API server, controllers, scheduler) whose three nodes are simulated by KWOK."""
    with fixtures.cluster("plane", "none", kwok_nodes=3) as created:
        yield created
