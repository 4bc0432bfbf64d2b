"""Checks a document against the models: unknown keys, empty values, and rules between fields."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic.alias_generators import to_camel
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from finetune_cli.diagnostics import Diagnostic, closest_match
from finetune_cli.manifest.annotations import (
    aliases,
    is_model,
    required_keys,
    unwrap_optional,
)
from finetune_cli.manifest.messages.forms import split_pair
from finetune_cli.manifest.other_names import (
    location_here,
    name_here,
    reason_for_no_field,
)
from finetune_cli.manifest.yaml.reader import Location, YamlNode, join_path
from finetune_operator.api.rules import Rule, WithRules
from finetune_operator.api.spec import PipelineSpec
from finetune_trainer.contract import ContractModel

# More places make a message longer, and rarely clearer.
MAX_SUGGESTIONS = 3


@dataclass
class SchemaChecker:
    """A check of one document for unknown keys and empty values.

    It also renames misspelled keys in the document, so that the values below them are checked in the same run.
    """

    file: Path
    document: YamlNode
    diagnostics: list[Diagnostic] = field(default_factory=list)
    reported: set[Location] = field(default_factory=set)
    """Locations of empty or unreadable values; their errors are reported already."""

    replaced: set[Location] = field(default_factory=set)
    """Locations of values that are written under another name or in another place. They are not missing."""

    incomplete: set[Location] = field(default_factory=set)
    """Locations of mappings that an unknown key was taken out of."""

    def check(self, annotation: Any, value: YamlNode, location: Location = ()) -> None:
        """Check a value that should have the type of the annotation, and all values below it."""
        kind = unwrap_optional(annotation)
        if kind is Any:
            return
        if value.data is None:
            self._report_empty(value, location)
        elif is_model(kind) and isinstance(value.data, dict):
            self._check_keys(kind, value.data, location)
        for step, inner, child in _children(kind, value.data):
            self.check(inner, child, (*location, step))

    def report(self, line: int, location: Location, message: str) -> None:
        """Add an error; its path has the keys as the file spells them."""
        path = format_path(self.document, location)
        error = Diagnostic(self.file, line, path, message)
        self.diagnostics.append(error)

    def _report_empty(self, value: YamlNode, location: Location) -> None:
        self.reported.add(location)
        if not value.broken:
            self.report(value.line, location, "is empty; set a value or remove the key")

    def _check_keys(
        self, kind: type[ContractModel], data: dict[str, YamlNode], location: Location
    ) -> None:
        known = aliases(kind)
        self._indent(kind, data, location)
        if data and data.keys().isdisjoint(known):
            # The keys that are there stand for the required keys: one mistake.
            for name in required_keys(kind):
                self._mark_replaced((*location, name))
        # A copy: unknown keys are taken out of the mapping.
        unknown = [key for key in data if key not in known]
        for key in unknown:
            hint, match = self._hint(kind, data, key, location)
            line = data[key].line
            self.report(line, (*location, key), f"unknown key; {hint}")
            value = data.pop(key)
            if match and match not in data and _is_meant(key, match, known, value):
                # The value goes on under the right key, so that its errors are found in the same run.
                data[match] = value
            elif match:
                self._mark_replaced((*location, match))
            else:
                self.incomplete.add(location)

    def _indent(
        self, kind: type[ContractModel], data: dict[str, YamlNode], location: Location
    ) -> None:
        """Move keys beside an empty or absent mapping into it, with one error for all of them."""
        known = aliases(kind)
        for name, annotation in known.items():
            inner = unwrap_optional(annotation)
            if not is_model(inner):
                continue
            is_absent = name not in data
            # An optional mapping that is absent is no mistake, so keys beside it are not meant for it.
            if is_absent and name not in required_keys(kind):
                continue
            if not is_absent and data[name].data is not None:
                continue
            unknown = [key for key in data if key not in known]
            below = [key for key in unknown if key in aliases(inner)]
            if not below:
                continue
            first = below[0]
            keys = ", ".join(below)
            if is_absent:
                line = data[first].line
                fix = f"write {name}: above {first}, and indent {keys} below it"
                message = f"is required; {fix}"
            else:
                line = data[name].line
                message = f"is empty; indent {keys} below it"
            self.report(line, (*location, name), message)
            moved = {key: data.pop(key) for key in below}
            data[name] = YamlNode(line, name, moved)

    def _hint(
        self,
        kind: type[ContractModel],
        data: dict[str, YamlNode],
        key: str,
        location: Location,
    ) -> tuple[str, str | None]:
        """Return the hint for an unknown key, and the key of the model that it may be misspelled from."""
        known = aliases(kind)
        value = data[key]
        match = closest_match(key, known)
        if location[-1:] == ("columns",) and value.source in known:
            # A name that is a field's is no column's: the pair is the wrong way round.
            return _hint_here(known, value, key, match)
        # A known key in another spelling is no name of another tool, even if the tool has the same.
        if not _is_same_word(key, match):
            reason = reason_for_no_field(key, location)
            if reason:
                return f"there is no such field: {reason}", None
            name = name_here(key, location)
            if name:
                self._mark_replaced(location_here(name, location))
                return f"it is called {name} here", None
        elsewhere = _places(kind, key)
        if elsewhere:
            # The value stands for one of these places, so that the first of them is not missing, too.
            steps = elsewhere[0].split(".")
            self._mark_replaced((*location, *steps))
            return f"did you mean {', '.join(elsewhere)}?", None
        place = None
        # An entry of a list without its required key has a wrong name, and no key of another place.
        if data.keys() >= set(required_keys(kind)):
            place = _only_place(key)
        if place and not _is_same_word(key, match):
            return f"did you mean {place}?", None
        return _hint_here(known, value, key, match)

    def _mark_replaced(self, location: Location) -> None:
        """Mark a location and all above it: none of them is missing."""
        for length in range(1, len(location) + 1):
            self.replaced.add(location[:length])


def _is_meant(key: str, match: str, known: Mapping[str, Any], value: YamlNode) -> bool:
    """Return whether a misspelled key is this key for certain, so that its value can be checked.

    A guess alone says nothing about the value: `limit: 100` is no wrong `split`.
    """
    if _is_same_word(key, match):
        return True
    kind = unwrap_optional(known[match])
    data = value.data
    # Of a list, the first entry shows what is meant.
    if get_origin(kind) is tuple and isinstance(data, list) and data:
        entry_type = get_args(kind)[0]
        kind = unwrap_optional(entry_type)
        data = data[0].data
    if not is_model(kind) or not isinstance(data, dict):
        return False
    return not aliases(kind).keys().isdisjoint(data)


def _hint_here(
    known: Mapping[str, Any], value: YamlNode, key: str, match: str | None
) -> tuple[str, str | None]:
    """Return the hint for an unknown key by the keys of its own mapping, and the key that it may mean.

    `match` is the most similar key of the mapping.
    """
    name, rest = split_pair(key)
    if name in known:
        return f"a key ends with a colon and a blank: write {name}: {rest}", name
    if value.source in known and key.isprintable():
        return f"the key comes first: write {value.source}: {key}", value.source
    if match:
        return f"did you mean {match}?", match
    return f"known keys are {', '.join(known)}", None


def _is_same_word(key: str, match: str | None) -> bool:
    """Return whether a key is a known key in another spelling: learning_rate, LearningRate."""
    if match is None:
        return False
    word = key.replace("_", "").replace("-", "")
    return word.lower() == match.lower()


def _places(kind: type[ContractModel], key: str) -> list[str]:
    """Return the paths below a model at which a key is known, MAX_SUGGESTIONS at most."""
    if "_" in key:
        key = to_camel(key)
    return list(_nested_paths(kind, key))[:MAX_SUGGESTIONS]


def _only_place(key: str) -> str | None:
    """Return the path of a key that is known in one place of the whole spec, and None for any other key."""
    name = key
    if "_" in key:
        name = to_camel(key)
    places = _places_in_spec().get(name, [])
    if len(places) != 1:
        return None
    return places[0]


# Cached: a manifest with many unknown keys asks for each of them.
@cache
def _places_in_spec() -> dict[str, list[str]]:
    """Return the paths of all keys of the spec, by the keys' names; the keys of list entries are left out."""
    places: dict[str, list[str]] = {}
    mappings: list[tuple[str, type[ContractModel]]] = [("spec", PipelineSpec)]
    while mappings:
        path, kind = mappings.pop()
        for name, annotation in aliases(kind).items():
            place = f"{path}.{name}"
            places.setdefault(name, []).append(place)
            inner = unwrap_optional(annotation)
            if is_model(inner):
                mappings.append((place, inner))
    return places


def format_path(document: YamlNode, location: Location) -> str:
    """Return a location as a path with the keys as the file spells them, misspelled or not."""
    nodes = document.follow(location)
    keys = [node.key for node in nodes[1:]]
    # The rest of the location is absent from the file, so it has the API's own names.
    for step in location[len(keys) :]:
        if isinstance(step, int):
            keys.append(f"[{step}]")
        else:
            keys.append(step)
    return join_path(tuple(keys))


def error_at(
    file: Path, document: YamlNode, location: Location, message: str
) -> Diagnostic:
    """Return an error in the value at a location; an absent value has the line of the nearest value above it."""
    line = document.nearest(location).line
    path = format_path(document, location)
    return Diagnostic(file, line, path, message)


def broken_rules(
    annotation: Any, data: Any, location: Location = ()
) -> Iterator[tuple[Location, Rule]]:
    """Yield the rules between fields that plain data breaks, each with the location of its object.

    The data may have other errors too: a rule that cannot be evaluated because of them is left out.
    """
    kind = unwrap_optional(annotation)
    has_rules = is_model(kind) and issubclass(kind, WithRules)
    # A value of another type has an error of its own.
    if has_rules and isinstance(data, dict):
        completed = _with_defaults(kind, data)
        for rule in kind.all_rules():
            if _breaks(completed, rule):
                yield location, rule
    for step, inner, child in _children(kind, data):
        yield from broken_rules(inner, child, (*location, step))


def _breaks(data: Mapping[str, Any], rule: Rule) -> bool:
    try:
        return not rule.is_valid(data)
    # The rule reads a field that is absent or of another type, which has an error of its own.
    except (AttributeError, KeyError, TypeError, ValueError):
        return False


def _with_defaults(
    kind: type[ContractModel], data: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the data as an API server completes it: rules are written for objects with their defaults."""
    completed: dict[str, Any] = {}
    for name, info in kind.model_fields.items():
        key = info.alias or name
        value = _completed_value(info, data.get(key))
        if value is not None:
            completed[key] = value
    return completed


def _completed_value(info: FieldInfo, value: Any) -> Any:
    """Return the value of a field, or its default if it is absent; None if it has neither."""
    if value is None:
        if info.is_required():
            return None
        default = info.get_default(call_default_factory=True, validated_data={})
        return to_jsonable_python(default, by_alias=True, exclude_none=True)
    kind = unwrap_optional(info.annotation)
    if is_model(kind) and isinstance(value, dict):
        return _with_defaults(kind, value)
    return value


def _children(kind: Any, data: Any) -> Iterator[tuple[str | int, Any, Any]]:
    """Yield the values directly below a value of this type, each as (key or index, type, value)."""
    if isinstance(data, dict) and is_model(kind):
        for key, inner in aliases(kind).items():
            if key in data:
                yield key, inner, data[key]
    elif isinstance(data, dict) and get_origin(kind) is dict:
        value_type = get_args(kind)[1]
        for key, child in data.items():
            yield key, value_type, child
    elif isinstance(data, list) and get_origin(kind) is tuple:
        entry_type = get_args(kind)[0]
        for index, child in enumerate(data):
            yield index, entry_type, child


def _nested_paths(
    kind: type[ContractModel], key: str, prefix: str = ""
) -> Iterator[str]:
    """Return the paths below this model that end in a known key of that name: lora.rank for rank."""
    for name, annotation in aliases(kind).items():
        inner = unwrap_optional(annotation)
        if is_model(inner):
            path = f"{prefix}{name}."
            if key in aliases(inner):
                yield f"{path}{key}"
            yield from _nested_paths(inner, key, path)
