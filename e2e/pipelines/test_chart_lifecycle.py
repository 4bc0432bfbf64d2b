"""Running pipelines survive an upgrade, an uninstall, a reinstall and a narrower scope of the chart."""

import os
from collections.abc import Iterator

import pytest

from e2e.pipelines.chart import Operator
from e2e.pipelines.driver import PipelineDriver, pipeline
from testcluster import fixtures
from testcluster.kube_namespace import KubeNamespace, Object, temporary_namespace, until

LONG = {"train": 9000}
"""Half an hour of training, which a test ends when the release has changed."""


@pytest.fixture
def other_namespace(
    namespace: KubeNamespace, request: pytest.FixtureRequest
) -> Iterator[KubeNamespace]:
    """A second namespace for the test."""
    with temporary_namespace(
        namespace.kube, fixtures.namespace_name(f"{request.node.name}-other")
    ) as created:
        yield created


def running_training(driver: PipelineDriver) -> tuple[Object, Object]:
    """Wait until the train stage runs; return its Job and its pod."""
    driver.wait_state("train", "Running", seconds=90)
    pod = driver.pod("train").partition("/")[2]
    return driver.jobs("train")[0], driver.namespace.get("pod", pod)


def current_uids(driver: PipelineDriver, *objects: Object) -> list[str]:
    """Read the objects again by name, and return their uids; empty for an object that is gone."""
    current = (
        driver.namespace.get(manifest["kind"], manifest["metadata"]["name"])
        for manifest in objects
    )
    return [manifest.get("metadata", {}).get("uid", "") for manifest in current]


def uids(*objects: Object) -> list[str]:
    return [manifest["metadata"]["uid"] for manifest in objects]


def assert_each_stage_ran_once(driver: PipelineDriver) -> None:
    for stage in ("prepare", "train", "evaluate"):
        assert [attempt["outcome"] for attempt in driver.stage(stage)["attempts"]] == [
            "Succeeded"
        ], driver.describe()
        assert len(driver.jobs(stage)) == 1
    assert (driver.status["interruptions"], driver.stage("train")["failures"]) == (0, 0)


def test_helm_test_succeeds_while_a_replica_leads(operator: Operator):
    operator.wait_settled()
    assert "Succeeded" in operator.helm("test", operator.release, "--timeout", "2m")


def test_upgrade_replaces_replicas_and_keeps_running_pods(
    release: Operator, namespace: KubeNamespace
):
    driver = PipelineDriver.start(namespace, pipeline("upgraded", steps=LONG))
    job, pod = running_training(driver)
    before = set(release.pods())
    release.install("podAnnotations.release=next")
    until(lambda: before.isdisjoint(release.pods()), 60, release.logs)
    assert namespace.phase(pod["metadata"]["name"]) == "Running"
    driver.finish("train")
    driver.wait_finished(seconds=120)
    assert current_uids(driver, job, pod) == uids(job, pod)
    assert_each_stage_ran_once(driver)


def test_training_survives_an_uninstall_and_its_result_is_read(
    release: Operator, namespace: KubeNamespace
):
    """The training ends while no operator is installed; the next release reads its result and continues."""
    driver = PipelineDriver.start(namespace, pipeline("orphaned", steps=LONG))
    job, pod = running_training(driver)
    before = driver.object
    release.uninstall()
    until(lambda: not release.pods(), 60)
    # crds.keep is true: the CRD stays, and with it the pipeline and what the pipeline owns.
    assert current_uids(driver, before, job, pod) == uids(before, job, pod)
    assert namespace.phase(pod["metadata"]["name"]) == "Running"

    driver.finish("train")
    namespace.run(
        "wait",
        "--for=condition=Complete",
        "--timeout=120s",
        f"job/{job['metadata']['name']}",
        timeout=130,
    )
    assert (
        driver.stage("train")["state"] == "Running"
    )  # no operator runs, so the status is not updated
    assert driver.jobs("evaluate") == []

    release.install()
    driver.wait_finished(seconds=120)
    assert current_uids(driver, before, job, pod) == uids(before, job, pod)
    assert_each_stage_ran_once(driver)


@pytest.mark.skipif(
    os.environ.get("FAULTS") != "all",
    reason="a minute, and tests/integration/test_rbac.py has it without nodes; set FAULTS=all",
)
def test_operator_of_one_namespace_ignores_other_namespaces(
    release: Operator, namespace: KubeNamespace, other_namespace: KubeNamespace
):
    before = set(release.pods())
    release.install(f"namespaces={{{namespace.name}}}", "userRoles.create=false")
    until(lambda: before.isdisjoint(release.pods()), 60, release.logs)
    release.wait_settled()
    for kind in ("clusterrole", "clusterrolebinding"):
        assert (
            namespace.kube.run(
                "get",
                kind,
                "-l",
                "app.kubernetes.io/name=finetune-operator",
                "-o",
                "name",
            )
            == ""
        )

    ignored = PipelineDriver.start(other_namespace, pipeline("ignored"))
    watched = PipelineDriver.start(namespace, pipeline("watched"))
    watched.wait_finished()  # long enough for the other pipeline to start, if the operator watched its namespace
    assert "phase" not in ignored.status
    assert other_namespace.run("get", "jobs,pods,pvc", "-o", "name") == ""

    release.install()
    ignored.wait_finished(seconds=120)
    assert watched.status["phase"] == "Succeeded"
    assert_each_stage_ran_once(ignored)
    assert_each_stage_ran_once(watched)
