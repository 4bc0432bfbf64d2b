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

ORDER = (
    "test_argo_cd",
    "test_argo_cd_operations",
    "test_argo_cd_chart",
    "test_flux",
    "test_nodes",
    "test_invalid_input",
    "test_kind",
    "test_node_faults",
    "test_pod_faults",
    "test_evictions",
    "test_blocked_stages",
    "test_lifecycle",
    "test_quick_start",
    "test_quickstart_guide",
    "test_exact_resume",
    "test_chart_lifecycle",
    "test_training_on_spot",
)
"""Test files that run first, in this order; the other files follow.

First the files with a cluster or nodes of their own, before each xdist worker starts its shared cluster. Then the
longest, so that both workers end at about the same time.
"""
IMAGES = ("finetune-operator:dev", "finetune-trainer-cpu:dev")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests by the position of their file in ORDER."""
    items.sort(
        key=lambda item: (
            ORDER.index(item.path.stem) if item.path.stem in ORDER else len(ORDER)
        )
    )


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
