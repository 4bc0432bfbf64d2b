"""Reads the cluster and namespace from the kubeconfig, or from the pod that the command runs in."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from kubernetes.aio.config import ConfigException, kube_config

from finetune_cli.arguments import local_runs_hint
from finetune_cli.diagnostics import UsageError, closest_match

OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
"""File in which a pod finds its own namespace."""


@dataclass(frozen=True)
class Context:
    """A kubeconfig context and a namespace of its cluster."""

    name: str | None
    """None for the cluster in which this process runs as a pod."""
    namespace: str


def read_context(context: str | None) -> Context:
    """Return the named context, else the current one, else that of the pod; raises UsageError where there is none."""
    files = kube_config.KUBE_CONFIG_DEFAULT_LOCATION
    contexts, current = _contexts(files)
    if context and context not in contexts:
        raise UsageError(f"there is no context {context} in {files}{_hint(context, contexts)}")
    if chosen := context or current:
        return Context(chosen, (contexts.get(chosen) or {}).get("namespace") or "default")
    if OWN_NAMESPACE.is_file():
        return Context(None, OWN_NAMESPACE.read_text().strip())
    if contexts:
        raise UsageError(
            f"{files} has no current context; choose one with --context: {', '.join(sorted(contexts))}"
        )
    raise UsageError(f"no kubeconfig at {files}: set KUBECONFIG; {local_runs_hint()}")


def _hint(context: str, contexts: Mapping[str, Any]) -> str:
    if not contexts:
        return ": set KUBECONFIG"
    match = closest_match(context, contexts)
    return (
        f"; did you mean {match}?" if match else f"; its contexts are {', '.join(sorted(contexts))}"
    )


def _contexts(files: str) -> tuple[dict[str, Mapping[str, Any]], str | None]:
    """Return the contexts by name, and the name of the current one."""
    if not any(Path(file).expanduser().exists() for file in files.split(":") if file):
        return {}, None
    merger: Any = kube_config.KubeConfigMerger
    try:
        config = merger(files).config
        contexts = {
            node.value["name"]: node.value.get("context") or {}
            for node in config.safe_get("contexts") or []
        }
        return contexts, config.safe_get("current-context")
    except (
        ConfigException,
        yaml.YAMLError,
        AttributeError,
        KeyError,
        TypeError,
        ValueError,
    ) as error:
        raise UsageError(
            f"{files} is not a valid kubeconfig: {' '.join(str(error).split())[:200]}"
        ) from error
