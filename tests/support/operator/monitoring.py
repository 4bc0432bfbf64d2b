"""The alerts and dashboards of the chart, their queries as Prometheus parses them, and what a scrape has."""

import json
import re
import subprocess
import urllib.request
from collections import defaultdict
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from support.operator.charts import Object, of_kind, only, render
from support.programs import program
from support.stores.servers import LOOPBACK

from finetune_operator.api.conditions import Reason
from finetune_operator.api.spec import STAGES
from finetune_operator.api.status import Outcome
from finetune_operator.controller.metrics import FINAL_PHASES
from finetune_trainer.runtime.progress.server import METRICS

ALL_ENABLED: Object = {
    "metrics": {
        name: {"enabled": True}
        for name in ("serviceMonitor", "podMonitor", "prometheusRule", "dashboards")
    }
}
DCGM = dict.fromkeys(
    ("DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_FB_USED"),
    frozenset({"exported_namespace", "exported_pod"}),
)
"""Metrics of NVIDIA's dcgm-exporter that the chart's queries may use, with the labels that they use of them."""
OF_TARGETS = frozenset({"job", "instance", "namespace", "pod"})
"""Labels that the Prometheus Operator gives every target."""
OF_STAGES = frozenset({"pipeline", "attempt"})
"""Labels that the chart's PodMonitor gives the pods of stages."""
VALUES: dict[str, set[str]] = {
    "phase": {*FINAL_PHASES, "Pending", "Running", "Suspended"},
    "outcome": set(Outcome),
    "reason": set(Reason),
    "stage": {kind.name for kind in STAGES},
}
"""Values of labels with a closed set."""
VARIABLES = {"$__rate_interval": "5m", "$__range": "1h"}
"""Variables of Grafana that stand for a duration; all others stand for text in quotes."""


@dataclass(frozen=True)
class Selector:
    """A selector in a query: a metric, and its matchers as label, operator and value."""

    metric: str
    matchers: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True)
class Query:
    """A query as Prometheus parses it."""

    error: str
    selectors: tuple[Selector, ...]
    labels: frozenset[str]
    """Labels that aggregations, binary operators and label_replace read."""
    created: frozenset[str]
    """Labels that label_replace writes."""


def alert_rules(**thresholds: Any) -> list[Object]:
    """Return the alerts of the chart."""
    values = {"metrics": {"prometheusRule": {"enabled": True, **thresholds}}}
    return rules_of(render(values))


def rules_of(objects: list[Object]) -> list[Object]:
    """Return the alerts of the rendered chart."""
    [group] = only(objects, "PrometheusRule")["spec"]["groups"]
    rules: list[Object] = group["rules"]
    return rules


def dashboard_expressions() -> dict[str, str]:
    """Return the expressions of all panels by dashboard, panel and letter, and of variables by dashboard and name."""
    maps = of_kind(render(ALL_ENABLED), "ConfigMap")
    boards = [
        json.loads(text) for config_map in maps for text in config_map["data"].values()
    ]
    variables = {
        f"{board['title']}: ${variable['name']}": without_variables(
            values_of_label(variable["query"]["query"])
        )
        for board in boards
        for variable in board["templating"]["list"]
        if variable["type"] == "query"
    }
    return variables | {
        f"{board['title']}: {panel['title']} {target['refId']}": without_variables(
            target["expr"]
        )
        for board in boards
        for panel in board["panels"]
        for target in panel["targets"]
    }


def values_of_label(query: str) -> str:
    """Return Grafana's label_values(SELECTOR, LABEL) in PromQL."""
    match = re.fullmatch(r"label_values\((.+), (\w+)\)", query)
    assert match, f"{query!r} is no label_values(SELECTOR, LABEL)"
    return f"count by ({match[2]}) ({match[1]})"


def without_variables(expression: str) -> str:
    """Replace Grafana's variables, of which $1 is none."""
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    return re.sub(r"\$[a-z]\w*", "any", expression)


def parsed(expressions: Iterable[str]) -> list[Query]:
    """Return the queries in the same order. Skip the test if the parser cannot be built."""
    given = json.dumps(list(expressions))
    done = subprocess.run(
        [program("promql")], input=given, capture_output=True, text=True, check=True
    )
    return [_query(json.loads(line)) for line in done.stdout.splitlines()]


def _query(parsed: Object) -> Query:
    selectors = tuple(
        Selector(
            selector["metric"],
            tuple(
                (matcher["label"], matcher["type"], matcher["value"])
                for matcher in selector["matchers"]
            ),
        )
        for selector in parsed["selectors"]
    )
    return Query(
        parsed["error"],
        selectors,
        frozenset(parsed["labels"]),
        frozenset(parsed["created"]),
    )


def problems(query: Query, labels: Mapping[str, AbstractSet[str]]) -> list[str]:
    """Return what is wrong with a query: its syntax, or a metric, label or value that does not exist."""
    if query.error:
        return [query.error]
    texts = []
    known = OF_TARGETS | query.created
    for selector in query.selectors:
        own = _labels_of(selector.metric, labels)
        known |= own or set()
        if own is None:
            texts.append(f"no metric {selector.metric}")
        for label, operator, value in selector.matchers:
            if label not in OF_TARGETS | (own or set()):
                texts.append(f"{selector.metric} has no label {label}")
            if operator == "=" and label in VALUES and value not in VALUES[label]:
                texts.append(f"{label} is never {value}")
    return texts + [f"no label {label}" for label in sorted(query.labels - known)]


def _labels_of(
    metric: str, labels: Mapping[str, AbstractSet[str]]
) -> AbstractSet[str] | None:
    if metric in DCGM:
        return DCGM[metric]
    own = labels.get(metric)
    if own and metric in METRICS:
        return own | OF_STAGES
    return own


def scrape(port: int) -> str:
    """Return the text of /metrics of a process on this machine; empty while it does not answer."""
    try:
        with urllib.request.urlopen(
            f"http://{LOOPBACK}:{port}/metrics", timeout=10
        ) as response:
            return str(response.read().decode())
    except OSError:
        return ""


def labels_by_metric(*scrapes: str) -> dict[str, set[str]]:
    """Return the names of the labels of every metric in some scrapes."""
    labels: dict[str, set[str]] = defaultdict(set)
    for scrape in scrapes:
        for family in text_string_to_metric_families(scrape):
            for sample in family.samples:
                labels[sample.name] |= sample.labels.keys()
    return dict(labels)


def anchors(page: str) -> set[str]:
    """Return the anchors of the headings of a Markdown page, as its readers' programs make them."""
    headings = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in headings
    }
