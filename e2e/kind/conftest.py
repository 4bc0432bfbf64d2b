import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.programs import missing

from e2e.kind.steps import PROPERTY, step, take
from e2e.pipelines.chart import Operator
from testcluster import binaries, fixtures
from testcluster.errors import UsageError
from testcluster.kind import engine, node_image
from testcluster.kind.provider import NEEDED, Kind
from testcluster.nodes import parse
from testcluster.provider import ClusterSpec, Provider

IMAGES = ("finetune-operator:dev",)
"""The trainer's image takes minutes to load onto three nodes; the tests' stages are scripts in the toolbox image."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip these tests without KIND=all. The functions have no marks, because other files run them, too."""
    skipped = pytest.mark.skip(reason="runs with KIND=all")
    for item in items:
        if item.path.parent == Path(__file__).parent and os.environ.get("KIND") != "all":
            item.add_marker(skipped)


@pytest.fixture(scope="module")
def docker_engine() -> Iterator[str]:
    """A Docker engine that has a node image; the value is the image's name."""
    report = binaries.report_progress
    try:
        engine.check()
        with step("programs and files of the node image"):
            # Everything that needs the internet comes before the engine, whose network is its own.
            binaries.build_missing([*NEEDED, "helm"], report)
            files = None if fixtures.NODE_IMAGE else node_image.build(report)
    except UsageError as error:
        missing(str(error))
    fixtures.remove_leftovers()
    with engine.running(report):
        with step("node image loaded into Docker"):
            name = node_image.load(files, report) if files else fixtures.NODE_IMAGE
        yield name


@pytest.fixture(scope="module")
def cluster(docker_engine: str) -> Iterator[Provider]:
    """A cluster of kind with a control plane and three nodes, which have the operator's image."""
    created = Kind(fixtures.cluster_name("kind"), node_image=docker_engine)
    with step("cluster created, nodes Ready, operator's image on every node"):
        created.up(ClusterSpec(parse("ondemand,spot:2"), images=IMAGES))
    try:
        yield created
    finally:
        created.down()


@pytest.fixture(scope="module")
def operator(cluster: Provider) -> Operator:
    """The operator with two replicas, installed with its chart."""
    release = Operator(cluster.kube)
    with step("chart installed, both replicas Ready"):
        release.install()
    return release


@pytest.fixture(autouse=True)
def recorded_steps(request: pytest.FixtureRequest, cluster: Provider) -> Iterator[None]:
    """Add the steps of the test and of its fixtures to its report, for the summary of the test run."""
    with step(request.node.name):
        yield
    request.node.user_properties.append((PROPERTY, take()))
