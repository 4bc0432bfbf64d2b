import os
from collections.abc import Iterator

import pytest

from e2e import fixtures
from e2e.cluster import providers
from e2e.cluster.provider import Provider
from e2e.laptop import laptop  # noqa: F401  a fixture
from e2e.world import World, namespace

IMAGES = ("finetune-operator:dev", "finetune-trainer:dev")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Provider]:
    """Two on-demand and three spot nodes that have our images; or, to try things out, FINETUNE_CLUSTER as it is."""
    if name := os.environ.get("FINETUNE_CLUSTER"):
        yield providers.find(name, fixtures.PROVIDER)
        return
    with fixtures.cluster("main", "ondemand:2,spot:3", images=IMAGES) as made:
        yield made


@pytest.fixture
def world(cluster: Provider, request: pytest.FixtureRequest) -> Iterator[World]:
    """A namespace of the test's own, in which Pod Security is restricted."""
    with namespace(cluster.kube, fixtures.words(request.node.name)) as made:
        yield made
