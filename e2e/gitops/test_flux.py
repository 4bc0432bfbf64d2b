"""Pipelines and the chart under real Flux: GITOPS=all. Its controllers take minutes to build."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.gitops.flux import Flux, Kustomization, running_flux
from e2e.gitops.manifests import failing, failing_once, gated, unreadable
from e2e.pipelines import chart
from e2e.pipelines.driver import pipeline
from testcluster import fixtures
from testcluster.kube_namespace import KubeNamespace, temporary_namespace, until
from testcluster.provider import Provider

Object = dict[str, Any]
EXPRESSIONS = Path(__file__).parents[2] / "deploy" / "flux" / "health-check-exprs.yaml"
EARLY = "failed early due to stalled resources"
TIMEOUT = "timeout waiting for"

pytestmark = pytest.mark.skipif(os.environ.get("GITOPS") != "all", reason="not among the defaults; set GITOPS=all")


@pytest.fixture(scope="module")
def flux(own_cluster: Provider, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flux]:
    with running_flux(own_cluster.kube, tmp_path_factory.mktemp("flux")) as running:
        yield running


@pytest.fixture(scope="module")
def operator(flux: Flux) -> KubeNamespace:
    """The namespace of the chart's HelmRelease; every pipeline here is reconciled by what it installs."""
    repository = flux.repository("charts")
    shutil.copytree(chart.CHART, repository.folder / chart.CHART.name)
    repository.commit({})
    flux.kube.apply([flux.source(repository)])
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
            created = Kustomization(flux, namespace, flux.repository(name))
            stack.callback(created.delete)
            return created

        yield create


@pytest.fixture
def kustomization(new_kustomization: Callable[..., Kustomization]) -> Kustomization:
    """A new namespace with a repository for it; the test creates the Kustomization."""
    return new_kustomization()


def release(flux: Flux, **values: Any) -> None:
    """Apply the chart's HelmRelease with the images of the cluster and more values, and wait until it is Ready."""
    images: Object = {"image": {"tag": "dev"}, "trainer": {"image": {"tag": "dev"}}}
    source = {"kind": "GitRepository", "name": "charts"}
    spec = {
        "interval": "1h",
        "timeout": "2m",
        "chart": {"spec": {"chart": chart.CHART.name, "sourceRef": source}},
        "targetNamespace": chart.NAMESPACE,
        "releaseName": chart.RELEASE,
        "install": {"createNamespace": True},
        "values": {**images, **values},
    }
    flux.kube.apply([flux.manifest("helm", "v2", "HelmRelease", "operator", spec)])
    until(lambda: flux.ready("helmrelease", "operator").get("status") == "True", 120, flux.logs)


@pytest.mark.parametrize("name", ["operator", "pipelines"])
def test_api_server_accepts_the_example(flux: Flux, name: str):
    example = (chart.CHART.parents[1] / "deploy" / "flux" / f"{name}.yaml").read_text()
    flux.kube.run("create", "--dry-run=server", "--validate=strict", "-f", "-", given=example)


def test_kustomization_is_ready_when_pipeline_succeeded(kustomization: Kustomization):
    kustomization.repository.commit({"bot.yaml": pipeline("bot", steps={"train": 10})})
    kustomization.create()
    until(lambda: kustomization.ready.get("status") == "Unknown", 30, kustomization.describe)
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


def test_closed_gate_fails_the_kustomization_until_lowered(kustomization: Kustomization):
    kustomization.namespace.claim("models")
    kustomization.repository.commit({"bot.yaml": gated(0.95)})
    kustomization.create()
    kustomization.wait_failed(EARLY)
    kustomization.commit({"bot.yaml": gated(0.5)})
    kustomization.wait_ready("True", "ReconciliationSucceeded")


def test_unreadable_pipeline_fails_the_kustomization_early(kustomization: Kustomization):
    kustomization.repository.commit({"bot.yaml": unreadable()})
    kustomization.create()
    kustomization.wait_failed(EARLY)
    kustomization.commit({"bot.yaml": pipeline("bot")})
    kustomization.wait_ready("True", "ReconciliationSucceeded")


def test_dependent_kustomization_waits_for_the_pipeline(new_kustomization: Callable[..., Kustomization]):
    first, second = new_kustomization("first"), new_kustomization("second")
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
    kustomization.repository.commit({"bot.yaml": pipeline("bot"), "next.yaml": pipeline("next")})
    kustomization.create()
    kustomization.wait_ready("True", "ReconciliationSucceeded")
    kustomization.commit({"bot.yaml": None})
    until(lambda: not kustomization.pipeline("bot").object, 60, kustomization.describe)
    until(lambda: "bot" not in kustomization.namespace.run("get", "jobs", "-o", "name"), 60, kustomization.describe)
    assert "deletionTimestamp" not in kustomization.namespace.get("pvc", "bot-workspace")["metadata"]
    assert kustomization.pipeline("next").object


def test_pipeline_is_not_changed_by_later_reconciliations(kustomization: Kustomization):
    kustomization.repository.commit({"bot.yaml": pipeline("bot")})
    kustomization.create(interval="5s")
    kustomization.wait_ready("True", "ReconciliationSucceeded")
    before = kustomization.pipeline("bot").object["metadata"]
    until(lambda: reconciled(kustomization) >= 3, 60, kustomization.describe)
    after = kustomization.pipeline("bot").object["metadata"]
    assert (before["generation"], before["resourceVersion"]) == (after["generation"], after["resourceVersion"])


def test_change_by_kubectl_is_undone_and_retry_is_obeyed_first(kustomization: Kustomization):
    kustomization.repository.commit({"bot.yaml": failing_once()})
    kustomization.create(interval="5s", wait=False)
    driver = kustomization.pipeline("bot")
    until(lambda: driver.object, 30, kustomization.describe)
    driver.wait_finished("Failed")
    driver.annotate("retry", "now")
    driver.until(lambda: driver.status["phase"] == "Succeeded")
    until(lambda: "annotations" not in driver.object["metadata"], 30, kustomization.describe)
    assert driver.status["observedAnnotations"]["retry"] == "now"
    driver.patch(suspend=True)
    assert driver.object["spec"]["suspend"]
    until(lambda: not driver.object["spec"]["suspend"], 30, kustomization.describe)
    assert driver.status["phase"] == "Succeeded"


def test_suspended_pipeline_runs_into_the_timeout(kustomization: Kustomization):
    kustomization.repository.commit({"bot.yaml": pipeline("bot", suspend=True)})
    kustomization.create(timeout="10s")
    message = kustomization.wait_failed(TIMEOUT)
    assert f"FineTunePipeline/{kustomization.name}/bot status: 'InProgress'" in message


def reconciled(kustomization: Kustomization) -> int:
    """Return how often the Kustomization was reconciled with success, by its own history."""
    return sum(entry["totalReconciliations"] for entry in kustomization.status.get("history", ()))


def test_chart_is_upgraded_by_helm_release(flux: Flux, operator: KubeNamespace):
    release(flux, replicaCount=1, graceSeconds=31)
    [container] = operator.get("deployment", chart.RELEASE)["spec"]["template"]["spec"]["containers"]
    assert "--grace-seconds=31" in container["args"]
    assert flux.kube.json("get", "crd", "finetunepipelines.finetune.dev")


def without_stalled(status: Object) -> Object:
    """Return the status of a closed gate as an operator wrote it that did not know such a gate as Stalled."""
    conditions = [condition for condition in status["conditions"] if condition["type"] != "Stalled"]
    return {**status, "conditions": conditions}


def test_expressions_fail_early_with_an_older_operator(kustomization: Kustomization, operator: KubeNamespace):
    """The operator is stopped, so that the status stays as an older one would leave it. This test runs last."""
    kustomization.namespace.claim("models")
    kustomization.repository.commit({"bot.yaml": gated(0.95)})
    kustomization.create(timeout="20s")
    kustomization.wait_failed(EARLY)
    operator.run("scale", "deployment", chart.RELEASE, "--replicas=0")
    until(lambda: operator.run("get", "pods", "-o", "name") == "", 60)
    status = without_stalled(kustomization.pipeline("bot").object["status"])
    patch = json.dumps({"status": {"conditions": status["conditions"]}})
    kustomization.namespace.run("patch", "ft", "bot", "--subresource=status", "--type=merge", "-p", patch)
    kustomization.wait_failed(TIMEOUT)
    kustomization.create(timeout="2m", **yaml.safe_load(EXPRESSIONS.read_text())["spec"])
    kustomization.wait_failed(EARLY)
