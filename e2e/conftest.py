import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.kind import steps
from e2e.pipelines.faults.table import markdown, rows_of
from e2e.reference_run import reference_run  # noqa: F401  a fixture
from testcluster import fixtures, providers
from testcluster.kube_namespace import KubeNamespace, temporary_namespace
from testcluster.provider import Provider

SHARED_CLUSTER = "the shared cluster"
"""The group of the files whose tests run on the cluster of the fixture `cluster`."""
FIRST = (
    "test_argo_cd",
    "test_argo_cd_operations",
    "test_argo_cd_chart",
    "test_flux",
    "test_nodes",
    "test_kind",
)
"""Of the other test files, those that run first, in this order.

They create clusters or nodes of their own. What takes long at the end would leave the other worker idle.
"""
IMAGES = ("finetune-operator:dev", "finetune-trainer-cpu:dev")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the files, and assign all files on the shared cluster to one xdist worker, which begins with them.

    A cluster of its own for the other worker would take at least two minutes to create.
    """
    on_shared_cluster = {item.path for item in items if uses_shared_cluster(item)}
    for item in items:
        is_shared = item.path in on_shared_cluster
        group = SHARED_CLUSTER if is_shared else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: position(item.path, on_shared_cluster))


def uses_shared_cluster(item: pytest.Item) -> bool:
    """Return whether a test needs the fixture `cluster` of this file, and not another one of this name."""
    is_here = Path(__file__).parent in item.path.parents
    has_own = item.path.stem in FIRST
    fixtures_of_test = getattr(item, "fixturenames", ())
    return is_here and not has_own and "cluster" in fixtures_of_test


def position(path: Path, on_shared_cluster: set[Path]) -> int:
    """Return the place of a test file in the order of all; files with the same place keep their order."""
    if path in on_shared_cluster:
        return 0
    if path.stem in FIRST:
        return 1 + FIRST.index(path.stem)
    return 1 + len(FIRST)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print the table of the fault matrix, and write it to FAULT_TABLE or pytest's cache; print the steps on kind."""
    rows = rows_of(terminalreporter.stats)
    if rows:
        table = markdown(rows)
        path = Path(
            os.environ.get("FAULT_TABLE") or config.cache.mkdir("faults") / "table.md"
        )
        path.write_text(table)
        terminalreporter.section("fault matrix")
        terminalreporter.write(f"{table}\nwritten to {path}\n")
    lines = steps.table(terminalreporter.stats)
    if lines:
        terminalreporter.section("steps on kind")
        terminalreporter.write(lines)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Provider]:
    """A cluster with two on-demand and three spot nodes and our images, or the running cluster FINETUNE_CLUSTER."""
    name = os.environ.get("FINETUNE_CLUSTER")
    if name:
        yield providers.find(name, fixtures.PROVIDER)
        return
    with fixtures.cluster("main", "ondemand:2,spot:3", images=IMAGES) as created:
        yield created


@pytest.fixture
def namespace(
    cluster: Provider, request: pytest.FixtureRequest
) -> Iterator[KubeNamespace]:
    """A new namespace for one test, which enforces Pod Security "restricted"."""
    with temporary_namespace(
        cluster.kube, fixtures.namespace_name(request.node.name)
    ) as created:
        yield created
