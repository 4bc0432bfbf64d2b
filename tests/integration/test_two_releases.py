"""Two releases of the chart on one API server: the second starts nothing while the first leads."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.operator.charts import CLUSTER_WIDE, Object, render
from support.operator.operator_process import install_crd, running_operator
from support.operator.pipeline_objects import pipeline_manifest
from support.operator.scenario import ALL_STAGES

from e2e.pipelines.driver import PipelineDriver
from testcluster.kube_namespace import KubeNamespace, temporary_namespace, until
from testcluster.provider import Provider


@pytest.fixture
def namespaces(
    control_plane: Provider, request: pytest.FixtureRequest
) -> Iterator[list[KubeNamespace]]:
    """The namespaces of the first release, of the second, and of a team."""
    kube = control_plane.kube
    install_crd(kube)
    kind = request.node.callspec.id
    with (
        temporary_namespace(kube, f"first-{kind}") as first,
        temporary_namespace(kube, f"second-{kind}") as second,
        temporary_namespace(kube, f"team-{kind}") as team,
    ):
        yield [first, second, team]


@pytest.mark.parametrize(
    "values",
    [CLUSTER_WIDE, {"namespaces": ["team-namespaced"]}],
    ids=["cluster-wide", "namespaced"],
)
def test_second_release_starts_nothing_until_the_first_is_gone(
    namespaces: list[KubeNamespace], tmp_path: Path, values: Object
) -> None:
    first, second, team = namespaces
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    of_first = render(CLUSTER_WIDE, namespace=first.name)
    of_second = render(values, "second", second.name)
    logs = [folder / "log" for folder in folders]
    try:
        with ExitStack() as both:
            with running_operator(first, of_first, folders[0]):
                until(lambda: lease_holder(first) == release_of(first), 60)
                both.enter_context(running_operator(second, of_second, folders[1]))
                refused = f"another release of the operator, {release_of(first)}"
                until(lambda: refused in logs[1].read_text(), 60)
                assert is_reconciled(team, "before")
                assert lease_holder(first) == release_of(first)
            assert is_reconciled(team, "after")
    finally:
        # pytest shows them only if the test fails.
        for log in logs:
            print(log.read_text())


def release_of(namespace: KubeNamespace) -> str:
    """Return the name of the release in the Lease."""
    return f"{namespace.name}/finetune-operator"


def is_reconciled(team: KubeNamespace, name: str) -> bool:
    """Create a pipeline, and return whether an operator has reconciled it."""
    driver = PipelineDriver.start(team, pipeline_manifest(name, ALL_STAGES))
    driver.until(lambda: driver.object["status"].get("phase"))
    return True


def lease_holder(namespace: KubeNamespace) -> str:
    """Return the release that reconciles all namespaces."""
    public = KubeNamespace(namespace.kube, "kube-public")
    lease = public.get("lease", "finetune-pipelines") or {}
    return str(lease.get("spec", {}).get("holderIdentity", ""))
