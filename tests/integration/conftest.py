"""Control planes. KUBERNETES=all runs the tests of this folder, without its subfolders, on each supported version.

`KUBERNETES=all python -m e2e tests/integration` builds the programs of the older versions first.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.operator.crd_rules import PLACES, Object, objects_with_rules

from testcluster import fixtures, go_modules
from testcluster.provider import ControlPlaneOptions, Provider

VERSIONS = (*go_modules.OLDER_KUBERNETES, "")
CONTROL_PLANES = {"control_plane", "audited"}
"""Fixtures that create a control plane, whose parameter is its version."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test on each version of Kubernetes."""
    fixture = CONTROL_PLANES.intersection(metafunc.fixturenames)
    if (
        fixture
        and os.environ.get("KUBERNETES") == "all"
        and metafunc.definition.path.parent == Path(__file__).parent
    ):
        names = [version or "newest" for version in VERSIONS]
        metafunc.parametrize(fixture.pop(), VERSIONS, indirect=True, ids=names)


@pytest.fixture(scope="package")
def control_plane(request: pytest.FixtureRequest) -> Iterator[Provider]:
    """A real control plane (API server, controllers, scheduler) whose three nodes are simulated by KWOK."""
    options = ControlPlaneOptions(kubernetes=getattr(request, "param", ""))
    with fixtures.cluster(
        "plane", "none", kwok_nodes=3, control_plane=options
    ) as created:
        yield created


@pytest.fixture(scope="module", params=PLACES)
def rules(request: pytest.FixtureRequest) -> list[Object]:
    """The objects that hold the rules of the CRD."""
    return objects_with_rules(request.param)
