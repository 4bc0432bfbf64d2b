"""A pipeline's status without what legitimately differs between two lives of the same pipeline: pure."""

import re
from typing import Any

TIMES = frozenset(
    {
        "createdAt",
        "startedAt",
        "finishedAt",
        "lastTransitionTime",
        "activeSeconds",
        "seconds",
        "secondsToReady",
    }
)
"""When something happened, and how long it took."""
OBSERVED_OF_A_LOST_PROCESS = frozenset(
    {"message", "exitCode", "lastStep", "node", "savedStep", "steps", "startedAt"}
)
"""Of an attempt that was interrupted or stopped.

Its pod disappears with its exit code and termination message when its grace period is over, while the operator may be
down. The Job's condition remains: it says that the pod was disrupted, and so decides outcome and reason.
"""
LOST = frozenset({"Interrupted", "Stopped"})


def comparable(status: Any, name: str, namespace: str, uid: str) -> Any:
    """Return the status without times, and with the pipeline's name, namespace and uid replaced."""
    return _replace(
        _without_times(status),
        {name: "NAME", namespace: "NAMESPACE", uid.replace("-", "")[:8]: "UID"},
    )


def _without_times(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_times(item) for item in value]
    if not isinstance(value, dict):
        return value
    dropped = (
        TIMES | OBSERVED_OF_A_LOST_PROCESS if value.get("outcome") in LOST else TIMES
    )
    return {
        name: _without_times(child)
        for name, child in sorted(value.items())
        if name not in dropped
    }


def _replace(value: Any, words: dict[str, str]) -> Any:
    if isinstance(value, list):
        return [_replace(item, words) for item in value]
    if isinstance(value, dict):
        return {name: _replace(child, words) for name, child in value.items()}
    if not isinstance(value, str):
        return value
    for old, new in words.items():
        value = re.sub(rf"\b{re.escape(old)}\b", new, value)
    return value
