"""The chart, the examples and what drifts, under a real Argo CD of their own.

All tests need GITOPS=all, so the usual run starts no cluster for this file. They watch for drift for ten minutes.
"""

import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import yaml

from e2e.gitops.application import CRD, Application, examples, install
from e2e.gitops.argo_cd import CUSTOMIZATIONS, EXAMPLES, LABELS
from e2e.gitops.manifests import (
    NEWER_SUMMARY,
    NEXT_VERSION,
    SUMMARY,
    chart_without_crd,
    newer_chart,
    next_version,
    unchanged,
)
from e2e.gitops.second_lane import more
from e2e.pipelines import chart
from e2e.pipelines.driver import PipelineDriver, pipeline
from testcluster.kube_namespace import until

Object = dict[str, Any]
DRIFT_SECONDS = 600
pytestmark = more
MODES = {
    "client": ((), {}),
    "apply": (("ServerSideApply=true",), {}),
    "server": (
        ("ServerSideApply=true",),
        {"argocd.argoproj.io/compare-options": "ServerSideDiff=true"},
    ),
}
"""How Argo CD compares: syncOptions and annotations of an Application."""


@pytest.mark.parametrize(
    "name", sorted(file.stem for file in (EXAMPLES / "examples").glob("*.yaml"))
)
def test_api_server_accepts_the_example(operator: Application, name: str):
    for manifest in examples(name):
        manifest["metadata"].setdefault("namespace", "default")
        operator.argo_cd.kube.run(
            "create",
            "--dry-run=server",
            "--validate=strict",
            "-f",
            "-",
            given=yaml.safe_dump(manifest),
        )


def test_chart_is_upgraded_and_rolled_back_with_its_crd(
    operator: Application, application: Application
):
    """One commit changes version, CRD and a value, and its revert is the rollback. A training goes on meanwhile."""
    kinds = {resource["kind"] for resource in operator.status["resources"]}
    assert {
        "CustomResourceDefinition",
        "Deployment",
        "ValidatingAdmissionPolicy",
    } <= kinds
    driver = PipelineDriver.start(
        application.namespace, pipeline("bot", steps={"train": 900})
    )
    driver.wait_state("train", "Running")
    uid, *_ = before = operator.installed
    assert before == (uid, SUMMARY, "--grace-seconds=30")
    earlier = len(operator.states)
    version = version_of(operator)
    operator.commit(newer_chart() | next_version())
    until(
        lambda: operator.installed == (uid, NEWER_SUMMARY, "--grace-seconds=31"),
        90,
        operator.describe,
    )
    operator.wait("Synced", "Healthy")
    assert version_of(operator) == NEXT_VERSION
    assert ("OutOfSync", "Healthy") in operator.states[
        earlier:
    ]  # the upgrade; that it is over is checked above
    operator.repository.revert()
    operator.refresh()
    until(lambda: operator.installed == before, 90, operator.describe)
    operator.wait("Synced", "Healthy")
    assert version_of(operator) == version != NEXT_VERSION
    driver.finish("train")
    driver.wait_finished()
    assert [len(driver.stage(name)["attempts"]) for name in ("prepare", "train")] == [
        1,
        1,
    ]


def is_synced(application: Application) -> bool:
    return bool(application.state[0] == "Synced")


def was_out_of_sync(application: Application) -> bool:
    return "OutOfSync" in application.syncs


def version_of(operator: Application) -> str:
    """Return the version that the operator's Deployment is labelled with."""
    labels = operator.namespace.get("deployment", chart.RELEASE)["metadata"]["labels"]
    return str(labels["app.kubernetes.io/version"])


def test_crd_and_pipelines_stay_when_git_disables_the_crd(
    operator: Application, application: Application
):
    """Argo CD tracks no CRD, so it prunes none."""
    driver = PipelineDriver.start(application.namespace, pipeline("bot", suspend=True))
    before = operator.installed, driver.object["metadata"]["uid"]
    commit = operator.commit(chart_without_crd())
    try:
        until(lambda: operator.has_compared(commit), 90, operator.describe)
        operator.wait("Synced", "Healthy")
        assert not operator.has_kind("CustomResourceDefinition")
        assert (operator.installed, driver.object["metadata"]["uid"]) == before
    finally:
        operator.repository.revert()
        operator.refresh()
    until(lambda: operator.has_kind("CustomResourceDefinition"), 90, operator.describe)
    operator.wait("Synced", "Healthy")
    assert (operator.installed, driver.object["metadata"]["uid"]) == before


def test_no_drift_in_any_mode_of_comparison(
    operator: Application, new_application: Callable[[str], Application]
):
    """The pipeline with every field and the smallest one, unchanged in Git, are synced once in each mode.

    The chart, compared in one mode after the other, is not synced again.
    """
    applications = []
    for mode, (options, annotations) in MODES.items():
        application = new_application(mode)
        application.repository.commit(unchanged(application.namespace.name))
        application.create(options, annotations)
        applications.append(application)
    for application in applications:
        until(
            partial(is_synced, application),
            60,
            application.describe,
        )
    before = [application.generations for application in applications]
    for options, annotations in MODES.values():
        install(operator, options, annotations, replicaCount=1)
        operator.refresh("hard")
        operator.wait("Synced", "Healthy")
        operator.wait_recorded("Synced", "Healthy")
        states_of_the_chart = operator.states
        time.sleep(DRIFT_SECONDS / len(MODES))
        assert operator.states == states_of_the_chart
        assert operator.state == ("Synced", "Healthy")
    for application, generation in zip(applications, before, strict=True):
        application.refresh("hard")
        assert application.state[0] == "Synced"
        assert application.syncs == {"Synced"}, application.describe()
        assert len(application.status["history"]) == 1
        assert application.generations == generation
        # The control: the states are still watched, and the comparison sees a change.
        application.commit({"least.json": pipeline("least", seed=1)})
        until(
            partial(was_out_of_sync, application),
            60,
            application.describe,
        )


def test_chart_adds_the_customizations_and_leaves_them(operator: Application):
    """The last test: it deletes the operator's Application, which leaves the CRD and Argo CD's own ConfigMap."""
    argo_cd = operator.argo_cd
    argo_cd.configure({})
    install(operator, replicaCount=1, argocd={"customizations": True})

    def found() -> Object:
        return argo_cd.objects.get("configmap", "argocd-cm")

    until(
        lambda: CUSTOMIZATIONS.items() <= found()["data"].items(), 60, operator.describe
    )
    operator.wait("Synced", "Healthy")
    assert "timeout.reconciliation" in found()["data"]
    assert found()["metadata"]["labels"] == LABELS
    install(operator, replicaCount=1)
    until(lambda: operator.state[0] == "OutOfSync", 60, operator.describe)
    argo_cd.objects.run(
        "annotate", "configmap", "argocd-cm", "argocd.argoproj.io/tracking-id-"
    )
    without = json.dumps({"data": dict.fromkeys(CUSTOMIZATIONS)})
    argo_cd.objects.run(
        "patch", "configmap", "argocd-cm", "--type=merge", "--patch", without
    )
    operator.wait("Synced", "Healthy")
    install(
        operator, replicaCount=1, argocd={"customizations": True}, crds={"keep": False}
    )
    until(
        lambda: CUSTOMIZATIONS.items() <= found()["data"].items(), 60, operator.describe
    )
    operator.wait("Synced", "Healthy")
    uid, *_ = operator.installed
    argo_cd.command("app", "delete", operator.name, "--cascade", "--yes")
    until(lambda: not operator.object, 120, operator.describe)
    assert operator.namespace.get("deployment", chart.RELEASE) == {}
    assert argo_cd.kube.json("get", "crd", CRD)["metadata"]["uid"] == uid
    assert CUSTOMIZATIONS.items() <= found()["data"].items()
    assert "timeout.reconciliation" in found()["data"]
