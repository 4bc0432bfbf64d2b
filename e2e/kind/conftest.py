import os
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
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

FOLDER = Path(__file__).resolve().parent
IMAGES = ("finetune-operator:dev",)
"""The trainer's image takes minutes to load onto three nodes; the tests' stages are scripts in the toolbox image."""
SHORT = frozenset(
    {
        "test_service_name_resolves_from_another_node",
        "test_operator_image_reads_api_with_service_account",
        "test_eviction_api_interrupts_and_training_resumes",
        "test_node_deleted_without_notice_is_an_interruption",
        "test_pipeline_of_all_stages_succeeds",
    }
)
"""Tests that run with KIND=short: the network, the image, an eviction, a lost node, and the chart without deploy."""


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Skip the tests that KIND does not select. The functions have no marks, because other files run them, too."""
    short = SHORT if os.environ.get("KIND") == "short" else frozenset()
    skipped = pytest.mark.skip(reason="runs with KIND=all")
    own = [item for item in items if item.path.parent == FOLDER]
    if _is_asked_for(config):
        check_collected(short, {item.name for item in own})
    for item in own:
        if item.name not in short and os.environ.get("KIND") != "all":
            item.add_marker(skipped)


def _is_asked_for(config: pytest.Config) -> bool:
    """Return whether the run is of the whole folder: its path or a folder above it is an argument."""
    return any(
        FOLDER.is_relative_to((config.invocation_params.dir / path).resolve())
        for path in config.args
    )


def check_collected(short: AbstractSet[str], collected: AbstractSet[str]) -> None:
    """Raise pytest.UsageError if a test of `short` was not collected: a renamed test would silently not run."""
    gone = sorted(short - collected)
    if gone:
        raise pytest.UsageError(
            f"KIND=short: {FOLDER} has no {', '.join(gone)}: change SHORT in its conftest.py"
        )


@pytest.fixture(scope="module")
def docker_engine() -> Iterator[str]:
    """A Docker engine that has a node image; the value is the image's name."""
    report = binaries.report_progress
    with ExitStack() as stack:
        try:
            engine.check()
            with step("programs and files of the node image"):
                # Everything that needs the internet comes before the engine, whose network is its own.
                binaries.build_missing([*NEEDED, "helm"], report)
                files = None if fixtures.NODE_IMAGE else node_image.build(report)
            fixtures.remove_leftovers()
            stack.enter_context(engine.running(report))
        except UsageError as error:
            missing(str(error))
        with step("node image loaded into Docker"):
            name = node_image.load(files, report) if files else fixtures.NODE_IMAGE
        assert name
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
