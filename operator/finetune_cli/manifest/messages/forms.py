"""The form of a value: what a message shows if the manifest has a scalar in place of a mapping or a list."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from finetune_cli.diagnostics import SHOWN_CHARACTERS
from finetune_cli.manifest.annotations import (
    aliases,
    is_model,
    required_keys,
    unwrap_optional,
)
from finetune_cli.manifest.messages.quantities import corrected
from finetune_operator.api.stages.environment import Argument
from finetune_trainer.contract import ContractModel

PAIR = re.compile(r"(\w+)\s*[:=\s]\s*(.+)")
VARIABLE = re.compile(r"(\w+)=(\S*)")
REPOSITORY = re.compile(
    r"(?!(?:data|datasets|models)/)[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?<!\.json)(?<!\.jsonl)(?<!\.csv)(?<!\.parquet)"
)
"""ORG/NAME of the hub; a folder of a file would have another name, or ./ before it."""
SCALAR = re.compile(r"true|false|-?\d+(\.\d+)?")
"""A boolean or a number."""
NEEDS_QUOTES = re.compile(r"^[^\w./-]|[,{}\[\]#?]|:\s")
"""Signs that end a text in a list, or begin something else."""
UNKNOWN = "…"
"""A value that only the user knows."""


def form_of(annotation: Any, value: Any) -> str:
    """Return how a value of this type is written, with the user's value in its place if it fits."""
    kind = unwrap_optional(annotation)
    if get_origin(kind) is tuple:
        entry = get_args(kind)[0]
        forms = [form_of(entry, part) for part in _entries(entry, value)]
        return f"[{', '.join(forms)}]"
    if is_model(kind):
        return _mapping(kind, value)
    if get_origin(kind) is dict:
        variable = VARIABLE.fullmatch(str(value))
        if variable:
            text = json.dumps(variable[2])
            # A map of texts only, such as nodeSelector, needs the quotes.
            takes_boolean = _takes(get_args(kind)[1], value=True)
            if takes_boolean and SCALAR.fullmatch(variable[2]):
                text = variable[2]
            return _pairs({variable[1]: text})
        return "{KEY: VALUE}"
    return _text(value)


def _entries(entry: Any, value: Any) -> list[Any]:
    """Return the entries of a list that was written as one text, such as a,b or a command with its arguments."""
    if isinstance(value, dict):
        return _values_of(entry, value)
    if not isinstance(value, str):
        return [value]
    if entry == Argument:
        return value.split()
    parts = [part for part in re.split(r"[,\s]+", value) if part]
    # A sentence is one entry, with its commas and blanks.
    if _takes(entry, value):
        return [value]
    if all(_takes(entry, part) for part in parts):
        return parts
    return [value]


def _values_of(entry: Any, value: dict[str, Any]) -> list[Any]:
    """Return the entries of a list that was written as a mapping: an entry itself, names, or values by a name."""
    kind = unwrap_optional(entry)
    if not is_model(kind):
        return list(value)
    if not aliases(kind).keys().isdisjoint(value):
        return [value]
    return list(value.values())


def _mapping(kind: type[ContractModel], value: Any) -> str:
    fields = aliases(kind)
    pairs = _named_pairs(value, fields)
    if pairs:
        return _pairs(pairs)
    if isinstance(value, list):
        value = value[0] if len(value) == 1 else None
    required = required_keys(kind)
    pairs = {name: form_of(fields[name], None) for name in required}
    key = _field_for(value, required or fields, fields)
    if key:
        spelled = _spelled(fields[key], corrected(value))
        pairs[key] = form_of(fields[key], spelled)
        if key == "uri" and REPOSITORY.fullmatch(pairs[key]):
            pairs[key] = f"hf://{pairs[key]}"
    # A value that no field takes, such as true: a mapping without required keys may be empty.
    if not pairs and (value is not True or not _may_be_empty(kind)):
        pairs = {next(iter(fields)): UNKNOWN}
    return _pairs(pairs)


def _named_pairs(value: Any, fields: Mapping[str, Any]) -> dict[str, str]:
    """Return the pairs of a value that names keys itself; none for another value."""
    match value:
        case dict():
            return {key: _text(inner) for key, inner in value.items()}
        case list():
            # The names of fields, without values: columns: [prompt, completion].
            names = [name for name in value if isinstance(name, str) and name in fields]
            return dict.fromkeys(names, UNKNOWN)
        case str() if value in fields:
            # The name of a field in place of its value: tracking: wandb.
            return {value: form_of(fields[value], None)}
        case str():
            variable = VARIABLE.fullmatch(value)
            if variable and "value" in fields:
                return {"name": variable[1], "value": variable[2]}
            return _pair_without_colon(value, fields)
        case _:
            return {}


def _pair_without_colon(value: str, fields: Iterable[str]) -> dict[str, str]:
    """Return key and value that a missing colon or blank has made one text, as in uri base and uri:base."""
    name, rest = split_pair(value)
    if name in fields:
        return {name: _text(rest)}
    return {}


def split_pair(text: str) -> tuple[str, str]:
    """Return key and value of a text such as `uri base`, `uri:base` or `uri=base`; two empty texts for another text."""
    match = PAIR.fullmatch(text)
    if match is None or not text.isprintable() or len(text) > SHOWN_CHARACTERS:
        return "", ""
    return match[1], match[2]


def _field_for(
    value: Any, names: Iterable[str], fields: Mapping[str, Any]
) -> str | None:
    """Return the first of these fields that takes the value, also inside a list or a mapping."""
    if value is None or isinstance(value, bool | dict):
        return None
    for name in names:
        spelled = _spelled(fields[name], corrected(value))
        if _takes(fields[name], spelled):
            return name
    return None


def _spelled(annotation: Any, value: Any) -> Any:
    """Return a value as the field's list of values spells it: AdamW for adamw."""
    kind = unwrap_optional(annotation)
    if get_origin(kind) is Literal and isinstance(value, str):
        for choice in get_args(kind):
            if choice.lower() == value.lower():
                return choice
    return value


def _may_be_empty(kind: type[ContractModel]) -> bool:
    try:
        kind()
    except ValidationError:
        return False
    return True


def _takes(annotation: Any, value: Any) -> bool:
    kind = unwrap_optional(annotation)
    if get_origin(kind) is tuple:
        return _takes(get_args(kind)[0], value)
    if is_model(kind):
        names = required_keys(kind)
        # With several required keys, the value alone is not enough.
        if len(names) != 1:
            return False
        field = aliases(kind)[names[0]]
        return _takes(field, value)
    try:
        TypeAdapter(annotation).validate_python(value, strict=True)
    except ValidationError:
        return False
    return True


def _pairs(pairs: dict[str, str]) -> str:
    texts = [f"{_text(key)}: {value}" for key, value in pairs.items()]
    text = ", ".join(texts)
    # A message has one line: the first key shows the form, too.
    if len(text) > SHOWN_CHARACTERS:
        first = _text(next(iter(pairs)))
        text = f"{first}: {UNKNOWN}"
    return f"{{{text}}}"


def _text(value: Any) -> str:
    match value:
        case None | dict() | list():
            return UNKNOWN
        case bool():
            return str(value).lower()
        case str() if not value.isprintable() or len(value) > SHOWN_CHARACTERS:
            return UNKNOWN
        case str() if NEEDS_QUOTES.search(value):
            return json.dumps(value, ensure_ascii=False)
        case _:
            return str(value)
