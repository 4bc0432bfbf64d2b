from collections.abc import Iterator

import pytest

from testcluster import fixtures
from testcluster.provider import Provider


@pytest.fixture(scope="package")
def control_plane() -> Iterator[Provider]:
    """A real API server with its controllers and scheduler; its only nodes are on paper."""
    with fixtures.cluster("plane", "none", fake_nodes=3) as made:
        yield made
