"""A real Prometheus scrapes an operator and a training process, and its alert fires: `MONITORING=all` runs it.

A real Prometheus Operator makes its configuration of the chart's monitors.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support.operator.charts import (
    CLUSTER_WIDE,
    Object,
    is_monitoring,
    only,
    pod,
    render,
)
from support.operator.monitoring import (
    ALL_ENABLED,
    alert_rules,
    dashboard_expressions,
    rules_of,
)
from support.operator.operator_process import install_crd, running_operator
from support.operator.pipeline_objects import pipeline_manifest
from support.operator.prometheus_operator import (
    Configuration,
    configuration,
    from_here,
    prometheus_operator,
)
from support.operator.prometheus_server import Prometheus, prometheus, static
from support.operator.scenario import ALL_STAGES, Scenario, a_pipeline
from support.operator.simulated_kubelet import simulated_kubelet
from support.operator.volumes import GROWING, create_growing_class, create_volume
from support.stores.servers import free_port
from support.trainer.stages import start_stage
from support.trainer.training import documents, environment, train_config, write_rows

from e2e.pipelines.chart import NAMESPACE
from e2e.pipelines.driver import PipelineDriver
from finetune_operator.core.pipeline import Key, Pipeline
from finetune_operator.kubernetes.resources.job import build_job
from testcluster.kube_namespace import (
    UNPRIVILEGED,
    KubeNamespace,
    temporary_namespace,
    until,
)

pytestmark = pytest.mark.skipif(
    os.environ.get("MONITORING") != "all", reason="MONITORING=all runs it"
)
WAITING = "FineTuneStageWaiting"
TRAINING_SECONDS = 900
"""Limit for the first steps: torch alone is imported for minutes while other tests take the processor."""


@contextmanager
def training(folder, model) -> Iterator[int]:
    """Run the train stage in a process of its own; yield the port of its metrics."""
    port = free_port()
    write_rows(folder, documents(40), documents(4, seed=1))
    config = train_config(model, max_steps=1_000_000, checkpoint={"every_steps": 20})
    with start_stage(
        config, environment(folder), FINETUNE_METRICS_PORT=str(port)
    ) as process:
        try:
            yield port
        finally:
            process.kill()


def stuck_pipeline(team: KubeNamespace) -> PipelineDriver:
    """Create a pipeline whose first stage waits for a quota."""
    create_volume(team, "stuck-workspace")
    team.run("create", "quota", "none", "--hard=pods=0")
    spec = {**ALL_STAGES, "workspace": {"size": "1Gi", "storageClassName": GROWING}}
    return PipelineDriver.start(team, pipeline_manifest("stuck", spec))


def stage_pod() -> Object:
    """Return a pod with the labels, annotations and port of a training attempt."""
    scenario = Scenario(a_pipeline()).finish()
    [template] = [
        job.template
        for job in scenario.cluster.jobs.values()
        if job.template.stage == "train"
    ]
    built = build_job(
        Pipeline(Key("team", "my.model"), "uid-1", 1, a_pipeline()), template
    )["spec"]["template"]
    return kwok_pod("scraped", built)


def kwok_pod(name: str, template: Object) -> Object:
    """Return a pod that a KWOK node runs, with the metadata and ports of a template."""
    [container] = template["spec"]["containers"]
    tolerations = [{"key": "kwok.x-k8s.io/node", "operator": "Exists"}]
    own = {
        "name": container["name"],
        "image": "none",
        "ports": container["ports"],
        "securityContext": UNPRIVILEGED,
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**template["metadata"], "name": name},
        "spec": {"tolerations": tolerations, "containers": [own]},
    }


@pytest.fixture(scope="module")
def made(control_plane) -> Iterator[tuple[KubeNamespace, Configuration]]:
    """A namespace with a pod of the operator and a pod of a stage, and the Prometheus Operator's configuration.

    The namespace's name is part of the monitors, so that they are of the operator in it.
    """
    with (
        temporary_namespace(control_plane.kube, "watched-operator") as own,
        prometheus_operator(control_plane.kube),
    ):
        objects = render(ALL_ENABLED, namespace=own.name)
        own.create(
            kwok_pod("operator", pod(objects)), only(objects, "Service"), stage_pod()
        )
        yield (
            own,
            configuration(
                own, [manifest for manifest in objects if is_monitoring(manifest)]
            ),
        )


@pytest.fixture(scope="module")
def scene(control_plane, made, tmp_path_factory, tiny_model):
    """A Prometheus and the pipeline that is stuck."""
    kube = control_plane.kube
    folder = tmp_path_factory.mktemp("prometheus")
    port = free_port()
    own, configured = made
    install_crd(kube)
    create_growing_class(kube)
    with temporary_namespace(kube, "watched-team") as team:
        objects = render(CLUSTER_WIDE, namespace=own.name)
        with (
            training(folder, tiny_model) as trainer,
            running_operator(own, objects, folder, port),
            simulated_kubelet(team),
            prometheus(
                folder,
                alert_rules(waitingMinutes=1),
                static("operator", port, namespace=NAMESPACE),
                static(
                    "trainer",
                    trainer,
                    namespace="team",
                    pod="p",
                    pipeline="demo",
                    attempt="1",
                ),
                *(from_here(scrape, kube.kubeconfig) for scrape in configured.scrapes),
            ) as server,
        ):
            yield server, stuck_pipeline(team)


def test_alert_fires_while_a_stage_is_stuck_and_ends_with_it(
    scene: tuple[Prometheus, PipelineDriver],
):
    """No other pipeline of this operator waits, so nothing else may fire. It leads, and no queue is long."""
    server, driver = scene
    fired = until(lambda: server.firing(WAITING), 300, driver.describe)
    assert [(alert["stage"], alert["reason"]) for alert in fired] == [
        ("prepare", "WaitingForQuota")
    ]
    others = {rule["alert"] for rule in alert_rules()} - {WAITING}
    assert [name for name in others if server.firing(name)] == []
    driver.namespace.run("delete", "quota", "none")
    driver.wait_finished(seconds=300)
    until(lambda: not server.query("finetune_waiting_stages"), 60)
    until(lambda: not server.firing(WAITING), 60)
    # The stage waited no longer long before the end, which only the next scrape tells.
    [succeeded] = until(
        lambda: server.query('finetune_pipelines{phase="Succeeded"}'), 60
    )
    assert succeeded["value"][1] == "1"


def test_training_process_is_scraped(scene: tuple[Prometheus, PipelineDriver]):
    server, _ = scene
    until(
        lambda: server.query(
            'finetune_stage_tokens_per_second{stage="train", pipeline="demo"} > 0'
        ),
        TRAINING_SECONDS,
    )
    [loss] = server.query('finetune_stage_loss{stage="train", pipeline="demo"}')
    assert 0 < float(loss["value"][1]) < 100


def test_prometheus_operator_takes_every_rule(
    made: tuple[KubeNamespace, Configuration],
):
    own, configured = made
    rules = rules_of(render(ALL_ENABLED, namespace=own.name))
    assert [rule["alert"] for rule in rules] == [
        rule["alert"] for rule in alert_rules()
    ]
    assert configured.rules == rules


def test_service_monitor_finds_the_operator(scene: tuple[Prometheus, PipelineDriver]):
    server, driver = scene
    [target] = until(
        lambda: server.targets("serviceMonitor/watched-operator/finetune-operator/0"),
        120,
        driver.describe,
    )
    assert target["scrapeUrl"].endswith(":8080/metrics")
    labels = {name: target["labels"][name] for name in ("job", "namespace", "pod")}
    assert labels == {
        "job": "finetune-operator-metrics",
        "namespace": "watched-operator",
        "pod": "operator",
    }


def test_pod_monitor_finds_a_stage_and_names_its_pipeline(
    scene: tuple[Prometheus, PipelineDriver],
):
    """A pipeline's name may have dots, and its annotation has the whole of it."""
    server, driver = scene
    pool = "podMonitor/watched-operator/finetune-operator-stages/0"
    [target] = until(lambda: server.targets(pool), 120, driver.describe)
    assert target["scrapeUrl"].endswith(":8080/metrics")
    assert {
        name: target["labels"][name]
        for name in ("pipeline", "attempt", "namespace", "pod")
    } == {
        "pipeline": "my.model",
        "attempt": "1",
        "namespace": "watched-operator",
        "pod": "scraped",
    }


def test_every_panel_shows_what_was_scraped(scene: tuple[Prometheus, PipelineDriver]):
    """A query may be well-formed and fail, for example if one series matches many.

    Here are no GPUs, and at the end nothing waits. Nothing was evicted or has failed, so those series are 0.
    """
    server, _ = scene
    until(
        lambda: server.query(
            "finetune_stage_validation_loss and finetune_stage_saved_step"
        ),
        TRAINING_SECONDS,
    )
    empty = {
        name
        for name, expression in dashboard_expressions().items()
        if not server.query(concrete(expression))
    }
    assert {name for name in empty if "GPU" not in name} == {
        f"FineTunePipelines: {panel} A"
        for panel in ("Stages that wait", "Longest wait")
    }


def concrete(expression: str) -> str:
    """Return a panel's query for the pipeline of the scene, with the series that it leaves out because they are 0."""
    expression = expression.removesuffix(" > 0")
    values = {
        'job=~"any"': 'job=~".+"',
        'namespace="any"': 'namespace="team"',
        'pipeline="any"': 'pipeline="demo"',
    }
    for variable, value in values.items():
        expression = expression.replace(variable, value)
    return expression
