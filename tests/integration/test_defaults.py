"""Defaults of a namespace: the operator with the chart's rights and policies on an API server; KWOK runs the pods."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from support.operator.charts import CLUSTER_WIDE, EVERYTHING, parsed_options, render
from support.operator.operator_process import install_crd, running_operator
from support.operator.pipeline_objects import pipeline_manifest
from support.operator.scenario import ALL_STAGES

from e2e.pipelines.driver import PipelineDriver
from finetune_operator.api.defaults import NO_DEFAULTS
from testcluster.errors import TimedOut
from testcluster.fixtures import namespace_name
from testcluster.kube_namespace import KubeNamespace, temporary_namespace, until
from testcluster.provider import Provider

NAME = "finetune-defaults"
TOLERATED = {"tolerations": [{"key": "kwok.x-k8s.io/node", "operator": "Exists"}]}
"""Without it no node of the control plane accepts a pod."""
UNRESTRICTED = {"pod-security.kubernetes.io/enforce": "privileged"}


@pytest.fixture
def team(
    control_plane: Provider, request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[KubeNamespace]:
    """The namespace of a team, with an operator whose own defaults are a label."""
    kube = control_plane.kube
    install_crd(kube)
    values = CLUSTER_WIDE | {
        "defaults": {"podDefaults": {"labels": {"level": "operator", "of": "operator"}}}
    }
    with (
        temporary_namespace(
            kube, namespace_name(f"{request.node.name}-operator")
        ) as own,
        temporary_namespace(
            kube, namespace_name(request.node.name), UNRESTRICTED
        ) as created,
        running_operator(own, render(values, namespace=own.name), tmp_path) as log,
    ):
        yield created
        print(log.read_text())


def write(namespace: KubeNamespace, text: str, *options: str) -> None:
    meta = {"name": NAME, "namespace": namespace.name}
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": meta,
        "data": {"defaults.yaml": text},
    }
    namespace.run("apply", *options, "-f", "-", given=json.dumps(config_map))


def start(namespace: KubeNamespace, name: str) -> PipelineDriver:
    spec = {
        key: value for key, value in ALL_STAGES.items() if key not in {"push", "deploy"}
    }
    spec["workspace"] = {"size": "1Gi"}
    return PipelineDriver.start(namespace, pipeline_manifest(name, spec))


def labels(driver: PipelineDriver, stage: str) -> dict[str, str]:
    return driver.jobs(stage)[0]["metadata"]["labels"]


def test_chart_passes_its_defaults_to_the_operator():
    defaults = parsed_options(render(EVERYTHING)).settings.defaults
    assert defaults.pod_defaults.priority_class_name == "batch"
    assert defaults.workspace.storage_class_name == "fast"
    assert parsed_options(render(CLUSTER_WIDE)).settings.defaults == NO_DEFAULTS


def test_stages_run_with_the_defaults_of_their_namespace(team: KubeNamespace):
    write(
        team,
        yaml.safe_dump(
            {"podDefaults": {**TOLERATED, "labels": {"level": "namespace"}}}
        ),
    )
    driver = start(team, "defaulted")
    driver.wait_finished(seconds=120)
    for stage in ("prepare", "train", "evaluate"):
        assert (labels(driver, stage)["level"], labels(driver, stage)["of"]) == (
            "namespace",
            "operator",
        )


def test_unusable_defaults_hold_a_pipeline_until_corrected(team: KubeNamespace):
    write(team, "podDefaults: {tolerations: [{key: a, operator: Sometimes}]}")
    driver = start(team, "held")
    driver.until(lambda: driver.condition("Ready").get("reason") == "SpecInvalid")
    message = driver.condition("Ready")["message"]
    assert "the ConfigMap finetune-defaults of this namespace cannot be used" in message
    assert "podDefaults.tolerations[0].operator" in message
    assert driver.jobs() == []
    write(team, yaml.safe_dump({"podDefaults": TOLERATED}))
    driver.wait_finished(seconds=120)


def test_deleted_defaults_hold_nothing(team: KubeNamespace):
    write(team, "nonsense")
    driver = start(team, "freed")
    driver.until(lambda: driver.condition("Ready").get("reason") == "SpecInvalid")
    team.run("delete", "configmap", NAME)
    driver.until(lambda: driver.jobs("prepare"))
    assert labels(driver, "prepare")["level"] == "operator"


def test_only_who_may_create_jobs_may_write_the_defaults(team: KubeNamespace):
    rules = {"maps": ("configmaps", "jane"), "both": ("configmaps,jobs.batch", "joe")}
    for name, (resources, user) in rules.items():
        team.run(
            "create",
            "role",
            name,
            "--verb=get,create,update,patch",
            f"--resource={resources}",
        )
        team.run("create", "rolebinding", name, f"--role={name}", f"--user={user}")

    def answer() -> str:
        try:
            write(team, "{}", "--as=jane", "--dry-run=server")
        except TimedOut as error:
            return str(error)
        return ""

    until(lambda: "only who may create Jobs" in answer(), 30, answer)
    team.run("create", "configmap", "another", "--as=jane")
    write(team, "{}", "--as=joe")
    with pytest.raises(TimedOut, match="only who may create Jobs"):
        write(team, "podDefaults: {}", "--as=jane")
