"""The JSON of an object of the Kubernetes API."""

from typing import Any

Object = dict[str, Any]


def condition_of(resource: Object | None, kind: str) -> Object:
    """Return a condition in the status of an object; empty if there is none."""
    conditions = ((resource or {}).get("status") or {}).get("conditions") or []
    for condition in conditions:
        if condition["type"] == kind:
            observed: Object = condition
            return observed
    return {}
