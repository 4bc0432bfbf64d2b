"""The values of the chart: each value has an effect, and a wrong value is refused with its path."""

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from support.operator.charts import (
    EVERYTHING,
    RESTRICTED_CONTAINER,
    RESTRICTED_POD,
    Object,
    every_variant,
    parsed_options,
    render,
    render_text,
)

from e2e.pipelines.chart import CHART, helm
from finetune_operator.api.stages.pod import PodDefaults
from testcluster.errors import TimedOut


def sections(values: Object, *path: str) -> Iterator[tuple[str, ...]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield (*path, key)
            yield from sections(value, *path, key)


def leaves(values: Object, *path: str) -> Iterator[tuple[str, ...]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, *path, key)
        else:
            yield (*path, key)


def value_at(values: Object, path: tuple[str, ...]) -> Any:
    for key in path:
        values = values[key]
    return values


DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())
LEAVES = list(leaves(DEFAULTS))
SWITCHES = {
    ("crds", "enabled"),
    ("admissionPolicy", "enabled"),
    ("flowSchemas", "enabled"),
    ("serviceAccount", "create"),
    ("podDisruptionBudget", "enabled"),
    ("podSecurity", "setUser"),
    *(("podSecurityContext", *path) for path in leaves(RESTRICTED_POD)),
    *(("containerSecurityContext", *path) for path in leaves(RESTRICTED_CONTAINER)),
}


@every_variant
def test_helm_lint_passes_without_warnings(values):
    output = helm(
        "lint", "--strict", str(CHART), "--values", "-", given=yaml.safe_dump(values)
    )
    assert "0 chart(s) failed" in output
    assert "[WARNING]" not in output


def test_everything_variant_changes_every_default():
    """Some keep it: a restricted namespace asks for it, or the value switches on a part that others configure."""
    equal = {
        path
        for path in LEAVES
        if value_at(EVERYTHING, path) == value_at(DEFAULTS, path)
    }
    assert equal == SWITCHES


@pytest.mark.parametrize(
    "path", [path for path in LEAVES if path not in SWITCHES], ids=".".join
)
def test_every_value_changes_the_manifests(path):
    values = copy.deepcopy(EVERYTHING)
    *parents, last = path
    value_at(values, tuple(parents))[last] = value_at(DEFAULTS, path)
    assert render_text(values) != render_text(EVERYTHING)


def test_notes_name_values_that_exist():
    """Helm takes a path that does not exist for an empty value, and the text for users is not checked at all."""
    notes = (CHART / "templates" / "NOTES.txt").read_text()
    used = set(re.findall(r"\.Values\.([\w.]+)", notes))
    shown = set(
        re.findall(r"\b[a-z]\w*(?:\.[a-z]\w*)+", re.sub(r"{{.*?}}", "", notes))
    ) - {"pipeline.yaml"}
    assert {"crds.keep", "metrics.prometheusRule.runbookUrl"} <= shown
    known = {
        ".".join(path[:length]) for path in LEAVES for length in range(1, len(path) + 1)
    }
    assert used | shown <= known


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"replica": 2}, "'replica' not allowed"),
        ({"replicas": 2}, "'replicas' not allowed"),
        ({"replicaCount": "two"}, "/replicaCount': got string, want integer"),
        ({"replicaCount": 0}, "/replicaCount'.*minimum"),
        ({"fullnameOverride": "a.b"}, "/fullnameOverride'.*does not match"),
        ({"fullnameOverride": "a" * 56}, "/fullnameOverride'.*maxLength"),
        ({"image": {"digest": "abc"}}, "/image/digest'.*does not match"),
        (
            {"trainer": {"image": {"digest": "sha256:abc"}}},
            "/trainer/image/digest'.*does not match",
        ),
        ({"commonLabels": {"helm.sh/chart": "mine"}}, "/commonLabels/helm.sh~1chart'"),
        (
            {"commonLabels": {"app.kubernetes.io/name": "mine"}},
            "/commonLabels/app.kubernetes.io~1name'",
        ),
        ({"extraArgs": ["workers=3"]}, "/extraArgs/0'.*does not match"),
        ({"extraEnv": [{"nmae": "A"}]}, "/extraEnv/0': .*'nmae' not allowed"),
        (
            {"networkPolicy": {"apiServerPorts": []}},
            "/networkPolicy/apiServerPorts'.*minItems",
        ),
        (
            {"networkPolicy": {"stages": {"egress": [{"from": []}]}}},
            "/stages/egress/0': .*'from' not allowed",
        ),
        (
            {"networkPolicy": {"enable": True}},
            "/networkPolicy': .*'enable' not allowed",
        ),
        (
            {"podDisruptionBudget": {"maxUnavailable": 0}},
            "/podDisruptionBudget/maxUnavailable'.*minimum",
        ),
        ({"image": {"tga": "1"}}, "/image': .*'tga' not allowed"),
        ({"image": {"tag": 1.2}}, "/image/tag': got number, want string"),
        ({"image": {"pullPolicy": "Sometimes"}}, "/image/pullPolicy'.*'IfNotPresent'"),
        (
            {"imagePullSecrets": ["pull"]},
            "/imagePullSecrets/0': got string, want object",
        ),
        ({"namespaces": "team-a"}, "/namespaces': got string, want array"),
        ({"namespaces": ["Team A"]}, "/namespaces/0'.*'Team A'"),
        (
            {"defaults": {"podDefaults": {"toleratons": []}}},
            "/defaults/podDefaults': .*'toleratons' not allowed",
        ),
        ({"vllm": {"image": {"tag": ""}}}, "/vllm/image/tag'.*minLength"),
        ({"defaults": {"train": {}}}, "/defaults': .*'train' not allowed"),
        (
            {"defaults": {"workspace": {"size": "1Gi"}}},
            "/defaults/workspace': .*'size' not allowed",
        ),
        ({"placement": {"cheap": {}}}, "/placement': .*'cheap' not allowed"),
        (
            {"placement": {"pools": {"gpu": {}}}},
            "/placement/pools': .*'gpu' not allowed",
        ),
        (
            {"placement": {"spot": {"nodeSelector": {"spot": True}}}},
            "/placement/spot/nodeSelector/spot': got boolean",
        ),
        (
            {"placement": {"spot": {"tolerations": [{"operator": "Exists"}]}}},
            "tolerations/0': missing property 'key'",
        ),
        (
            {"interruptionNotices": {"metadata": "ec2"}},
            "/interruptionNotices/metadata'.*'EC2'",
        ),
        (
            {"interruptionNotices": {"nodes": "yes"}},
            "/interruptionNotices/nodes': got string, want boolean",
        ),
        ({"graceSeconds": 5}, "/graceSeconds'.*minimum"),
        ({"jobHistory": -1}, "/jobHistory'.*minimum"),
        (
            {"nodeLost": {"replaceAfterSeconds": -1}},
            "/nodeLost/replaceAfterSeconds'.*minimum",
        ),
        ({"workers": 0}, "/workers'.*minimum"),
        ({"apiRateLimit": {"qps": 0}}, "/apiRateLimit/qps'.*exclusiveMinimum"),
        (
            {"apiRateLimit": {"burst": 1.5}},
            "/apiRateLimit/burst': got number, want integer",
        ),
        ({"logging": {"level": "INFO"}}, "/logging/level'.*'info'"),
        ({"logging": {"format": "logfmt"}}, "/logging/format'.*'json'"),
        ({"troubleshootingUrl": "page#a"}, "/troubleshootingUrl'.*does not match"),
        ({"admissionPolicy": {"enabled": "yes"}}, "/admissionPolicy/enabled'.*'auto'"),
        (
            {"admissionPolicy": {"deniedNamespaces": ["it's"]}},
            "/admissionPolicy/deniedNamespaces/0'.*does not match",
        ),
        ({"crds": {"enabled": "no"}}, "/crds/enabled': got string, want boolean"),
        (
            {"serviceAccount": {"create": "no"}},
            "/serviceAccount/create': got string, want boolean",
        ),
        (
            {"serviceAccount": {"annotations": {"a": 1}}},
            "/serviceAccount/annotations/a': got number",
        ),
        ({"metrics": {"port": 80}}, "/metrics/port'.*minimum"),
        (
            {"metrics": {"serviceMonitor": {"interval": "30"}}},
            "/metrics/serviceMonitor/interval'.*does not match",
        ),
        (
            {"metrics": {"podMonitor": {"enabled": "no"}}},
            "/metrics/podMonitor/enabled': got string, want boolean",
        ),
        (
            {"metrics": {"prometheusRule": {"waitingMinutes": 0}}},
            "/metrics/prometheusRule/waitingMinutes'.*minimum",
        ),
        (
            {"metrics": {"prometheusRule": {"gpuUsePercent": 101}}},
            "/metrics/prometheusRule/gpuUsePercent'.*maximum",
        ),
        (
            {"metrics": {"prometheusRule": {"runbookUrl": "a#b"}}},
            "/metrics/prometheusRule/runbookUrl'.*does not match",
        ),
        (
            {"metrics": {"dashboards": {"labels": {"a": 1}}}},
            "/metrics/dashboards/labels/a': got number, want string",
        ),
        (
            {"metrics": {"serviceMonitor": {"enable": True}}},
            "/metrics/serviceMonitor': .*'enable' not allowed",
        ),
        ({"resources": {"limit": {}}}, "/resources': .*'limit' not allowed"),
        ({"nodeSelector": {"gpu": 1}}, "/nodeSelector/gpu': got number, want string"),
        (
            {"podAnnotations": {"scrape": True}},
            "/podAnnotations/scrape': got boolean, want string",
        ),
        (
            {"podLabels": {"app.kubernetes.io/name": "mine"}},
            "/podLabels/app.kubernetes.io~1name'",
        ),
    ],
    ids=str,
)
def test_invalid_value_is_refused_with_its_path(values, error):
    with pytest.raises(TimedOut, match=error):
        render(values)


@pytest.mark.parametrize("path", list(sections(DEFAULTS)), ids=".".join)
def test_null_section_renders_or_is_refused_with_its_path(path):
    values: Object = {path[-1]: None}
    for parent in reversed(path[:-1]):
        values = {parent: values}
    refusal = ""
    try:
        render(values)
    except TimedOut as error:
        refusal = str(error)
    assert not refusal or f"missing property '{path[-1]}'" in refusal


def test_schema_knows_the_fields_of_pod_defaults():
    schema = json.loads((CHART / "values.schema.json").read_text())
    known = schema["properties"]["defaults"]["properties"]["podDefaults"]["properties"]
    assert list(known) == sorted(
        field.alias or name for name, field in PodDefaults.model_fields.items()
    )


def test_null_removes_a_default():
    removed = {
        "namespaces": None,
        "priorityClassName": None,
        "placement": {"spot": None},
        "imagePullSecrets": None,
    }
    assert parsed_options(render(removed)).namespaces == ()
