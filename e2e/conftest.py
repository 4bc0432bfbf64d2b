import os
from collections.abc import Iterator

import pytest

from e2e.reference_run import reference_run  # noqa: F401  a fixture
from testcluster import fixtures, providers
from testcluster.kube_namespace import KubeNamespace, temporary_namespace
from testcluster.provider import Provider

# The order of the files: those that make or want nodes of their own before each lane has its own, then the longest.
ORDER = (
    "test_nodes",
    "test_invalid_input",
    "test_evictions",
    "test_blocked_stages",
    "test_lifecycle",
    "test_quick_start",
    "test_readme",
    "test_exact_resume",
    "test_chart_lifecycle",
    "test_training_on_spot",
)
IMAGES = ("finetune-operator:dev", "finetune-trainer:dev")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that are named in ORDER, so that lanes end at about the same time."""
    items.sort(key=lambda item: ORDER.index(item.path.stem) if item.path.stem in ORDER else len(ORDER))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Provider]:
    """Two on-demand and three spot nodes that have our images; or, to try things out, FINETUNE_CLUSTER as it is."""
    if name := os.environ.get("FINETUNE_CLUSTER"):
        yield providers.find(name, fixtures.PROVIDER)
        return
    with fixtures.cluster("main", "ondemand:2,spot:3", images=IMAGES) as made:
        yield made


@pytest.fixture
def namespace(cluster: Provider, request: pytest.FixtureRequest) -> Iterator[KubeNamespace]:
    """A namespace of the test's own, in which Pod Security is restricted."""
    with temporary_namespace(cluster.kube, fixtures.namespace_name(request.node.name)) as made:
        yield made
