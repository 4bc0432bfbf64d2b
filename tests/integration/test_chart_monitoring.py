"""Monitors, alerts and dashboards as Helm renders them; test_monitoring.py compares their queries with a scrape."""

import itertools
import json
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml
from support.operator.charts import (
    CLUSTER_WIDE,
    EVERYTHING,
    NAMESPACED,
    container,
    every_variant,
    is_monitoring,
    of_kind,
    only,
    pod,
    render,
)
from support.operator.monitoring import ALL_ENABLED, alert_rules, anchors
from support.stores.servers import LOOPBACK

from e2e.pipelines.chart import CHART, NAMESPACE, RELEASE
from finetune_operator.core.metadata import job_labels
from finetune_operator.kubernetes.resources.job import PIPELINE_NAME

DOCS = CHART.parents[1] / "docs"


def test_monitoring_is_rendered_only_when_enabled():
    objects = render(CLUSTER_WIDE)
    assert [manifest for manifest in objects if is_monitoring(manifest)] == []
    assert of_kind(objects, "ConfigMap") == []


def test_service_monitor_selects_the_metrics_service():
    objects = render(EVERYTHING)
    monitor = only(objects, "ServiceMonitor")
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    assert monitor["metadata"]["labels"]["watched-by"] == "prometheus"
    assert monitor["spec"]["endpoints"] == [{"port": "http", "interval": "5s"}]
    assert (
        monitor["spec"]["selector"]["matchLabels"].items()
        <= only(objects, "Service")["metadata"]["labels"].items()
    )


def test_pod_monitor_selects_pods_of_stages():
    monitor = only(render(EVERYTHING), "PodMonitor")
    labels = job_labels("demo", "train", 1, "i")
    assert monitor["metadata"]["labels"]["watched-by"] == "prometheus"
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert {
        expression["key"]
        for expression in monitor["spec"]["selector"]["matchExpressions"]
    } <= labels.keys()
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] == "metrics"
    assert endpoint["interval"] == "7s"


def test_pod_monitor_names_pipeline_and_attempt():
    """Prometheus writes other characters than letters, digits and underscores as underscores."""
    [endpoint] = only(render(EVERYTHING), "PodMonitor")["spec"]["podMetricsEndpoints"]
    sources = {
        relabeling["targetLabel"]: relabeling["sourceLabels"]
        for relabeling in endpoint["relabelings"]
        if "targetLabel" in relabeling
    }
    annotation = PIPELINE_NAME.replace(".", "_").replace("/", "_").replace("-", "_")
    assert sources == {
        "pipeline": [f"__meta_kubernetes_pod_annotation_{annotation}"],
        "attempt": ["__meta_kubernetes_pod_label_finetune_dev_attempt"],
    }


def test_pod_monitor_reads_only_the_first_of_several_pods():
    """The others serve no metrics, and would count as down."""
    [endpoint] = only(render(EVERYTHING), "PodMonitor")["spec"]["podMetricsEndpoints"]
    [dropped] = [
        relabeling
        for relabeling in endpoint["relabelings"]
        if relabeling.get("action") == "drop"
    ]
    assert dropped["sourceLabels"] == [
        "__meta_kubernetes_pod_label_batch_kubernetes_io_job_completion_index"
    ]
    indexes = ["", *map(str, range(64))]  # a pod of another Job has no index
    assert [
        index for index in indexes if not re.fullmatch(dropped["regex"], index)
    ] == ["", "0"]


@pytest.mark.parametrize(
    ("values", "selector"),
    [({}, {"any": True}), (NAMESPACED, {"matchNames": ["team-a", "team-b"]})],
)
def test_pod_monitor_reads_the_namespaces_of_pipelines(values, selector):
    assert (
        only(render({**values, **ALL_ENABLED}), "PodMonitor")["spec"][
            "namespaceSelector"
        ]
        == selector
    )


def test_alerts_have_a_severity_a_summary_and_a_runbook():
    page = (DOCS / "guides" / "alerts.md").read_text()
    rules = alert_rules()
    assert len(rules) == len({rule["alert"] for rule in rules})
    for rule in rules:
        assert rule["labels"]["severity"] in {"info", "warning", "critical"}
        assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
        assert (
            rule["annotations"]["runbook_url"]
            == f"docs/guides/alerts.md#{rule['alert'].lower()}"
        )
    assert {rule["alert"].lower() for rule in rules} <= anchors(page)


def test_alerts_have_the_thresholds_of_the_values():
    custom = {
        rule["alert"]: rule
        for rule in only(render(EVERYTHING), "PrometheusRule")["spec"]["groups"][0][
            "rules"
        ]
    }
    assert custom["FineTuneStageWaiting"]["expr"].endswith("> 60 * 15")
    assert custom["FineTuneInterruptionStorm"]["expr"].endswith("> 3")
    assert custom["FineTuneGpuIdle"]["expr"].endswith("< 80")
    assert (
        custom["FineTuneGpuIdle"]["annotations"]["runbook_url"]
        == "https://wiki.example/alerts#finetunegpuidle"
    )


def test_dashboards_are_found_by_the_sidecar():
    default = of_kind(render(ALL_ENABLED), "ConfigMap")
    assert {dashboard["metadata"]["name"] for dashboard in default} == {
        f"{RELEASE}-fleet",
        f"{RELEASE}-single",
    }
    assert {
        dashboard["metadata"]["labels"]["grafana_dashboard"] for dashboard in default
    } == {"1"}
    # The sidecar writes the value of each key to a file of that name.
    files = [name for dashboard in default for name in dashboard["data"]]
    assert sorted(files) == [f"{RELEASE}-fleet.json", f"{RELEASE}-single.json"]
    changed = of_kind(render({**EVERYTHING, "argocd": {}}), "ConfigMap")
    assert len(changed) == len(default)
    for dashboard in changed:
        assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "yes"
        assert dashboard["metadata"]["annotations"] == {"grafana_folder": "Training"}


def test_dashboards_are_valid_and_have_their_own_ids():
    boards = [
        json.loads(text)
        for config_map in of_kind(render(ALL_ENABLED), "ConfigMap")
        for text in config_map["data"].values()
    ]
    assert len({board["uid"] for board in boards}) == len(boards) == 2
    for board in boards:
        panels = board["panels"]
        assert (
            len({panel["id"] for panel in panels})
            == len({panel["title"] for panel in panels})
            == len(panels)
        )
        assert {panel["datasource"]["uid"] for panel in panels} == {"${datasource}"}
        cells = [cell for panel in panels for cell in cells_of(panel["gridPos"])]
        assert len(cells) == len(set(cells)), board["title"]


def cells_of(position):
    assert position["x"] + position["w"] <= 24
    rows = range(position["y"], position["y"] + position["h"])
    columns = range(position["w"])
    return [(position["x"] + column, row) for row in rows for column in columns]


@every_variant
def test_no_selector_takes_the_test_pod_for_a_replica(values):
    objects = render(values)
    test = only(objects, "Pod")
    labels = only(objects, "Pod")["metadata"]["labels"]
    assert test["metadata"]["annotations"]["helm.sh/hook"] == "test"
    selectors = [
        only(objects, "Deployment")["spec"]["selector"]["matchLabels"],
        only(objects, "Service")["spec"]["selector"],
        *(
            budget["spec"]["selector"]["matchLabels"]
            for budget in of_kind(objects, "PodDisruptionBudget")
        ),
        *(
            policy["spec"]["podSelector"]["matchLabels"]
            for policy in of_kind(objects, "NetworkPolicy")
        ),
    ]
    assert [
        selector for selector in selectors if selector.items() <= labels.items()
    ] == []


@every_variant
def test_helm_test_asks_the_metrics_service(values):
    objects = render(values)
    service = only(objects, "Service")
    [tester] = only(objects, "Pod")["spec"]["containers"]
    port = service["spec"]["ports"][0]["port"]
    assert (
        tester["args"][-1]
        == f"http://{service['metadata']['name']}.{NAMESPACE}:{port}/readyz"
    )
    assert tester["image"] == container(objects)["image"]
    assert tester["securityContext"] == container(objects)["securityContext"]
    assert (
        only(objects, "Pod")["spec"]["securityContext"]
        == pod(objects)["spec"]["securityContext"]
    )


def run_helm_test(*answers: tuple[int, str]) -> subprocess.CompletedProcess:
    """Run the program of the test's pod, with three attempts, against replicas that answer so, in turn."""
    given = itertools.cycle(answers)

    class Replicas(BaseHTTPRequestHandler):
        def do_GET(self):
            status, text = next(given)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_):
            """Log nothing."""

    [tester] = only(render(CLUSTER_WIDE), "Pod")["spec"]["containers"]
    program, url = tester["args"]
    with ThreadingHTTPServer((LOOPBACK, 0), Replicas) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        own = url.replace(url.split("/")[2], f"{LOOPBACK}:{server.server_port}")
        command = [
            sys.executable,
            *tester["command"][1:],
            program.replace("range(50)", "range(3)"),
            own,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        server.shutdown()
    return done


def test_helm_test_finds_the_replica_that_leads():
    done = run_helm_test((200, "standby\n"), (200, "leader\n"))
    assert (done.returncode, "a replica leads" in done.stdout) == (0, True)


@pytest.mark.parametrize(
    ("status", "text", "shown"),
    [(200, "standby\n", "standby"), (503, "not synced", "503")],
)
def test_helm_test_fails_without_a_leader(status, text, shown):
    done = run_helm_test((status, text))
    assert done.returncode == 1
    assert f"no replica leads; the last answer is: {shown}" in done.stderr.replace(
        "HTTP Error ", ""
    )


def test_defaults_in_the_chart_name_a_page_that_exists():
    default = yaml.safe_load((CHART / "values.yaml").read_text())["metrics"][
        "prometheusRule"
    ]["runbookUrl"]
    assert (DOCS.parent / default).is_file()
