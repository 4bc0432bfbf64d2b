"""The operator's process with exactly the RBAC rights of the chart: it works only in namespaces that grant them."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.operator.charts import CLUSTER_WIDE, NAMESPACED, of_kind, render
from support.operator.operator_process import install_crd, running_operator

from e2e.pipelines.driver import PipelineDriver, pipeline
from testcluster.errors import TimedOut
from testcluster.fixtures import namespace_name
from testcluster.kube_namespace import KubeNamespace, temporary_namespace, until
from testcluster.provider import Provider


@pytest.fixture
def namespaces(
    control_plane: Provider, request: pytest.FixtureRequest
) -> Iterator[list[KubeNamespace]]:
    """The namespaces of the operator, of a team and of another team."""
    kube = control_plane.kube
    install_crd(kube)
    # Pipelines of earlier tests must be gone: in a namespace that is being deleted, creating is forbidden, whatever
    # the rights, and the operator would log that.
    until(lambda: not kube.run("get", "ft", "--all-namespaces", "-o", "name"), 60)
    names = [
        namespace_name(f"{request.node.name}-{owner}")
        for owner in ("operator", "team", "others")
    ]
    with (
        temporary_namespace(kube, names[0]) as own,
        temporary_namespace(kube, names[1]) as team,
        temporary_namespace(kube, names[2]) as others,
    ):
        yield [own, team, others]


def exercise_all_rights(driver: PipelineDriver) -> None:
    """Make the operator use each of its rights: Jobs, claims, events, status, and the deletion of the pipeline."""
    driver.until(driver.jobs)
    driver.patch(suspend=True)
    driver.until(lambda: not driver.jobs())
    driver.patch(workspace={"whenDeleted": "Delete"})
    claim = f"{driver.name}-workspace"
    driver.until(
        lambda: driver.namespace.get("pvc", claim)["metadata"].get("ownerReferences")
    )
    driver.annotate("cancel", "1")
    driver.wait_finished("Cancelled")
    events = json.loads(driver.namespace.run("get", "events", "-o", "json"))["items"]
    assert [
        event
        for event in events
        if event["involvedObject"]["kind"] == "FineTunePipeline"
    ]
    driver.patch(ttlSecondsAfterFinished=1, whenExpired="Delete")
    driver.until(lambda: not driver.object)


def test_cluster_role_suffices_in_every_namespace(
    namespaces: list[KubeNamespace], tmp_path: Path
):
    own, team, others = namespaces
    with running_operator(
        own, render(CLUSTER_WIDE, namespace=own.name), tmp_path
    ) as log:
        for namespace in (team, others):
            exercise_all_rights(PipelineDriver.start(namespace, pipeline("anywhere")))
        assert own.get("lease", "finetune-operator")["spec"][
            "holderIdentity"
        ].startswith("replica_")
    assert "orbidden" not in log.read_text()


def test_role_suffices_in_its_namespace_and_nowhere_else(
    namespaces: list[KubeNamespace], tmp_path: Path
):
    own, team, others = namespaces
    values = NAMESPACED | {"namespaces": [team.name]}
    with running_operator(own, render(values, namespace=own.name), tmp_path) as log:
        ignored = PipelineDriver.start(others, pipeline("ignored"))
        exercise_all_rights(PipelineDriver.start(team, pipeline("watched")))
        assert "phase" not in ignored.status
        assert others.run("get", "jobs,pvc", "-o", "name") == ""
    assert "orbidden" not in log.read_text()


def test_missing_right_is_logged(namespaces: list[KubeNamespace], tmp_path: Path):
    """Proves that the other tests of this file would notice a right that the chart lacks."""
    own, team, _ = namespaces
    objects = render(CLUSTER_WIDE, namespace=own.name)
    for rule in (
        rule
        for role in of_kind(objects, "ClusterRole")
        for rule in role["rules"]
        if "jobs" in rule["resources"]
    ):
        rule["verbs"].remove("create")
    with running_operator(own, objects, tmp_path) as log:
        PipelineDriver.start(team, pipeline("refused"))
        until(lambda: "cannot create resource" in log.read_text(), 60, log.read_text)


def is_refused_a_job(own: KubeNamespace, namespace: KubeNamespace) -> bool:
    """Check whether the policies are in force: the API server reads them some time after they were created."""
    account = f"system:serviceaccount:{own.name}:finetune-operator"
    try:
        namespace.run(
            "create",
            "job",
            "probe",
            "--image=probe",
            "--dry-run=server",
            "--as",
            account,
        )
    except TimedOut as error:
        return "ValidatingAdmissionPolicy" in str(error)
    return False


def test_pipeline_in_kube_system_reports_the_policy(
    namespaces: list[KubeNamespace], tmp_path: Path
):
    own, _, _ = namespaces
    with running_operator(own, render(CLUSTER_WIDE, namespace=own.name), tmp_path):
        system = KubeNamespace(own.kube, "kube-system")
        until(lambda: is_refused_a_job(own, system), 60)
        driver = PipelineDriver.start(system, pipeline("system"))
        driver.until(
            lambda: (
                "admissionPolicy.deniedNamespaces"
                in driver.condition("Ready").get("message", "")
            )
        )
        assert driver.jobs() == []
        driver.namespace.run("delete", "ft", driver.name)
