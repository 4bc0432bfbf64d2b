"""Pipelines and the chart under real Flux: GITOPS=all. Its controllers take minutes to build."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import yaml

from e2e.gitops.flux import NAMESPACE, Flux, Kustomization, running_flux
from e2e.gitops.flux_release import (
    EXAMPLES,
    Object,
    example,
    helm_release,
    release,
    released,
    wait_released,
)
from e2e.gitops.git_repository import GitRepository
from e2e.gitops.manifests import (
    NEWER_SUMMARY,
    SUMMARY,
    broken_chart,
    failing,
    failing_once,
    gated,
    newer_chart,
    unreadable,
    without_stalled,
)
from e2e.gitops.second_lane import more
from e2e.pipelines import chart
from e2e.pipelines.driver import PipelineDriver, pipeline
from testcluster import fixtures
from testcluster.kube_namespace import KubeNamespace, temporary_namespace, until
from testcluster.provider import Provider

EARLY = "failed early due to stalled resources"
TIMEOUT = "timeout waiting for"

pytestmark = more


@pytest.fixture(scope="module")
def flux(
    own_cluster: Provider, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Flux]:
    with running_flux(own_cluster.kube, tmp_path_factory.mktemp("flux")) as running:
        yield running


@pytest.fixture(scope="module")
def charts(flux: Flux) -> GitRepository:
    """The repository of the chart, which Flux knows."""
    repository = flux.git.create("charts")
    shutil.copytree(chart.CHART, repository.folder / "charts" / chart.CHART.name)
    repository.commit({})
    flux.kube.apply([flux.source(repository)])
    return repository


@pytest.fixture(scope="module")
def operator(flux: Flux, charts: GitRepository) -> KubeNamespace:
    """The namespace of the chart's HelmRelease; every pipeline here is reconciled by what it installs."""
    release(flux, replicaCount=1)
    return KubeNamespace(flux.kube, chart.NAMESPACE)


@pytest.fixture
def new_kustomization(
    flux: Flux, operator: KubeNamespace, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Kustomization]]:
    """Return a new namespace with a repository for it; the caller creates the Kustomization."""
    with ExitStack() as stack:

        def create(purpose: str = "") -> Kustomization:
            name = fixtures.namespace_name(request.node.name + purpose)
            namespace = stack.enter_context(temporary_namespace(flux.kube, name))
            created = Kustomization(flux, namespace, flux.git.create(name))
            stack.callback(created.delete)
            return created

        yield create


@pytest.fixture
def kustomization(new_kustomization: Callable[..., Kustomization]) -> Kustomization:
    """A new namespace with a repository for it; the test creates the Kustomization."""
    return new_kustomization()


@pytest.mark.parametrize("name", ["operator", "pipelines", "platform"])
def test_api_server_accepts_the_example(flux: Flux, name: str):
    manifests = (EXAMPLES / f"{name}.yaml").read_text()
    flux.kube.run(
        "create", "--dry-run=server", "--validate=strict", "-f", "-", given=manifests
    )


def test_replica_that_leads_answers_through_the_api_server(operator: KubeNamespace):
    """By the command of docs/guides/alerts.md, which needs no Helm release."""
    [pod] = operator.run(
        "get", "pods", "-l", "app.kubernetes.io/name=finetune-operator", "-o", "name"
    ).split()
    url = f"/api/v1/namespaces/{chart.NAMESPACE}/pods/{pod.removeprefix('pod/')}/proxy/readyz"
    until(lambda: operator.run("get", "--raw", url) == "leader\n", 30)


def test_kustomization_is_ready_when_pipeline_succeeded(kustomization: Kustomization):
    kustomization.repository.commit({"bot.yaml": pipeline("bot", steps={"train": 10})})
    kustomization.create()
    until(
        lambda: kustomization.ready.get("status") == "Unknown",
        30,
        kustomization.describe,
    )
    kustomization.pipeline("bot").wait_state("train", "Running")
    assert kustomization.ready["status"] == "Unknown"
    kustomization.wait_ready("True", "ReconciliationSucceeded")
    assert kustomization.pipeline("bot").status["phase"] == "Succeeded"


def test_failed_pipeline_fails_the_kustomization_early(kustomization: Kustomization):
    kustomization.repository.commit({"bot.yaml": failing()})
    kustomization.create()
    message = kustomization.wait_failed(EARLY)
    assert f"FineTunePipeline/{kustomization.name}/bot status: 'Failed'" in message
    kustomization.commit({"bot.yaml": pipeline("bot")})
    kustomization.wait_ready("True", "ReconciliationSucceeded")


def test_closed_gate_fails_the_kustomization_until_lowered(
    kustomization: Kustomization,
):
    kustomization.namespace.claim("models")
    kustomization.repository.commit({"bot.yaml": gated(0.95)})
    kustomization.create()
    kustomization.wait_failed(EARLY)
    kustomization.commit({"bot.yaml": gated(0.5)})
    kustomization.wait_ready("True", "ReconciliationSucceeded")


def test_unreadable_pipeline_fails_the_kustomization_early(
    kustomization: Kustomization,
):
    kustomization.repository.commit({"bot.yaml": unreadable()})
    kustomization.create()
    kustomization.wait_failed(EARLY)
    kustomization.commit({"bot.yaml": pipeline("bot")})
    kustomization.wait_ready("True", "ReconciliationSucceeded")


def test_dependent_kustomization_waits_for_the_pipeline(
    new_kustomization: Callable[..., Kustomization],
):
    first = new_kustomization("first")
    second = new_kustomization("second")
    first.repository.commit({"bot.yaml": pipeline("bot", steps={"train": 30})})
    second.repository.commit({"next.yaml": pipeline("next")})
    first.create()
    second.create(dependsOn=[{"name": first.name}])
    first.pipeline("bot").wait_state("train", "Running")
    second.wait_ready("False", "DependencyNotReady")
    assert not second.pipeline("next").object
    first.wait_ready("True", "ReconciliationSucceeded")
    second.wait_ready("True", "ReconciliationSucceeded")
    finished = first.pipeline("bot").status["finishedAt"]
    assert second.pipeline("next").object["metadata"]["creationTimestamp"] >= finished


def test_prune_deletes_pipeline_and_keeps_the_claim(kustomization: Kustomization):
    kustomization.repository.commit(
        {"bot.yaml": pipeline("bot"), "next.yaml": pipeline("next")}
    )
    kustomization.create()
    kustomization.wait_ready("True", "ReconciliationSucceeded")
    kustomization.commit({"bot.yaml": None})
    until(lambda: not kustomization.pipeline("bot").object, 60, kustomization.describe)
    until(
        lambda: "bot" not in kustomization.namespace.run("get", "jobs", "-o", "name"),
        60,
        kustomization.describe,
    )
    assert (
        "deletionTimestamp"
        not in kustomization.namespace.get("pvc", "bot-workspace")["metadata"]
    )
    assert kustomization.pipeline("next").object


def test_pipeline_is_not_changed_by_later_reconciliations(kustomization: Kustomization):
    kustomization.repository.commit({"bot.yaml": pipeline("bot")})
    kustomization.create(interval="5s")
    kustomization.wait_ready("True", "ReconciliationSucceeded")
    before = kustomization.pipeline("bot").object["metadata"]
    until(lambda: reconciled(kustomization) >= 3, 60, kustomization.describe)
    after = kustomization.pipeline("bot").object["metadata"]
    assert (before["generation"], before["resourceVersion"]) == (
        after["generation"],
        after["resourceVersion"],
    )


def test_change_by_kubectl_is_undone_and_retry_is_obeyed_first(
    kustomization: Kustomization,
):
    kustomization.repository.commit({"bot.yaml": failing_once()})
    kustomization.create(interval="5s", wait=False)
    driver = kustomization.pipeline("bot")
    until(lambda: driver.object, 30, kustomization.describe)
    driver.wait_finished("Failed")
    driver.annotate("retry", "now")
    driver.until(lambda: driver.status["phase"] == "Succeeded")
    until(
        lambda: "annotations" not in driver.object["metadata"],
        30,
        kustomization.describe,
    )
    assert driver.status["observedAnnotations"]["retry"] == "now"
    before = driver.object["metadata"]["generation"]
    driver.patch(suspend=True)
    # The generation, because Flux may undo the change before the test reads it.
    until(
        lambda: driver.object["metadata"]["generation"] == before + 2,
        30,
        kustomization.describe,
    )
    assert not driver.object["spec"]["suspend"]
    assert driver.status["phase"] == "Succeeded"


def test_suspended_pipeline_runs_into_the_timeout(kustomization: Kustomization):
    kustomization.repository.commit({"bot.yaml": pipeline("bot", suspend=True)})
    kustomization.create(timeout="10s")
    message = kustomization.wait_failed(TIMEOUT)
    assert f"FineTunePipeline/{kustomization.name}/bot status: 'InProgress'" in message


def test_suspend_in_git_is_applied_while_training_runs(kustomization: Kustomization):
    """The commits wait for no health check, whose timeout is longer than each wait of this test."""

    def at(*, suspend: bool) -> Object:
        return {"bot.yaml": pipeline("bot", steps={"train": 3000}, suspend=suspend)}

    kustomization.repository.commit(at(suspend=False))
    kustomization.create(timeout="10m")
    driver = kustomization.pipeline("bot")
    driver.wait_state("train", "Running")
    kustomization.commit(at(suspend=True))
    driver.until(
        lambda: (
            driver.status["phase"] == "Suspended"
            and driver.stage("train")["state"] != "Running"
        )
    )
    kustomization.commit(at(suspend=False))
    driver.wait_state("train", "Running")
    driver.finish("train")
    kustomization.wait_ready("True", "ReconciliationSucceeded")


def test_retry_in_git_fails_once_more_at_most(kustomization: Kustomization):
    """Until the operator has read the annotation, the pipeline is still Failed."""
    kustomization.repository.commit({"bot.yaml": failing_once()})
    kustomization.create()
    kustomization.wait_failed(EARLY)
    retried = failing_once()
    retried["metadata"]["annotations"] = {"finetune.dev/retry": "1"}
    commit = kustomization.commit({"bot.yaml": retried})
    kustomization.wait_ready("True", "ReconciliationSucceeded")
    assert kustomization.failures(commit) <= 1
    assert kustomization.pipeline("bot").status["observedAnnotations"]["retry"] == "1"


def reconciled(kustomization: Kustomization) -> int:
    """Return how often the Kustomization was reconciled with success, by its own history."""
    return sum(
        entry["totalReconciliations"]
        for entry in kustomization.status.get("history", ())
    )


def arguments(operator: KubeNamespace) -> list[str]:
    """Return the arguments of the operator's container."""
    [container] = operator.get("deployment", chart.RELEASE)["spec"]["template"]["spec"][
        "containers"
    ]
    return list(container["args"])


def test_changed_value_upgrades_the_operator(flux: Flux, operator: KubeNamespace):
    release(flux, replicaCount=1, graceSeconds=32)
    assert "--grace-seconds=32" in arguments(operator)


def summary(flux: Flux) -> str:
    """Return the description of the first printer column of the CRD."""
    [version] = flux.kube.json("get", "crd", "finetunepipelines.finetune.dev")["spec"][
        "versions"
    ]
    return str(version["additionalPrinterColumns"][0]["description"])


def has_given_up(flux: Flux) -> bool:
    """Return whether Flux has failed as often as its retries allow."""
    conditions = flux.objects.get("helmrelease", chart.RELEASE)["status"]["conditions"]
    reasons = [(condition["type"], condition["reason"]) for condition in conditions]
    return ("Stalled", "RetriesExceeded") in reasons


def test_failed_upgrade_is_rolled_back_with_its_crd(
    flux: Flux, charts: GitRepository, kustomization: Kustomization
):
    """Also the last attempt, of two here; a new commit then upgrades. The pipelines stay."""
    driver = PipelineDriver.start(
        kustomization.namespace, pipeline("bot", suspend=True)
    )
    uid = driver.object["metadata"]["uid"]
    operator = KubeNamespace(flux.kube, chart.NAMESPACE)
    release(flux, replicaCount=1)
    manifest = helm_release(replicaCount=1)
    manifest["spec"] |= {"timeout": "20s", "upgrade": {"remediation": {"retries": 1}}}
    flux.kube.apply([manifest])
    flux.commit(charts, broken_chart())
    until(lambda: summary(flux) == NEWER_SUMMARY, 120, flux.logs)
    until(lambda: has_given_up(flux), 180, flux.logs)
    assert (
        flux.objects.get("helmrelease", chart.RELEASE)["status"]["upgradeFailures"] == 2
    )
    assert released(flux)[1] == "deployed"
    assert (summary(flux), "--grace-seconds=30" in arguments(operator)) == (
        SUMMARY,
        True,
    )
    charts.revert()
    # The HelmRelease stays as it is until then: a change of it would try the broken chart once more.
    wait_released(flux, flux.commit(charts, {}))
    release(flux, replicaCount=1)
    assert driver.object["metadata"]["uid"] == uid


def test_commit_upgrades_chart_and_crd_of_the_same_version(
    flux: Flux, charts: GitRepository, operator: KubeNamespace
):
    """What `reconcileStrategy: Revision` of the example is for, and why it needs no `crds` policy."""
    release(flux, replicaCount=1)
    assert "--grace-seconds=30" in arguments(operator)
    wait_released(flux, flux.commit(charts, newer_chart()))
    assert "--grace-seconds=31" in arguments(operator)
    assert summary(flux) == NEWER_SUMMARY


def test_pipelines_wait_for_the_kustomization_of_the_operator(
    flux: Flux, operator: KubeNamespace, new_kustomization: Callable[..., Kustomization]
):
    """The first Kustomization takes the HelmRelease over with a new value, and leaves it when it is deleted."""
    assert example("pipelines")["spec"]["dependsOn"] == [
        {"name": example("platform")["metadata"]["name"]}
    ]
    assert example("platform")["spec"]["wait"]
    platform = new_kustomization("platform")
    team = new_kustomization("team")
    platform.repository.commit(
        {"operator.yaml": helm_release(replicaCount=1, graceSeconds=33)}
    )
    team.repository.commit({"bot.yaml": pipeline("bot")})
    team.create(dependsOn=[{"name": platform.name}])
    team.wait_ready("False", "DependencyNotReady")
    platform.create(targetNamespace=NAMESPACE, prune=False)
    platform.wait_ready("True", "ReconciliationSucceeded")
    assert "--grace-seconds=33" in arguments(operator)
    upgraded = flux.ready("helmrelease", chart.RELEASE)["lastTransitionTime"]
    team.wait_ready("True", "ReconciliationSucceeded")
    assert team.pipeline("bot").object["metadata"]["creationTimestamp"] >= upgraded


def test_expressions_fail_early_with_an_older_operator(
    kustomization: Kustomization, operator: KubeNamespace
):
    """The operator is stopped, so that the status stays as an older operator would leave it. This test runs last."""
    kustomization.namespace.claim("models")
    kustomization.repository.commit({"bot.yaml": gated(0.95)})
    kustomization.create(timeout="20s")
    kustomization.wait_failed(EARLY)
    operator.run("scale", "deployment", chart.RELEASE, "--replicas=0")
    until(lambda: operator.run("get", "pods", "-o", "name") == "", 60)
    status = without_stalled(kustomization.pipeline("bot").object["status"])
    patch = json.dumps({"status": {"conditions": status["conditions"]}})
    kustomization.namespace.run(
        "patch", "ft", "bot", "--subresource=status", "--type=merge", "-p", patch
    )
    kustomization.wait_failed(TIMEOUT)
    expressions = yaml.safe_load((EXAMPLES / "health-check-exprs.yaml").read_text())
    kustomization.create(timeout="2m", **expressions["spec"])
    kustomization.wait_failed(EARLY)
