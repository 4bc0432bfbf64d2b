"""The operator's process with exactly the RBAC rights of the chart: it works where it has them, and only there."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from support.charts import CLUSTER_WIDE, NAMESPACED, Object, container, of_kind, render

from e2e.pipelines.driver import PipelineDriver, pipeline
from testcluster.fixtures import namespace_name
from testcluster.kube import Kube
from testcluster.kube_namespace import KubeNamespace, temporary_namespace, until
from testcluster.provider import Provider

ROOT = Path(__file__).parents[2]
RIGHTS = ("ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")
GROUP = "--api-group=finetune.dev"


@pytest.fixture
def namespaces(control_plane: Provider, request: pytest.FixtureRequest) -> Iterator[list[KubeNamespace]]:
    """The namespaces of the operator, of a team and of another team."""
    kube = control_plane.kube
    kube.apply((ROOT / "crds" / "finetunepipelines.yaml").read_text())
    until(lambda: "finetunepipelines" in kube.run("api-resources", GROUP), 30)
    # Pipelines of earlier tests must be gone: in a namespace that is being deleted, creating is forbidden, whatever
    # the rights, and the operator would log that.
    until(lambda: not kube.run("get", "ftp", "--all-namespaces", "-o", "name"), 60)
    names = [namespace_name(f"{request.node.name}-{owner}") for owner in ("operator", "team", "others")]
    with (
        temporary_namespace(kube, names[0]) as own,
        temporary_namespace(kube, names[1]) as team,
        temporary_namespace(kube, names[2]) as others,
    ):
        yield [own, team, others]


def credentials(own: KubeNamespace, folder: Path) -> Path:
    """Write a kubeconfig with a token of the operator's service account; return its path."""
    config = yaml.safe_load(own.kube.kubeconfig.read_text())
    token = own.run("create", "token", "finetune-operator").strip()
    config["users"] = [{"name": user["name"], "user": {"token": token}} for user in config["users"]]
    file = folder / "kubeconfig"
    file.write_text(yaml.safe_dump(config))
    return file


@contextmanager
def rights_granted(kube: Kube, objects: list[Object]) -> Iterator[None]:
    """Create the RBAC objects of the chart, and delete them at the end."""
    rights = of_kind(objects, *RIGHTS)
    kube.apply(rights)
    try:
        yield
    finally:
        kube.run("delete", "--ignore-not-found", "--wait=false", "-f", "-", given=yaml.safe_dump_all(rights))


@contextmanager
def running_operator(own: KubeNamespace, objects: list[Object], folder: Path) -> Iterator[Path]:
    """Run the operator with the arguments and rights of the chart's objects; yield the path of its log."""
    log = folder / "log"
    with rights_granted(own.kube, objects), log.open("wb") as output:
        variables = {"KUBECONFIG": str(credentials(own, folder)), "POD_NAMESPACE": own.name, "POD_NAME": "replica"}
        command = [sys.executable, "-m", "finetune_operator", *container(objects)["args"], "--port=0"]
        with subprocess.Popen(command, env={**os.environ, **variables}, stdout=output, stderr=output) as process:
            try:
                yield log
            finally:
                process.terminate()


def exercise_all_rights(driver: PipelineDriver) -> None:
    """Make the operator use each of its rights: Jobs, claims, events, status, and the deletion of the pipeline."""
    driver.until(driver.jobs)
    driver.patch(suspend=True)
    driver.until(lambda: not driver.jobs())
    driver.patch(workspace={"whenDeleted": "Delete"})
    claim = f"{driver.name}-workspace"
    driver.until(lambda: driver.namespace.get("pvc", claim)["metadata"].get("ownerReferences"))
    driver.annotate("cancel", "1")
    driver.wait_finished("Cancelled")
    events = json.loads(driver.namespace.run("get", "events", "-o", "json"))["items"]
    assert [event for event in events if event["involvedObject"]["kind"] == "FineTunePipeline"]
    driver.patch(ttlSecondsAfterFinished=1)
    driver.until(lambda: not driver.object)


def test_cluster_role_suffices_in_every_namespace(namespaces: list[KubeNamespace], tmp_path: Path):
    own, team, others = namespaces
    with running_operator(own, render(CLUSTER_WIDE, namespace=own.name), tmp_path) as log:
        for namespace in (team, others):
            exercise_all_rights(PipelineDriver.start(namespace, pipeline("anywhere")))
        assert own.get("lease", "finetune-operator")["spec"]["holderIdentity"] == "replica"
    assert "orbidden" not in log.read_text()


def test_role_suffices_in_its_namespace_and_nowhere_else(namespaces: list[KubeNamespace], tmp_path: Path):
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
        rule for role in of_kind(objects, "ClusterRole") for rule in role["rules"] if "jobs" in rule["resources"]
    ):
        rule["verbs"].remove("create")
    with running_operator(own, objects, tmp_path) as log:
        PipelineDriver.start(team, pipeline("refused"))
        until(lambda: 'cannot create resource "jobs"' in log.read_text(), 60, log.read_text)
