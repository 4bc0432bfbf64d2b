from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from e2e.pipelines.chart import Operator
from e2e.pipelines.faults.fault import Fault
from e2e.pipelines.faults.journal import cost_of
from e2e.pipelines.faults.scene import Scene, Site, Workspace, scene
from e2e.pipelines.faults.table import PROPERTY, Row, as_property
from e2e.pipelines.faults.verdict import problems_of, row_of
from e2e.reference_run import make_material, upload
from testcluster.kube_namespace import pod, temporary_namespace
from testcluster.linux_namespaces.provider import LinuxNamespaces
from testcluster.provider import Provider

NAMESPACE = "fault-matrix"
CLAIMS = {"demo": "/claims/demo", "workspace": "/workspace"}


@pytest.fixture(scope="session")
def site(
    cluster: Provider, operator: Operator, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    """The material of the demo, a workspace, and the adapter of a training that nothing disturbs."""
    if not isinstance(cluster, LinuxNamespaces):
        pytest.skip(
            "the faults of nodes need the processes of a cluster of Linux namespaces"
        )
    material = tmp_path_factory.mktemp("material")
    make_material(material)
    with temporary_namespace(cluster.kube, NAMESPACE) as namespace:
        for claim in CLAIMS:
            namespace.claim(claim)
        namespace.create(
            pod(
                "filler",
                "busybox sleep 7200",
                node="ondemand-1",
                claims=CLAIMS,
                grace=1,
            )
        )
        namespace.wait_phase("filler", "Running")
        upload(namespace, material, "/claims/demo")
        workspace = Workspace(namespace, "workspace", "filler")
        site = Site(cluster, operator, workspace)
        with scene(site, "undisturbed", {}) as undisturbed:
            train = undisturbed.driver.wait_finished(seconds=300)["stages"]["train"]
            reference = workspace.adapter(train["identity"])
        assert reference, "the undisturbed training left no adapter"
        assert len(train["attempts"]) == 1
        yield replace(site, reference=reference)


@pytest.fixture
def judge(
    record_property: Callable[[str, object], None],
) -> Callable[[Fault, Scene], None]:
    """Wait until a scene has finished, record its row, and check it."""

    def judged(fault: Fault, scene: Scene) -> None:
        scene.driver.wait_finished(seconds=fault.seconds)
        adapter = scene.workspace.adapter(scene.driver.stage("train")["identity"])
        jobs = [attempt["job"] for attempt in scene.attempts]
        cost = cost_of(scene.workspace.journal(), jobs, scene.struck_at)
        row = row_of(fault, scene, cost, adapter)
        record_property(PROPERTY, as_property(row))
        print(row)
        problems = list(problems_of(fault, scene, cost, adapter))
        assert not problems, "\n".join([*problems, scene.driver.describe()])

    return judged


@pytest.fixture
def record_row(record_property: Callable[[str, object], None]) -> Callable[[Row], None]:
    """Record a row that no fault of train made."""
    return lambda row: record_property(PROPERTY, as_property(row))
