"""Pipelines for tests with Git: scripted stages, of which evaluate reaches a score of 0.9; and files of the chart."""

import re
from pathlib import Path
from typing import Any

from e2e.pipelines import chart
from e2e.pipelines.driver import SCRIPT, pipeline, variables

Object = dict[str, Any]
EVERYTHING = Path(__file__).parents[2] / "tests" / "data" / "everything.yaml"
SUMMARY = "One-word summary"
NEWER_SUMMARY = "The newer summary"
"""Descriptions of the CRD's first printer column, in this chart and in a newer chart."""
NEXT_VERSION = "99.0.0"
LATER, OTHER = (
    {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}}
    for name in ("later", "other")
)
IMAGE = "repository: finetune-operator\n"
VERSIONS = re.compile(r'^((?:version|appVersion): "?)[0-9.]+', re.MULTILINE)
CRDS_ENABLED = re.compile(r"(^crds:\n(?:  #.*\n)*  enabled: )true$", re.MULTILINE)
FAILS_ONCE = (
    'once=$FINETUNE_WORKSPACE/once; [ -e "$once" ] || { touch "$once"; FAIL_WITH=70; }'
)


def gated(threshold: float) -> Object:
    """Return a pipeline that publishes its model if the score is above the threshold."""
    gate = {
        "task": "exam",
        "metric": "acc",
        "operator": "GreaterThan",
        "value": threshold,
    }
    return pipeline(
        "bot", pushes=True, evaluate={"gates": [gate]}, push={"when": "GatesPassed"}
    )


def failing() -> Object:
    """Return a pipeline whose training fails."""
    return pipeline(
        "bot",
        train={"maxFailures": 0, "pod": {"env": variables("train", FAIL_WITH="70")}},
    )


def failing_once() -> Object:
    """Return a pipeline whose training fails until it is retried."""
    return pipeline(
        "bot",
        train={
            "maxFailures": 0,
            "pod": {"command": ["sh", "-c", f"{FAILS_ONCE}\n{SCRIPT}"]},
        },
    )


def unreadable() -> Object:
    """Return a pipeline that the API server admits and that the operator cannot read."""
    affinity: Object = {}
    for _ in range(40):
        affinity = {"nested": affinity}
    return pipeline("bot", prepare={"pod": {"affinity": affinity}})


def in_wave(wave: int, manifest: Object) -> Object:
    """Return a manifest that Argo CD applies in a sync wave."""
    annotations = {"argocd.argoproj.io/sync-wave": str(wave)}
    return {
        **manifest,
        "metadata": {**manifest["metadata"], "annotations": annotations},
    }


def unchanged(namespace: str) -> Object:
    """Return the files of two pipelines: the first has every field, the second as few as possible."""
    everything = EVERYTHING.read_text().replace(
        "namespace: research", f"namespace: {namespace}"
    )
    spec = {"model": {"uri": "hf://org/base"}, "datasets": [{"uri": "hf://org/data"}]}
    return {
        "everything.yaml": everything,
        "least.json": {**pipeline("least"), "spec": spec},
    }


def newer_chart() -> dict[str, str]:
    """Return the files of the chart that a newer chart of the same version changes: the CRD, and graceSeconds to 31.

    Raises ValueError if the chart has no such line any more.
    """
    changes = {
        "templates/crds.yaml": (SUMMARY, NEWER_SUMMARY),
        "values.yaml": ("graceSeconds: 30", "graceSeconds: 31"),
    }
    files = {}
    for name, (old, new) in changes.items():
        text = (chart.CHART / name).read_text()
        if text.count(f"{old}\n") != 1:
            raise ValueError(
                f"{name} has not exactly one line with {old!r} at its end: change newer_chart"
            )
        files[f"charts/{chart.CHART.name}/{name}"] = text.replace(
            f"{old}\n", f"{new}\n"
        )
    return files


def next_version() -> dict[str, str]:
    """Return the chart's Chart.yaml with NEXT_VERSION as the version of the chart and of the images."""
    text = (chart.CHART / "Chart.yaml").read_text()
    return {
        f"charts/{chart.CHART.name}/Chart.yaml": VERSIONS.sub(
            rf"\g<1>{NEXT_VERSION}", text
        )
    }


def broken_chart() -> dict[str, str]:
    """Return the files of `newer_chart`, with an image of the operator that no registry has.

    Raises ValueError if the chart has no such line any more.
    """
    files = newer_chart()
    values = f"charts/{chart.CHART.name}/values.yaml"
    if files[values].count(IMAGE) != 1:
        raise ValueError(
            f"values.yaml has not exactly one line with {IMAGE!r}: change broken_chart"
        )
    return {**files, values: files[values].replace(IMAGE, "repository: missing\n")}


def chart_without_crd() -> dict[str, str]:
    """Return the chart's values with crds.enabled: false; raises ValueError if they have no such line any more."""
    text, replaced = CRDS_ENABLED.subn(
        r"\1false", (chart.CHART / "values.yaml").read_text()
    )
    if replaced != 1:
        raise ValueError(
            "values.yaml has not exactly one crds.enabled: true: change chart_without_crd"
        )
    return {f"charts/{chart.CHART.name}/values.yaml": text}


def without_stalled(status: Object) -> Object:
    """Return the status of a closed gate as an operator wrote it that did not know such a gate as Stalled."""
    conditions = [
        condition
        for condition in status["conditions"]
        if condition["type"] != "Stalled"
    ]
    return {**status, "conditions": conditions}
