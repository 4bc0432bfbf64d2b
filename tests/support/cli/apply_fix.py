"""Applies the fix of an error to a manifest, literally, as far as a program can."""

import copy
import re
from datetime import datetime
from typing import Any

import yaml

STEP = re.compile(r"\[([^\]]+)\]|([^.\[\]]+)")
PROSE = "it |metadata: above|spec: above|the |a |one |KEY|above |16Gi for|.* for gibibytes|.*KEY"
"""Beginnings of fixes in words."""
LITERAL = (
    rf"; write (?!{PROSE})([^…]+?)(?: or [^ ]+)?$",
    r"; write (\S+) for gibibytes or",
    r"; write it as (\S+)$",
    r"for [\d.]+ % write (\S+)$",
    r"remove the quotes: (\S+)$",
    r"put it in quotes: (\".*\")$",
    r"means \w+; write (\"\w+\")$",
    r"must be written (\S+) \(",
    r"; did you mean ([^ ,?]+)\?$",
    r": write ([^… ]+)(?:, or .* for a text)? \(got",
)
"""Patterns of messages whose fix is a value."""
NUMBER = re.compile(r"\d+e-\d+")
UNKNOWN = re.compile(
    r"unknown key; (?:it is called ([^…,]+?) here|did you mean ([^,?]+)\?)$"
)
REMOVED = re.compile(r"; remove the key|takes no values: remove values$")


def steps_of(path: str) -> list[Any]:
    """Return the keys and indexes of a path such as spec.datasets[0].uri."""
    steps: list[Any] = []
    for bracket, key in STEP.findall(path):
        steps.append(int(bracket) if bracket.isdigit() else bracket or key)
    return steps


def apply_fix(document: Any, path: str, message: str) -> Any | None:
    """Return the document with the fix of an error; None if the fix needs a person."""
    fixed = copy.deepcopy(document)
    *above, last = steps_of(path)
    parent = fixed
    for step in above:
        parent = parent[step]
    unknown = UNKNOWN.search(message)
    if unknown:
        _rename(fixed, above, last, unknown[1] or unknown[2])
        return fixed
    if REMOVED.search(message):
        del parent[last]
        return fixed
    for pattern in LITERAL:
        match = re.search(pattern, message)
        if match:
            parent[last] = _value(match[1], last)
            return fixed
    return None


def _value(text: str, key: Any) -> Any:
    text = text.removesuffix(", without quotes")
    value = yaml.safe_load(text)
    if isinstance(value, datetime):
        # YAML of Kubernetes has no times.
        return text
    if NUMBER.fullmatch(text):
        value = float(text)
    # `write model: {uri: base}` repeats the key.
    if isinstance(value, dict) and list(value) == [key]:
        return value[key]
    return value


def _rename(document: Any, above: list[Any], key: str, name: str) -> None:
    parent = document
    for step in above:
        parent = parent[step]
    value = parent.pop(key)
    path, _, form = name.partition(": ")
    keys = path.split(".")
    if keys[0] in {"spec", "metadata"}:
        parent = document
    for step in keys[:-1]:
        parent = parent.setdefault(step, {})
    parent[keys[-1]] = yaml.safe_load(form) if form else value
