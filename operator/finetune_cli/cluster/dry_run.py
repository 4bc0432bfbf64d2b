"""Server-side dry run: the object that applying a manifest would produce."""

import json
from typing import Any

from finetune_cli.cluster.session import ClusterSession, Object
from finetune_cli.manifest.manifest import Manifest
from finetune_operator.kubernetes import paths

DRY_RUN = {"dryRun": "All", "fieldValidation": "Strict"}
LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
"""Annotation with the manifest of the last `kubectl apply`.

`kubectl apply` compares it with the new manifest to find the fields to delete.
"""
KUBECTL = "kubectl"


async def dry_run(session: ClusterSession, manifest: Manifest, live: Object | None) -> Object:
    """Return the object after applying the manifest in the way it was applied before: client-side or server-side.

    Raises ApiError with the message of admission.
    """
    path = paths.pipeline(session.key)
    meta = {
        name: value
        for name, value in manifest.body["metadata"].items()
        if name in {"labels", "annotations"}
    }
    meta |= {"name": session.name, "namespace": session.context.namespace}
    body = {**manifest.body, "metadata": meta}
    last = (live or {"metadata": {}})["metadata"].get("annotations", {}).get(LAST_APPLIED)
    if last:
        spec = _three_way_patch(json.loads(last).get("spec") or {}, body["spec"])
        return await session.api.patch(
            path, {**body, "spec": spec}, fieldManager=KUBECTL, **DRY_RUN
        )
    return await session.api.apply(path, body, _field_manager(live), **DRY_RUN)


def _three_way_patch(last: Any, new: Any) -> Any:
    """Return the merge patch of `kubectl apply`: the new fields, and null for those that only `last` has."""
    if not isinstance(last, dict) or not isinstance(new, dict):
        return new
    removed = {key: None for key in last if key not in new}
    return removed | {key: _three_way_patch(last.get(key, {}), value) for key, value in new.items()}


def _field_manager(live: Object | None) -> str:
    """Return the manager of the last server-side apply: only that manager's apply removes the fields it has set."""
    managers = live["metadata"].get("managedFields", []) if live else []
    applied = [
        one for one in managers if one.get("operation") == "Apply" and not one.get("subresource")
    ]
    last = max(applied, key=lambda one: str(one.get("time", "")), default={"manager": KUBECTL})
    return str(last["manager"])
