"""What applying a manifest would make of the object: asked of the API server, which changes nothing."""

import json
from typing import Any

from finetune_cli.cluster.session import ClusterSession, Object
from finetune_cli.manifest.manifest import Manifest
from finetune_operator.kubernetes import paths

DRY = {"dryRun": "All", "fieldValidation": "Strict"}
LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
"""Annotation: what `kubectl apply` applied last, so that it can take away what is not in the manifest any more."""
KUBECTL = "kubectl"


async def dry_run(reach: ClusterSession, manifest: Manifest, live: Object | None) -> Object:
    """Apply in the way in which the object was applied before; raises ApiError with what admission says."""
    where = paths.pipeline(reach.key)
    meta = {name: value for name, value in manifest.body["metadata"].items() if name in {"labels", "annotations"}}
    meta |= {"name": reach.name, "namespace": reach.context.namespace}
    body = {**manifest.body, "metadata": meta}
    last = (live or {"metadata": {}})["metadata"].get("annotations", {}).get(LAST_APPLIED)
    if last:
        spec = _three_ways(json.loads(last).get("spec") or {}, body["spec"])
        return await reach.api.patch(where, {**body, "spec": spec}, fieldManager=KUBECTL, **DRY)
    return await reach.api.apply(where, body, _manager(live), **DRY)


def _three_ways(last: Any, new: Any) -> Any:
    """Write the merge patch of `kubectl apply`: what is new, and null for what was applied last and is not any more."""
    if not isinstance(last, dict) or not isinstance(new, dict):
        return new
    gone = {key: None for key in last if key not in new}
    return gone | {key: _three_ways(last.get(key, {}), value) for key, value in new.items()}


def _manager(live: Object | None) -> str:
    """Name whoever applied it last on the server's side, for only he can take away what he gave."""
    managers = live["metadata"].get("managedFields", []) if live else []
    applied = [one for one in managers if one.get("operation") == "Apply" and not one.get("subresource")]
    last = max(applied, key=lambda one: str(one.get("time", "")), default={"manager": KUBECTL})
    return str(last["manager"])
