"""Applies a manifest as `kubectl apply` does, or in a dry run of the API server."""

import json
from typing import Any

from finetune_cli.cluster.session import ClusterSession, Object
from finetune_cli.manifest.manifest import Manifest
from finetune_operator.kubernetes import paths

# A misspelled field must be an error here, too, and not only in `finetune validate`.
STRICT = {"fieldValidation": "Strict"}
DRY_RUN = {"dryRun": "All"}
"""Parameters of a request that changes nothing."""
LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
"""Annotation with the manifest of the last `kubectl apply`.

`kubectl apply` compares it with the new manifest to find the fields to delete.
"""
KUBECTL = "kubectl"


async def apply(
    session: ClusterSession, manifest: Manifest, live: Object | None, **query: str
) -> Object:
    """Apply the manifest in the way it was applied before, client-side or server-side, and return the object.

    `query` has parameters of the request, such as DRY_RUN. Raises ApiError with the message of admission.
    """
    path = paths.pipeline(session.key)
    in_manifest = manifest.body["metadata"]
    # Other fields of metadata are the API server's own: a manifest from `kubectl get` has them.
    meta = {
        name: in_manifest[name]
        for name in ("labels", "annotations")
        if name in in_manifest
    }
    meta |= {"name": session.name, "namespace": session.context.namespace}
    body = {**manifest.body, "metadata": meta}
    last_applied = _annotations(live).get(LAST_APPLIED)
    if not last_applied:
        manager = _field_manager(live)
        return await session.api.apply(path, body, manager, **STRICT, **query)
    last = json.loads(last_applied)
    spec = _three_way_patch(last.get("spec") or {}, body["spec"])
    # What the next `kubectl apply` compares with.
    annotations = {**meta.get("annotations", {}), LAST_APPLIED: json.dumps(body)}
    patch = {**body, "metadata": {**meta, "annotations": annotations}, "spec": spec}
    return await session.api.patch(path, patch, fieldManager=KUBECTL, **STRICT, **query)


def _annotations(live: Object | None) -> dict[str, str]:
    if live is None:
        return {}
    annotations: dict[str, str] = live["metadata"].get("annotations", {})
    return annotations


def _three_way_patch(last: Any, new: Any) -> Any:
    """Return the merge patch of `kubectl apply`: the new fields, and null for the fields that only `last` has."""
    if not isinstance(last, dict) or not isinstance(new, dict):
        return new
    # A merge patch deletes the fields that are null in it.
    patch: dict[str, Any] = {key: None for key in last if key not in new}
    for key, value in new.items():
        patch[key] = _three_way_patch(last.get(key, {}), value)
    return patch


def _field_manager(live: Object | None) -> str:
    """Return the manager of the last server-side apply: only that manager's apply removes the fields it has set."""
    if live is None:
        return KUBECTL
    # The subresource is the status, which the operator applies.
    applied = [
        manager
        for manager in live["metadata"].get("managedFields", [])
        if manager.get("operation") == "Apply" and not manager.get("subresource")
    ]
    if not applied:
        return KUBECTL
    last = max(applied, key=lambda manager: str(manager.get("time", "")))
    return str(last["manager"])
