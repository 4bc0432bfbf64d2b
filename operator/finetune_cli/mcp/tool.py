"""A command as a tool: the JSON Schema of its arguments, and its command line for one call."""

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

SETTLED = frozenset(
    {
        "--help", "--json", "--output", "--yes",
        "--follow", "--watch", "--detach", "--keep-serving",
        "--evict", "--kill",
    }
)  # fmt: skip
"""Options that are no argument of a tool: its answer has one form, each call ends, and faults are for tests."""


@dataclass(frozen=True)
class Tool:
    """One command of `finetune`."""

    name: str
    parser: argparse.ArgumentParser
    fixed: tuple[str, ...] = ()
    """Options of every call."""
    is_read_only: bool = False
    is_destructive: bool = False

    @property
    def prints_json(self) -> bool:
        """Whether the command prints JSON also about what is wrong, such as the errors of a manifest."""
        return any("json" in option for option in self.fixed)

    def input_schema(self) -> dict[str, Any]:
        """Return the JSON Schema of the arguments, an object with a property for each."""
        return {
            "type": "object",
            "properties": {action.dest: _schema(action) for action in self._actions()},
            "required": [action.dest for action in self._actions() if action.required],
            "additionalProperties": False,
        }

    def command_line(self, arguments: Mapping[str, Any]) -> list[str]:
        """Return the words after `finetune` for arguments that suit the schema."""
        options: list[str] = []
        operands: list[str] = []
        for action in self._actions():
            value = arguments.get(action.dest)
            if value is None or value is False:
                continue
            values = value if isinstance(value, list) else [value]
            if not action.option_strings:
                operands += map(str, values)
            elif value is True:
                options.append(action.option_strings[-1])
            else:
                # As one word, so that no value can be another option.
                options += [f"{action.option_strings[-1]}={text}" for text in values]
        if operands:
            # After --, an operand that begins with - is no option.
            operands.insert(0, "--")
        return [self.name, *self.fixed, *options, *operands]

    def _actions(self) -> Iterator[argparse.Action]:
        # argparse has no public list of a parser's arguments.
        for action in self.parser._actions:  # noqa: SLF001
            if SETTLED.isdisjoint(action.option_strings):
                yield action


def _schema(action: argparse.Action) -> dict[str, Any]:
    """Return the JSON Schema of one argument."""
    if action.nargs == 0:
        return {"type": "boolean", "description": action.help}
    value: dict[str, Any] = {"type": "integer" if action.type is int else "string"}
    if action.choices:
        value["enum"] = [*action.choices]
    # An option that may be repeated has a list as its default, and an operand a sign for its number.
    if action.nargs in {"*", "+"} or isinstance(action.default, list):
        value = {"type": "array", "items": value}
    return {**value, "description": action.help}
