"""A document beside the models: keys that are misspelled, values that are missing, rules between fields."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_origin

from pydantic_core import to_jsonable_python

from finetune_cli.diagnostics import Diagnostic, closest_match
from finetune_cli.manifest.yaml_reader import YamlNode, joined
from finetune_operator.api.rules import Rule, WithRules
from finetune_trainer.contract import ContractModel

Location = tuple[str | int, ...]
PLACES_SHOWN = 3


@dataclass
class SchemaChecker:
    """Renames misspelled keys in a document, so that what lies below them is checked in the same run."""

    file: Path
    document: YamlNode
    problems: list[Diagnostic] = field(default_factory=list)
    reported: set[Location] = field(default_factory=set)
    """Where a value is missing or unreadable, which is among the problems already."""

    def check(self, annotation: Any, value: YamlNode, location: Location = ()) -> None:
        """Go through a value that should be of this type, and everything in it."""
        kind = unwrap_optional(annotation)
        if kind is Any:
            return
        if value.data is None:
            self._nothing(value, location)
        elif is_model(kind) and isinstance(value.data, dict):
            self._keys(kind, value.data, location)
        for step, inner, part in _parts(kind, value.data):
            self.check(inner, part, (*location, step))

    def report(self, line: int, location: Location, message: str) -> None:
        """Add a problem, with the keys as they were written."""
        self.problems.append(Diagnostic(self.file, line, format_path(self.document, location), message))

    def _nothing(self, value: YamlNode, location: Location) -> None:
        self.reported.add(location)
        if not value.broken:
            self.report(value.line, location, "is empty; give it a value or remove the key")

    def _keys(self, kind: type[ContractModel], data: dict[str, YamlNode], location: Location) -> None:
        known = aliases(kind)
        for key in [key for key in data if key not in known]:
            meant = closest_match(key, known)
            elsewhere = list(_places(kind, key))[:PLACES_SHOWN]
            if elsewhere:
                hint = f"did you mean {', '.join(elsewhere)}?"
            elif meant:
                hint = f"did you mean {meant}?"
            else:
                hint = f"there are {', '.join(known)}"
            self.report(data[key].line, (*location, key), f"unknown key; {hint}")
            value = data.pop(key)
            if meant and not elsewhere and meant not in data:
                data[meant] = value


def unwrap_optional(annotation: Any) -> Any:
    """Give X of X | None and of Annotated[X, …]."""
    if get_origin(annotation) is Annotated:
        return unwrap_optional(get_args(annotation)[0])
    others = [kind for kind in get_args(annotation) if kind is not NoneType]
    if NoneType in get_args(annotation) and len(others) == 1:
        return unwrap_optional(others[0])
    return annotation


def is_model(kind: Any) -> bool:
    """Say whether a type has keys of its own."""
    return isinstance(kind, type) and issubclass(kind, ContractModel)


def aliases(kind: type[ContractModel]) -> dict[str, Any]:
    """Give the keys of a model as users write them, with the types of their values."""
    return {found.alias or name: found.annotation for name, found in kind.model_fields.items()}


def format_path(document: YamlNode, location: Location) -> str:
    """Name a place in the words of the file: misspelled where the file misspells."""
    found = document.follow(location)
    beyond = [f"[{step}]" if isinstance(step, int) else step for step in location[len(found) - 1 :]]
    return joined((*(value.written for value in found[1:]), *beyond))


def broken_rules(annotation: Any, data: Any, location: Location = ()) -> Iterator[tuple[Location, Rule]]:
    """Give the rules between fields that plain data breaks, each with the place of its object.

    Works on data that is wrong in other ways too: a rule that cannot be judged is left out.
    """
    kind = unwrap_optional(annotation)
    if is_model(kind) and issubclass(kind, WithRules) and isinstance(data, dict):
        whole = _completed(kind, data)
        yield from ((location, rule) for rule in kind.all_rules() if _breaks(whole, rule))
    for step, inner, part in _parts(kind, data):
        yield from broken_rules(inner, part, (*location, step))


def _breaks(data: Mapping[str, Any], rule: Rule) -> bool:
    try:
        return not rule.is_valid(data)
    except (AttributeError, KeyError, TypeError, ValueError):
        return False


def _completed(kind: type[ContractModel], data: Mapping[str, Any]) -> dict[str, Any]:
    whole: dict[str, Any] = {}
    for name, found in kind.model_fields.items():
        key, inner = found.alias or name, unwrap_optional(found.annotation)
        value = data.get(key)
        if value is None and not found.is_required():
            default = found.get_default(call_default_factory=True, validated_data={})
            value = to_jsonable_python(default, by_alias=True, exclude_none=True)
        elif is_model(inner) and isinstance(value, dict):
            value = _completed(inner, value)
        if value is not None:
            whole[key] = value
    return whole


def _parts(kind: Any, data: Any) -> Iterator[tuple[str | int, Any, Any]]:
    """Give what lies directly in a value of this type: its key or index, its type, itself."""
    if isinstance(data, dict) and is_model(kind):
        yield from ((key, inner, data[key]) for key, inner in aliases(kind).items() if key in data)
    elif isinstance(data, dict) and get_origin(kind) is dict:
        yield from ((key, get_args(kind)[1], part) for key, part in data.items())
    elif isinstance(data, list) and get_origin(kind) is tuple:
        yield from ((index, get_args(kind)[0], part) for index, part in enumerate(data))


def _places(kind: type[ContractModel], key: str, before: str = "") -> Iterator[str]:
    """Give where below this model a key of that name is known: lora.rank for rank."""
    for name, annotation in aliases(kind).items():
        inner = unwrap_optional(annotation)
        if is_model(inner):
            if key in aliases(inner):
                yield f"{before}{name}.{key}"
            yield from _places(inner, key, f"{before}{name}.")
