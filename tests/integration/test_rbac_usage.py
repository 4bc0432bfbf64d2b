"""Every right of the chart is used, and none is missing: the API server's audit log of the operator's whole work.

The operator runs as its ServiceAccount on a real control plane. A simulated kubelet runs the pods.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from support.operator.charts import CLUSTER_WIDE, Object, grants, of_kind, render
from support.operator.operator_process import install_crd, running_operator
from support.operator.pipeline_objects import pipeline_manifest
from support.operator.scenario import ALL_STAGES
from support.operator.simulated_kubelet import SimulatedKubelet, simulated_kubelet
from support.operator.volumes import (
    GROWING,
    create_growing_class,
    create_volume,
    wait_bound,
)

from e2e.pipelines.driver import PipelineDriver
from testcluster import fixtures
from testcluster.kube_namespace import KubeNamespace, temporary_namespace
from testcluster.provider import AUDIT_LOG, ControlPlaneOptions, Provider

Right = tuple[str, str, str]
"""Group, resource with its subresource, verb."""
OWN = "usage-operator"
ACCOUNT = f"system:serviceaccount:{OWN}:finetune-operator"
VALUES: Object = {**CLUSTER_WIDE, "nodeLost": {"replaceAfterSeconds": 1}}
"""Values with which the chart grants all rights that the operator can use."""
UNUSED: dict[Right, str] = {
    (
        "finetune.dev",
        "finetunepipelines/finalizers",
        "update",
    ): "checked for owner references by an admission plugin",
    (
        "",
        "services",
        "get",
    ): "for a Service that has lost the operator's labels, which no informer watches",
}
"""Rights that no request of this file uses, with the reason."""
SOMETIMES_USED: Right = ("", "persistentvolumeclaims", "get")
"""For workspace.existingClaim, which no informer watches, and for any claim until all claims are listed."""
EVERY_USER = {"selfsubjectaccessreviews", "selfsubjectrulesreviews"}
"""Resources that Kubernetes lets every account use."""
AUDITED = ControlPlaneOptions(
    audit_policy={"rules": [{"level": "Metadata", "omitStages": ["RequestReceived"]}]},
    # Every line is there before the request is answered, so that the log can be read at once.
    flags={"kube-apiserver": {"audit-log-mode": "blocking"}},
)
pytestmark = pytest.mark.skipif(
    fixtures.PROVIDER == "kind", reason="the provider kind has no audit log"
)


@pytest.fixture(scope="module")
def audited(request: pytest.FixtureRequest) -> Iterator[Provider]:
    """A control plane with an audit log."""
    options = replace(AUDITED, kubernetes=getattr(request, "param", ""))
    with fixtures.cluster("audited", "none", control_plane=options) as created:
        yield created


@pytest.fixture(scope="module")
def requests(
    audited: Provider, tmp_path_factory: pytest.TempPathFactory
) -> list[Object]:
    """The audited requests of an operator that has done everything it can do."""
    kube = audited.kube
    install_crd(kube)
    create_growing_class(kube)
    folder = tmp_path_factory.mktemp("operator")
    with (
        temporary_namespace(kube, OWN) as own,
        temporary_namespace(kube, "usage-team") as team,
        temporary_namespace(kube, "usage-lost") as lost,
    ):
        with (
            running_operator(own, rendered(), folder) as log,
            simulated_kubelet(team) as kubelet,
        ):
            try:
                replacement = LostNode.start(lost)
                live_a_whole_life(team, kubelet)
                replacement.wait()
                repair_an_unreadable_pipeline(team)
            finally:
                print(log.read_text())  # pytest shows it only if the test fails
        return requests_of(audited.folder / AUDIT_LOG, ACCOUNT)


def rendered() -> list[Object]:
    return render(VALUES, namespace=OWN)


@dataclass
class LostNode:
    """A pipeline whose training runs on a node without a kubelet."""

    driver: PipelineDriver
    kubelet: SimulatedKubelet

    @classmethod
    def start(cls, namespace: KubeNamespace) -> "LostNode":
        """Start the training, and delete its pod, which no kubelet ends."""
        create_volume(namespace, "lost-workspace")
        lost = cls(
            PipelineDriver.start(namespace, manifest("lost")),
            SimulatedKubelet(namespace, held={"train"}),
        )
        lost.driver.until(lost.running)
        [pod] = lost.running()
        namespace.kube.apply(
            [{"apiVersion": "v1", "kind": "Node", "metadata": {"name": "gone"}}]
        )
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": pod},
            "target": {"kind": "Node", "name": "gone"},
        }
        namespace.create(binding)
        # A pod with a node is not deleted before its kubelet says that it has ended.
        namespace.run("delete", "pod", pod, "--grace-period=1", "--wait=false")
        return lost

    def running(self) -> list[str]:
        """Return the names of the running pods of the training, after the next statuses of all pods."""
        self.kubelet.sync()
        return [pod["metadata"]["name"] for pod in self.kubelet.running("train")]

    def wait(self) -> None:
        """Wait until another attempt has replaced the training, and its pod is gone."""
        self.driver.until(lambda: len(self.driver.stage("train")["attempts"]) > 1, 150)
        self.driver.until(lambda: len(self.running()) == 1)
        first, second = self.driver.stage("train")["attempts"]
        assert first["outcome"] == "Interrupted", first
        assert [pod["metadata"]["name"] for pod in self.kubelet.pods("train")] == (
            self.running()
        )
        assert self.running()[0].startswith(second["job"])


def live_a_whole_life(team: KubeNamespace, kubelet: SimulatedKubelet) -> None:
    """Run a pipeline that waits, is evicted, succeeds, is edited, grows, loses its server, and is deleted."""
    create_volume(team, "life-workspace")
    team.run("create", "quota", "none", "--hard=pods=0")
    kubelet.held.add("train")
    driver = PipelineDriver.start(team, manifest("life"))
    wait_bound(team, "life-workspace")
    # The operator knows the quota only from an event.
    driver.until(lambda: "exceeded quota" in driver.stage("prepare").get("message", ""))
    team.run("delete", "quota", "none")
    kubelet.evict("train")
    driver.until(lambda: len(driver.stage("train")["attempts"]) == 2)
    kubelet.held.clear()
    driver.wait_finished()
    scale_server(driver)
    edit_and_grow(driver)
    lose_and_remove_server(driver)
    kubelet.held.add(
        "train"
    )  # before the patch that starts it, or its pod ends at once
    driver.patch(suspend=True, train={"epochs": 2})
    driver.patch(suspend=False)
    driver.wait_state("train", "Running")
    driver.annotate("cancel", "1")
    driver.wait_finished("Cancelled")
    driver.patch(ttlSecondsAfterFinished=1, whenExpired="Delete")
    driver.until(lambda: not driver.object)


def manifest(name: str, **changes: Object) -> Object:
    spec = {
        **ALL_STAGES,
        "workspace": {"size": "1Gi", "storageClassName": GROWING},
        **changes,
    }
    return pipeline_manifest(name, spec)


def scale_server(driver: PipelineDriver) -> None:
    """Scale the server as an autoscaler does, by the subresource of the pipeline; the server stays."""
    job = driver.stage("deploy")["attempts"][-1]["job"]
    driver.namespace.run("scale", "ft", driver.name, "--replicas=2")
    driver.until(
        lambda: driver.namespace.get("deployment", job)["spec"]["replicas"] == 2
    )
    driver.until(lambda: driver.object["status"]["observedGeneration"] > 1)
    assert len(driver.stage("deploy")["attempts"]) == 1
    path = f"/apis/finetune.dev/v1alpha1/namespaces/{driver.namespace.name}/finetunepipelines/{driver.name}/scale"
    scale = json.loads(driver.namespace.kube.run("get", "--raw", path))
    assert scale["spec"]["replicas"] == 2
    assert scale["status"]["selector"] == f"finetune.dev/server={job}"


def edit_and_grow(driver: PipelineDriver) -> None:
    before = driver.stage("deploy")["attempts"][-1]["job"]
    driver.patch(deploy={"smokeTest": {"prompt": "Another prompt"}})
    driver.until(lambda: driver.stage("deploy")["attempts"][-1]["job"] != before)
    driver.wait_finished()
    driver.until(lambda: not driver.namespace.get("deployment", before))
    driver.patch(workspace={"size": "2Gi", "whenDeleted": "Delete"})
    claim = f"{driver.name}-workspace"
    driver.until(
        lambda: (
            driver.namespace.get("pvc", claim)["spec"]["resources"]["requests"][
                "storage"
            ]
            == "2Gi"
            and driver.namespace.get("pvc", claim)["metadata"].get("ownerReferences")
        )
    )


def lose_and_remove_server(driver: PipelineDriver) -> None:
    lost = driver.stage("deploy")["attempts"][-1]["job"]
    driver.namespace.run("delete", "deployment", lost)
    driver.until(lambda: driver.stage("deploy")["attempts"][-1]["job"] != lost)
    driver.wait_finished()
    driver.patch(deploy=None)
    driver.until(lambda: not driver.namespace.get("service", f"{driver.name}-deploy"))


def repair_an_unreadable_pipeline(team: KubeNamespace) -> None:
    """Create a pipeline that the CRD admits and that the operator cannot read."""
    affinity: Object = {}
    for _ in range(40):
        affinity = {"nested": affinity}
    driver = PipelineDriver.start(
        team, manifest("deep", prepare={"pod": {"affinity": affinity}})
    )
    driver.until(lambda: driver.condition("Stalled").get("reason") == "SpecInvalid")


def requests_of(log: Path, user: str) -> list[Object]:
    """Return the audit events of a user that concern resources."""
    events = [json.loads(line) for line in log.read_text().splitlines()]
    return [
        event
        for event in events
        if event["user"]["username"] == user and "objectRef" in event
    ]


def right_of(request: Object) -> Right:
    reference = request["objectRef"]
    resource = "/".join(
        filter(None, (reference["resource"], reference.get("subresource")))
    )
    return reference.get("apiGroup", ""), resource, request["verb"]


def granted() -> set[Right]:
    roles = of_kind(rendered(), "ClusterRole", "Role")
    operators = [
        role
        for role in roles
        if not role["metadata"]["name"].endswith(("-view", "-edit"))
    ]
    return set(grants(operators))


def test_every_right_of_the_chart_is_used(requests: list[Object]):
    unused = granted() - {right_of(request) for request in requests}
    assert unused - {SOMETIMES_USED} == set(UNUSED)


def test_operator_sends_no_request_without_a_right(requests: list[Object]):
    used = {
        right_of(request)
        for request in requests
        if request["objectRef"]["resource"] not in EVERY_USER
    }
    assert used - granted() == set()
    forbidden = [
        request
        for request in requests
        if request.get("responseStatus", {}).get("code") == 403
    ]
    assert forbidden == []
