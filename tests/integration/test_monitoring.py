"""Every query of the chart's alerts and dashboards asks for metrics that an operator and a stage really serve."""

import pytest
from support.operator.charts import CLUSTER_WIDE, render
from support.operator.monitoring import (
    alert_rules,
    dashboard_expressions,
    labels_by_metric,
    parsed,
    problems,
    scrape,
)
from support.operator.operator_process import install_crd, running_operator
from support.operator.pipeline_objects import pipeline_manifest
from support.operator.scenario import ALL_STAGES
from support.operator.simulated_kubelet import SimulatedKubelet, simulated_kubelet
from support.operator.volumes import GROWING, create_growing_class, create_volume
from support.stores.servers import free_port

from e2e.pipelines.driver import PipelineDriver
from finetune_trainer.contract import Environment
from finetune_trainer.runtime.progress.progress import ProgressReporter
from finetune_trainer.runtime.progress.server import METRICS
from testcluster.kube_namespace import KubeNamespace, temporary_namespace

PROGRESS = {name.removeprefix("finetune_stage_"): 1 for name in METRICS}


@pytest.fixture(scope="module")
def labels(control_plane, tmp_path_factory):
    """Metric -> names of its labels, from scrapes of an operator and of a stage."""
    kube = control_plane.kube
    folder = tmp_path_factory.mktemp("operator")
    port = free_port()
    install_crd(kube)
    create_growing_class(kube)
    with (
        temporary_namespace(kube, "metrics-operator") as own,
        temporary_namespace(kube, "metrics-team") as team,
    ):
        objects = render(CLUSTER_WIDE, namespace=own.name)
        with (
            running_operator(own, objects, folder, port) as log,
            simulated_kubelet(team) as kubelet,
        ):
            try:
                scrapes = scrapes_of_a_life(team, kubelet, port)
            finally:
                print(log.read_text())  # pytest shows it only if the test fails
    return labels_by_metric(*scrapes, scrape_of_a_stage(folder))


def scrapes_of_a_life(
    team: KubeNamespace, kubelet: SimulatedKubelet, port: int
) -> list[str]:
    """Scrape the operator while a pipeline waits, and when it has been interrupted and has succeeded."""
    create_volume(team, "life-workspace")
    team.run("create", "quota", "none", "--hard=pods=0")
    kubelet.held.add("train")
    spec = {**ALL_STAGES, "workspace": {"size": "1Gi", "storageClassName": GROWING}}
    driver = PipelineDriver.start(team, pipeline_manifest("life", spec))
    driver.until(
        lambda: "exceeded quota" in driver.stage("prepare").get("message", ""), 120
    )
    waiting = scrape(port)
    team.run("delete", "quota", "none")
    kubelet.evict("train")
    driver.until(lambda: len(driver.stage("train")["attempts"]) == 2, 120)
    kubelet.held.clear()
    driver.wait_finished(seconds=180)
    return [waiting, scrape(port)]


def scrape_of_a_stage(folder) -> str:
    port = free_port()
    ProgressReporter("train", Environment(folder, metrics_port=port)).update(**PROGRESS)
    return scrape(port)


def test_stage_serves_every_metric_that_is_documented(labels):
    assert {name for name in labels if name.startswith("finetune_stage_")} == set(
        METRICS
    )


def test_every_panel_asks_for_what_is_served(labels):
    expressions = dashboard_expressions()
    queries = parsed(expressions.values())
    wrong = {
        name: problems(query, labels)
        for name, query in zip(expressions, queries, strict=True)
    }
    assert {name: texts for name, texts in wrong.items() if texts} == {}
    assert len(expressions) > 30


def test_every_alert_asks_for_what_is_served(labels):
    rules = alert_rules()
    queries = parsed(rule["expr"] for rule in rules)
    wrong = {
        rule["alert"]: problems(query, labels)
        for rule, query in zip(rules, queries, strict=True)
    }
    assert {name: texts for name, texts in wrong.items() if texts} == {}


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("sum(", "parse error"),
        ("finetune_leeder", "no metric finetune_leeder"),
        ("sum by (phse) (finetune_pipelines)", "no label phse"),
        ('finetune_pipelines{stage="train"}', "finetune_pipelines has no label stage"),
        ('finetune_pipelines{phase="Degrade"}', "phase is never Degrade"),
        (
            "finetune_leader * on (pod) group_left (gpu) DCGM_FI_DEV_GPU_UTIL",
            "no label gpu",
        ),
        ("DCGM_FI_DEV_GPU", "no metric DCGM_FI_DEV_GPU"),
    ],
)
def test_wrong_query_is_noticed(labels, expression, problem):
    [query] = parsed([expression])
    assert any(problem in text for text in problems(query, labels))
