"""Reads the cluster and namespace from the kubeconfig, or from the pod that the command runs in."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from kubernetes.aio.config import ConfigException, kube_config

from finetune_cli.arguments import local_runs_hint
from finetune_cli.diagnostics import UsageError, closest_match
from finetune_cli.runs import RUNS

OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
"""File in which a pod finds its own namespace."""


@dataclass(frozen=True)
class KubeContext:
    """A kubeconfig context and a namespace of its cluster."""

    name: str | None
    """None for the cluster in which this process runs as a pod."""
    namespace: str


def read_context(context: str | None, name: str = "") -> KubeContext:
    """Return the named context, else the current context, else the pod's; raises UsageError if there is none.

    `name` is what the user asked for without naming a cluster; it may be a run on this machine.
    """
    files = kube_config.KUBE_CONFIG_DEFAULT_LOCATION
    contexts, current = _contexts(files)
    if context and context not in contexts:
        raise UsageError(
            f"there is no context {context} in {files}{_hint(context, contexts)}"
        )
    chosen = context or current
    if chosen:
        namespace = (contexts.get(chosen) or {}).get("namespace")
        return KubeContext(chosen, namespace or "default")
    # A kubeconfig comes first, as for kubectl inside a pod.
    if OWN_NAMESPACE.is_file():
        return KubeContext(None, OWN_NAMESPACE.read_text().strip())
    if contexts:
        names = ", ".join(sorted(contexts))
        raise UsageError(
            f"{files} has no current context; choose one with --context: {names}"
        )
    # Without a cluster, only a run on this machine can be meant.
    if name:
        raise UsageError(f"no run {name} in ./{RUNS}; {local_runs_hint(name)}")
    raise UsageError(f"no kubeconfig at {files}: set KUBECONFIG; {local_runs_hint()}")


def _hint(context: str, contexts: Mapping[str, Any]) -> str:
    if not contexts:
        return ": set KUBECONFIG"
    match = closest_match(context, contexts)
    if match:
        return f"; did you mean {match}?"
    return f"; its contexts are {', '.join(sorted(contexts))}"


def _contexts(files: str) -> tuple[dict[str, Mapping[str, Any]], str | None]:
    """Return the contexts by name, and the name of the current context."""
    existing = [
        file for file in files.split(":") if file and Path(file).expanduser().exists()
    ]
    # The client's loader raises for missing files; without any, the pod's own cluster may be meant.
    if not existing:
        return {}, None
    merger: Any = kube_config.KubeConfigMerger
    try:
        config = merger(files).config
        nodes = config.safe_get("contexts") or []
        contexts = {
            node.value["name"]: node.value.get("context") or {} for node in nodes
        }
        return contexts, config.safe_get("current-context")
    # A kubeconfig of another form makes the loader fail in many ways.
    except (
        ConfigException,
        yaml.YAMLError,
        AttributeError,
        KeyError,
        TypeError,
        ValueError,
    ) as error:
        problem = " ".join(str(error).split())[:200]
        raise UsageError(f"{files} is not a valid kubeconfig: {problem}") from error
