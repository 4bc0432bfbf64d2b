"""Reads `--set FIELD=VALUE` and sets the field in a document before it is checked."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from finetune_cli.diagnostics import UsageError
from finetune_cli.manifest.yaml.reader import Location, YamlNode, parse

ROOTS = frozenset({"spec", "metadata"})
"""First keys of a path from the document's root; any other path begins below spec."""
STEP = re.compile(r"\.?([A-Za-z0-9_-]+)|\[([^\]]+)\]")
"""A key such as .train, an index such as [0], or a key with dots such as [example.com/pool]."""
NO_LINE = 0
"""Line of a value that is in no file."""


@dataclass(frozen=True)
class Override:
    """A value for one field of a manifest."""

    text: str
    """The argument as it was given."""
    location: Location
    value: YamlNode


def parse_overrides(arguments: Iterable[str]) -> tuple[Override, ...]:
    """Return the overrides that arguments such as train.epochs=1 mean; raises UsageError."""
    return tuple(_override(text) for text in arguments)


def _override(text: str) -> Override:
    path, separator, value = text.partition("=")
    location = _location(path)
    if not separator or not location:
        raise UsageError(
            f"--set {text}: must be FIELD=VALUE, such as train.optimizer.learningRate=1e-4"
        )
    if location[0] not in ROOTS:
        location = ("spec", *location)
    return Override(text, location, _value(text, value))


def _location(path: str) -> Location:
    """Return the steps of a path; empty if it is no path."""
    steps: list[str | int] = []
    position = 0
    while position < len(path):
        match = STEP.match(path, position)
        if match is None:
            return ()
        name, bracket = match.groups()
        step = name or bracket
        is_index = bracket is not None and bracket.isdecimal()
        steps.append(int(bracket) if is_index else step)
        position = match.end()
    return tuple(steps)


def _value(text: str, value: str) -> YamlNode:
    """Return a value, which is written as in a manifest; nothing after the = means no value."""
    if not value.strip():
        return YamlNode(NO_LINE, "", None)
    file = parse(Path("--set"), value.encode())
    if file.diagnostics:
        raise UsageError(f"--set {text}: {file.diagnostics[0].message}")
    node = file.documents[0] if file.documents else YamlNode(NO_LINE, "", None)
    _clear_lines(node)
    return node


def _clear_lines(node: YamlNode) -> None:
    node.line = NO_LINE
    match node.data:
        case dict() as mapping:
            children = list(mapping.values())
        case list() as children:
            pass
        case _:
            return
    for child in children:
        _clear_lines(child)


def apply_overrides(document: YamlNode, overrides: Iterable[Override]) -> None:
    """Set the fields of a document; raises UsageError for an entry that a list does not have."""
    for override in overrides:
        parent = document
        for step, following in zip(
            override.location, override.location[1:], strict=False
        ):
            parent = _child(parent, step, following, override)
        _set(parent, override.location[-1], override.value, override)


def _child(
    parent: YamlNode, step: str | int, following: str | int, override: Override
) -> YamlNode:
    """Return the mapping or list at a step; an absent mapping is added, and takes the place of another value."""
    nodes = parent.follow((step,))
    wanted = list if isinstance(following, int) else dict
    if len(nodes) > 1 and isinstance(nodes[1].data, wanted):
        return nodes[1]
    child = YamlNode(NO_LINE, str(step), wanted())
    _set(parent, step, child, override)
    return child


def _set(
    parent: YamlNode, step: str | int, value: YamlNode, override: Override
) -> None:
    match parent.data, step:
        case list() as items, int() if step < len(items):
            value.key = f"[{step}]"
            items[step] = value
        case list() as items, int() if step == len(items):
            value.key = f"[{step}]"
            items.append(value)
        case list() as items, _:
            raise UsageError(
                f"--set {override.text}: the list has {len(items)} entries; name one by its index,"
                f" from [0] to [{len(items)}] for a new one"
            )
        case dict() as mapping, _:
            value.key = str(step)
            mapping[str(step)] = value
        case _:
            raise UsageError(
                f"--set {override.text}: the manifest is no mapping, so no field can be set"
            )
