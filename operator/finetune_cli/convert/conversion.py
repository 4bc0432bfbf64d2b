"""The manifest that grows while the settings of a config are read, and the notes on what has no counterpart."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from finetune_cli.manifest.other_names import name_here, reason_for_no_field

Spec = dict[str, Any]


@dataclass
class Conversion:
    """A spec in the making."""

    spec: Spec = field(default_factory=dict)
    notes: list[tuple[str, str]] = field(default_factory=list)
    """Setting of the config and what became of it, for each that the manifest does not express as it was."""

    def set(self, path: str, value: Any) -> None:
        """Set a field below spec, given as train.lora.rank."""
        *parents, last = path.split(".")
        parent = self.spec
        for name in parents:
            parent = parent.setdefault(name, {})
        parent[last] = value

    def get(self, path: str) -> Any:
        """Return a field below spec; None if it is not set."""
        value: Any = self.spec
        for name in path.split("."):
            if not isinstance(value, dict):
                return None
            value = value.get(name)
        return value

    def remove(self, path: str) -> None:
        """Remove a field below spec, if it is set."""
        *parents, last = path.split(".")
        parent = self.get(".".join(parents)) if parents else self.spec
        if isinstance(parent, dict):
            parent.pop(last, None)

    def note(self, setting: str, text: str) -> None:
        """Add what became of a setting."""
        self.notes.append((setting, text))


Rule = Callable[[Conversion, Any], None]
"""Takes over the value of one setting."""
Table = Mapping[str, Rule]


def to(path: str, change: Callable[[Any], Any] = lambda value: value) -> Rule:
    """Return the rule that sets a field, after a change of the value."""
    return lambda conversion, value: conversion.set(path, change(value))


def says(setting: str, text: str) -> Rule:
    """Return the rule that only says what becomes of a setting."""
    return lambda conversion, _: conversion.note(setting, text)


def ignore(_conversion: Conversion, _value: Any) -> None:
    """Leave out a setting that changes no result."""


def without_effect(names: str) -> Table:
    """Return the rules of settings that change no result, or that are read elsewhere; blanks separate the names."""
    return dict.fromkeys(names.split(), ignore)


def take_over(conversion: Conversion, config: Mapping[str, Any], table: Table) -> None:
    """Apply the table to each setting of a config, in the table's order; settings without a rule become notes."""
    for setting, rule in table.items():
        value = config.get(setting)
        # A key without a value has the tool's default.
        if value is not None:
            rule(conversion, value)
    for setting, value in config.items():
        # False, nothing and empty lists ask for nothing.
        if setting in table or value in (None, False, "", [], {}):
            continue
        conversion.note(setting, _unknown(setting))


def _unknown(setting: str) -> str:
    reason = reason_for_no_field(setting, ())
    if reason:
        return f"not taken over: {reason}"
    name = name_here(setting, ())
    if name:
        return f"not taken over: see {name}"
    return "not taken over: it has no counterpart here"
