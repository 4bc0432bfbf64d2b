"""Which cluster and namespace are meant."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from kubernetes.aio.config import ConfigException, kube_config

from finetune_cli.diagnostics import UsageError, closest_match

OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
"""Where a pod finds its own."""


@dataclass(frozen=True)
class Context:
    """A cluster and a namespace in it."""

    context: str | None
    """None: the cluster that this process is a pod of."""
    namespace: str


def read_context(context: str | None) -> Context:
    """Find the context, or the current one, and its namespace; raises Refused where there is none."""
    files = kube_config.KUBE_CONFIG_DEFAULT_LOCATION
    contexts, current = _contexts(files)
    if context and context not in contexts:
        raise UsageError(f"there is no context {context} in {files}{_hint(context, contexts)}")
    if chosen := context or current:
        return Context(chosen, (contexts.get(chosen) or {}).get("namespace") or "default")
    if OWN_NAMESPACE.is_file():
        return Context(None, OWN_NAMESPACE.read_text().strip())
    if contexts:
        raise UsageError(f"{files} has no current context; choose with --context: {', '.join(sorted(contexts))}")
    raise UsageError(
        f"no kubeconfig at {files}: set KUBECONFIG; a run on this machine is named by its FILE or --workdir"
    )


def _hint(context: str, contexts: Mapping[str, Any]) -> str:
    if not contexts:
        return ": set KUBECONFIG"
    meant = closest_match(context, contexts)
    return f"; did you mean {meant}?" if meant else f"; there are {', '.join(sorted(contexts))}"


def _contexts(files: str) -> tuple[dict[str, Mapping[str, Any]], str | None]:
    """Give the contexts by name, and the name of the current one."""
    if not any(Path(file).expanduser().exists() for file in files.split(":") if file):
        return {}, None
    read: Any = kube_config.KubeConfigMerger
    try:
        config = read(files).config
        contexts = {node.value["name"]: node.value.get("context") or {} for node in config.safe_get("contexts") or []}
        return contexts, config.safe_get("current-context")
    except (ConfigException, yaml.YAMLError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{files} is no kubeconfig: {' '.join(str(error).split())[:200]}") from error
