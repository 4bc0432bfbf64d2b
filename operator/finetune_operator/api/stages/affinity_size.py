"""The limits of an affinity, which is a field with arbitrary content."""

import json
from collections.abc import Iterable
from typing import Any

MAX_AFFINITY = 16384
"""Characters of an affinity as JSON."""
# A valid affinity of a pod has at most ten.
MAX_DEPTH = 32
"""Nesting levels allowed in an affinity."""


def check_depth_and_size(value: dict[str, Any]) -> dict[str, Any]:
    """Raise ValueError if the value is nested too deeply or too large.

    The schema of a field with arbitrary content cannot limit either. Without these limits an API server could store an
    object that the operator reads but cannot serialise again, or cannot store in a Job.
    """
    # Level by level, so that the check ends at the limit, however deep the value is.
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [child for node in level for child in _children(node)]
    if level:
        raise ValueError(
            f"nested more than {MAX_DEPTH} levels deep: a valid affinity of a pod is not"
        )
    if len(json.dumps(value)) > MAX_AFFINITY:
        raise ValueError(f"must have at most {MAX_AFFINITY:,} characters as JSON")
    return value


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, list):
        return value
    return ()
