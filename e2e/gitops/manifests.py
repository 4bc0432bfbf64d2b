"""Pipelines for tests with Git: scripted stages, of which evaluate reaches a score of 0.9."""

from typing import Any

from e2e.pipelines.driver import SCRIPT, pipeline, variables

Object = dict[str, Any]
FAILS_ONCE = 'once=$FINETUNE_WORKSPACE/once; [ -e "$once" ] || { touch "$once"; FAIL_WITH=70; }'


def gated(threshold: float) -> Object:
    """Return a pipeline that publishes its model if the score is above the threshold."""
    gate = {"task": "exam", "metric": "acc", "operator": "GreaterThan", "value": threshold}
    return pipeline("bot", pushes=True, evaluate={"gates": [gate]}, push={"when": "GatesPassed"})


def failing() -> Object:
    """Return a pipeline whose training fails."""
    return pipeline("bot", train={"maxFailures": 0, "pod": {"env": variables("train", FAIL_WITH="70")}})


def failing_once() -> Object:
    """Return a pipeline whose training fails until it is retried."""
    return pipeline("bot", train={"maxFailures": 0, "pod": {"command": ["sh", "-c", f"{FAILS_ONCE}\n{SCRIPT}"]}})


def unreadable() -> Object:
    """Return a pipeline that the API server admits and that the operator cannot read."""
    affinity: Object = {}
    for _ in range(40):
        affinity = {"nested": affinity}
    return pipeline("bot", prepare={"pod": {"affinity": affinity}})


def in_wave(wave: int, manifest: Object) -> Object:
    """Return a manifest that Argo CD applies in a sync wave."""
    annotations = {"argocd.argoproj.io/sync-wave": str(wave)}
    return {**manifest, "metadata": {**manifest["metadata"], "annotations": annotations}}
