"""The operator's process with the rights that the chart gives it and no others: it does its work, where it may."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from support.charts import CLUSTER_WIDE, NAMESPACED, Object, container, of, rendered

from e2e.pipelines.driver import PipelineDriver, pipeline
from testcluster.fixtures import namespace_name
from testcluster.kube import Kube
from testcluster.kube_namespace import KubeNamespace, temporary_namespace, until

ROOT = Path(__file__).parents[2]
RIGHTS = ("ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")
GROUP = "--api-group=finetune.dev"


@pytest.fixture
def worlds(control_plane, request) -> Iterator[list[KubeNamespace]]:
    """Namespaces: of the operator, of a team, and of another team."""
    kube = control_plane.kube
    kube.apply((ROOT / "crds" / "finetunepipelines.yaml").read_text())
    until(lambda: "finetunepipelines" in kube.run("api-resources", GROUP), 30)
    # In a namespace that is being deleted everything is forbidden, with whatever rights.
    until(lambda: not kube.run("get", "ftp", "--all-namespaces", "-o", "name"), 60)
    names = [namespace_name(f"{request.node.name}-{who}") for who in ("operator", "team", "others")]
    with (
        temporary_namespace(kube, names[0]) as own,
        temporary_namespace(kube, names[1]) as team,
        temporary_namespace(kube, names[2]) as others,
    ):
        yield [own, team, others]


def credentials(own: KubeNamespace, folder: Path) -> Path:
    """Write a kubeconfig of the operator's service account."""
    config = yaml.safe_load(own.kube.kubeconfig.read_text())
    token = own.run("create", "token", "finetune-operator").strip()
    config["users"] = [{"name": user["name"], "user": {"token": token}} for user in config["users"]]
    file = folder / "kubeconfig"
    file.write_text(yaml.safe_dump(config))
    return file


@contextmanager
def granted(kube: Kube, objects: list[Object]) -> Iterator[None]:
    """Give the chart's rights for a while."""
    rights = of(objects, *RIGHTS)
    kube.apply(rights)
    try:
        yield
    finally:
        kube.run("delete", "--ignore-not-found", "--wait=false", "-f", "-", given=yaml.safe_dump_all(rights))


@contextmanager
def running(own: KubeNamespace, objects: list[Object], folder: Path) -> Iterator[Path]:
    """Run the operator as the chart's objects would, and give its log."""
    log = folder / "log"
    with granted(own.kube, objects), log.open("wb") as to:
        given = {"KUBECONFIG": str(credentials(own, folder)), "POD_NAMESPACE": own.name, "POD_NAME": "replica"}
        command = [sys.executable, "-m", "finetune_operator", *container(objects)["args"], "--port=0"]
        with subprocess.Popen(command, env={**os.environ, **given}, stdout=to, stderr=to) as process:
            try:
                yield log
            finally:
                process.terminate()


def lives_a_life(story: PipelineDriver) -> None:
    """Go through all that an operator asks the API server for: Jobs, claims, events, statuses, and an end."""
    story.until(story.jobs)
    story.change(suspend=True)
    story.until(lambda: not story.jobs())
    story.change(workspace={"whenDeleted": "Delete"})
    claim = f"{story.name}-workspace"
    story.until(lambda: story.namespace.get("pvc", claim)["metadata"].get("ownerReferences"))
    story.annotate("cancel", "1")
    story.wait_finished("Cancelled")
    events = json.loads(story.namespace.run("get", "events", "-o", "json"))["items"]
    assert [one for one in events if one["involvedObject"]["kind"] == "FineTunePipeline"]
    story.change(ttlSecondsAfterFinished=1)
    story.until(lambda: not story.object)


def test_everywhere_with_the_cluster_role(worlds, tmp_path):
    own, team, others = worlds
    with running(own, rendered(CLUSTER_WIDE, namespace=own.namespace), tmp_path) as log:
        for place in (team, others):
            lives_a_life(PipelineDriver.start(place, pipeline("anywhere")))
        assert own.get("lease", "finetune-operator")["spec"]["holderIdentity"] == "replica"
    assert "orbidden" not in log.read_text()


def test_in_its_namespace_with_a_role_and_nowhere_else(worlds, tmp_path):
    own, team, others = worlds
    values = NAMESPACED | {"namespaces": [team.name]}
    with running(own, rendered(values, namespace=own.namespace), tmp_path) as log:
        foreign = PipelineDriver.start(others, pipeline("foreign"))
        lives_a_life(PipelineDriver.start(team, pipeline("near")))
        assert "phase" not in foreign.status
        assert others.run("get", "jobs,pvc", "-o", "name") == ""
    assert "orbidden" not in log.read_text()


def test_a_right_that_was_missing_would_have_been_noticed(worlds, tmp_path):
    own, team, _ = worlds
    objects = rendered(CLUSTER_WIDE, namespace=own.namespace)
    for rule in (rule for role in of(objects, "ClusterRole") for rule in role["rules"] if "jobs" in rule["resources"]):
        rule["verbs"].remove("create")
    with running(own, objects, tmp_path) as log:
        PipelineDriver.start(team, pipeline("refused"))
        until(lambda: 'cannot create resource "jobs"' in log.read_text(), 60, log.read_text)
