"""Pydantic's errors in plain words: one table, and one for patterns."""

import re
from collections.abc import Callable
from typing import Any

from pydantic_core import ErrorDetails

from finetune_cli.diagnostics import closest_match, quoted
from finetune_cli.manifest.yaml_reader import YamlNode

DNS_LABEL = r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$"
DNS_SUBDOMAIN = r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*$"

PATTERNS = {
    DNS_LABEL: "must be lower-case letters, digits and -, with a letter or digit at both ends",
    DNS_SUBDOMAIN: "must be lower-case letters, digits, - and ., with a letter or digit at both ends",
    r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$": "must be lower-case letters, digits, - and ., as names in Kubernetes are",
    r"^((hf|file)://\S+|pvc://[a-z0-9][a-z0-9.-]*(/\S*)?|[A-Za-z0-9_.][^\s:]*)$": (
        "must be hf://ORG/NAME, pvc://CLAIM/PATH, file:///PATH or a path beside the manifest, without spaces"
    ),
    r"^(file://\S+|pvc://[a-z0-9][a-z0-9.-]*(/\S*)?|[A-Za-z0-9_.][^\s:]*)$": (
        "must be pvc://CLAIM/PATH, file:///PATH or a path beside the manifest, without spaces"
    ),
    r"^\S+$": "must be one word, without spaces",
    r"^[A-Za-z0-9][A-Za-z0-9_.-]*$": "must be letters, digits, _, . and -, with a letter or digit first",
    r"^[A-Za-z0-9_.*-]+$": "must be letters, digits, _, ., - and *",
    r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$": "must be a quantity such as 2, 500m or 16Gi",
    r"^[A-Za-z_][A-Za-z0-9_]*$": "must be letters, digits and _, with no digit first",
    r"^[A-Za-z0-9]([A-Za-z0-9_./-]*[A-Za-z0-9])?$": (
        "must be a label's key: letters, digits, _, ., - and /, with a letter or digit at both ends"
    ),
    r"^([A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?)?$": (
        "must be a label's value: letters, digits, _, . and -, with a letter or digit at both ends"
    ),
}


def describe(error: ErrorDetails, value: YamlNode) -> str:
    """Say what is wrong with a value and, where that helps, what it was."""
    kind, context = error["type"], error.get("ctx", {})
    if kind == "missing":
        return "is required"
    if kind == "string_type":
        return _text_wanted(value)
    if kind in {"literal_error", "enum"}:
        return _one_of(re.findall(r"'([^']*)'", context["expected"]), error["input"])
    if kind == "value_error":
        return _refused(str(context["error"]), error["input"])
    words = _MESSAGES.get(kind)
    said = words(context) if words else error["msg"]
    return f"{said} (got {quoted(error['input'])})"


_MESSAGES: dict[str, Callable[[dict[str, Any]], str]] = {
    "greater_than_equal": lambda found: f"must be at least {_number(found['ge'])}",
    "greater_than": lambda found: f"must be more than {_number(found['gt'])}",
    "less_than_equal": lambda found: f"must be at most {_number(found['le'])}",
    "less_than": lambda found: f"must be less than {_number(found['lt'])}",
    "int_type": lambda _: "must be a whole number",
    "int_from_float": lambda _: "must be a whole number",
    "float_type": lambda _: "must be a number",
    "finite_number": lambda _: "must be a finite number",
    "bool_type": lambda _: "must be true or false",
    "model_type": lambda _: "must be keys and values",
    "dict_type": lambda _: "must be keys and values",
    "tuple_type": lambda _: "must be a list",
    "list_type": lambda _: "must be a list",
    "string_too_short": lambda found: f"must have at least {_count(found['min_length'], 'character')}",
    "string_too_long": lambda found: f"must have at most {_count(found['max_length'], 'character')}",
    "too_short": lambda found: f"must have at least {_count(found['min_length'], 'entry', 'entries')}",
    "too_long": lambda found: f"must have at most {_count(found['max_length'], 'entry', 'entries')}",
    "string_pattern_mismatch": lambda found: PATTERNS.get(found["pattern"], f"must match {found['pattern']}"),
}


def _number(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:g}"


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"


def _text_wanted(value: YamlNode) -> str:
    match value.data:
        case bool() if value.source.lower() not in {"true", "false"}:
            return f'must be text, but {value.source} without quotes means {quoted(value.data)}; write "{value.source}"'
        case bool() | int() | float():
            return f'must be text (got {quoted(value.data)}); put it in quotes: "{value.source}"'
        case _:
            return f"must be text (got {quoted(value.plain())})"


def _one_of(choices: list[str], got: Any) -> str:
    wanted = f"must be {choices[0]}" if len(choices) == 1 else f"must be one of {', '.join(choices)}"
    meant = closest_match(got, choices) if isinstance(got, str) else None
    hint = f"; did you mean {meant}?" if meant and len(choices) > 1 else ""
    return f"{wanted} (got {quoted(got)}){hint}"


def _refused(why: str, got: Any) -> str:
    """Say what a validator of our own said; `must be one of a, b` gains a did-you-mean."""
    if why.startswith("must be one of "):
        return _one_of(why.removeprefix("must be one of ").split(", "), got)
    return f"{why} (got {quoted(got)})"
