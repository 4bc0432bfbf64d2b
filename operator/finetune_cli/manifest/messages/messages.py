"""Messages for pydantic's errors: one table by type of error, one by pattern."""

import re
from collections.abc import Callable
from typing import Any

from pydantic_core import ErrorDetails

from finetune_cli.diagnostics import closest_match, quoted
from finetune_cli.manifest.messages.fixes import fix_of, uri_for
from finetune_cli.manifest.yaml.reader import YamlNode
from finetune_operator.api import names
from finetune_operator.api.amounts import AMOUNT, SIGNED_AMOUNT
from finetune_operator.api.stages.pod import BYTES
from finetune_operator.api.stages.volumes import ABSOLUTE_PATH, RELATIVE_PATH
from finetune_trainer.contract import uris
from finetune_trainer.contract.chat_template import (
    TEMPLATE_DESCRIPTION,
    TEMPLATE_PATTERN,
)

LABEL_KEY = (
    "must be a label key: up to 63 letters, digits, _, . and -, with a letter or digit at both ends,"
    " after DOMAIN/ if it has a domain"
)
PATTERNS = {
    # The keys are the patterns of the API's schema, exactly as written there.
    names.DNS_LABEL: "must consist of lower-case letters, digits and -, with a letter or digit at both ends",
    names.DNS_SUBDOMAIN: "must consist of lower-case letters, digits, - and ., with a letter or digit at both ends",
    **uris.DESCRIPTIONS,
    TEMPLATE_PATTERN: TEMPLATE_DESCRIPTION,
    r"^\S+$": "must be one word, without spaces",
    r"^[A-Za-z0-9][A-Za-z0-9_.-]*$": "must consist of letters, digits, _, . and -, with a letter or digit first",
    r"^[A-Za-z0-9_-]+$": "must consist of letters, digits, _ and -",
    r"^[A-Za-z0-9_][A-Za-z0-9_. -]*$": "must consist of letters, digits, _, ., - and spaces, with no space first",
    r"^https?://[^\s/@]+(/\S*)?$": "must be https://HOST or http://HOST, without a user name and without spaces",
    r"^[A-Za-z0-9_.*-]+$": "must consist of letters, digits, _, ., - and *",
    r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$": "must be a quantity such as 2, 500m or 16Gi",
    BYTES: "must be a size of at least a megabyte, such as 50Gi; a number alone counts bytes",
    AMOUNT: "must be an amount such as 3.20",
    SIGNED_AMOUNT: "must be an amount such as -3.20",
    names.DATA_KEY: "must consist of letters, digits, -, _ and ., and not begin with ..",
    names.VARIABLE_NAME: "must consist of letters, digits and _, with no digit first",
    names.VARIABLE_PREFIX: "must consist of ASCII characters without =",
    names.FIELD_PATH: "must be a field such as metadata.name, metadata.labels['KEY'], spec.nodeName or status.podIP",
    names.IMAGE: "must be an image as in [HOST/]NAME[:TAG][@DIGEST], in lower case but for the tag",
    names.LABEL_KEY: LABEL_KEY,
    names.OPTIONAL_LABEL_KEY: LABEL_KEY,
    names.ANNOTATION_KEY: LABEL_KEY,
    RELATIVE_PATH: "must be a path within the volume, without .. and : and without a / at its ends",
    ABSOLUTE_PATH: "must be a path that begins with /, without .. and : and without a / at its end",
    names.LABEL_VALUE: (
        "must be a label value: letters, digits, _, . and -, with a letter or digit at both ends"
    ),
}


# Names of PyTorch, Transformers and other tools: most are too far from ours for the closest match.
OTHER_CHOICES = {
    "float32": "FP32",
    "bfloat16": "BF16",
    "wsd": "WarmupStableDecay",
    "lora": "Adapter",
    ">": "GreaterThan",
    ">=": "GreaterThanOrEqual",
    "<": "LessThan",
    "<=": "LessThanOrEqual",
}
"""Values under other names -> the value here, if the field has it."""
NAMED_LISTS = frozenset({"env", "tasks", "imagePullSecrets"})
"""Lists whose entries have a name: they are often written as mappings."""


def describe(error: ErrorDetails, value: YamlNode, annotation: Any = None) -> str:
    """Return the message for an error: the expected value, if it helps the observed value, and the fix.

    `annotation` is the type of the field, if it is known.
    """
    message = _problem(error, value)
    fix = fix_of(error, annotation)
    if fix and error["input"] is not None and not _names_entries(error):
        return f"{message}; {fix}"
    return message


def _problem(error: ErrorDetails, value: YamlNode) -> str:
    context = error.get("ctx", {})
    got = error["input"]
    match error["type"]:
        case "missing":
            return "is required"
        case "string_type":
            return _string_expected(value)
        case "literal_error" | "enum":
            # Pydantic has the choices only in words: 'a', 'b' or 'c'.
            return _choice_expected(re.findall(r"'([^']*)'", context["expected"]), got)
        case "value_error":
            return _validator_message(str(context["error"]), got)
        case _:
            return f"{_expected(error)} (got {quoted(got)})"


def _expected(error: ErrorDetails) -> str:
    kind = error["type"]
    context = error.get("ctx", {})
    got = error["input"]
    if kind == "string_pattern_mismatch":
        form = _form_of_uri(context["pattern"], str(got))
        if form:
            return f"must be {form}, without spaces"
    if _names_entries(error):
        name = next(iter(got))
        return f"must be a list, with - name: {name} in place of {name}:"
    format_message = _MESSAGES.get(kind)
    if format_message is None:
        return error["msg"]
    return format_message(context)


def _names_entries(error: ErrorDetails) -> bool:
    """Return whether a list of named entries is written as a mapping with the names as keys."""
    got = error["input"]
    key = error["loc"][-1]
    if error["type"] != "tuple_type" or key not in NAMED_LISTS:
        return False
    # An entry itself in place of the list has the key name.
    return isinstance(got, dict) and bool(got) and "name" not in got


_MESSAGES: dict[str, Callable[[dict[str, Any]], str]] = {
    "greater_than_equal": lambda context: f"must be at least {_number(context['ge'])}",
    "greater_than": lambda context: f"must be more than {_number(context['gt'])}",
    "less_than_equal": lambda context: f"must be at most {_number(context['le'])}",
    "datetime_from_date_parsing": lambda _: "must be a time with a date",
    "datetime_parsing": lambda _: "must be a time with a date",
    "datetime_type": lambda _: "must be a time with a date",
    "timezone_aware": lambda _: "must be a time with its zone",
    "less_than": lambda context: f"must be less than {_number(context['lt'])}",
    "int_type": lambda _: "must be an integer",
    "int_from_float": lambda _: "must be an integer",
    "float_type": lambda _: "must be a number",
    "finite_number": lambda _: "must be a finite number",
    "bool_type": lambda _: "must be true or false",
    "model_type": lambda _: "must be a mapping",
    "dict_type": lambda _: "must be a mapping",
    "tuple_type": lambda _: "must be a list",
    "list_type": lambda _: "must be a list",
    "string_too_short": lambda context: (
        f"must have at least {_count(context['min_length'], 'character', 'characters')}"
    ),
    "string_too_long": lambda context: (
        f"must have at most {_count(context['max_length'], 'character', 'characters')}"
    ),
    "too_short": lambda context: (
        f"must have at least {_count(context['min_length'], 'entry', 'entries')}"
    ),
    "too_long": lambda context: (
        f"must have at most {_count(context['max_length'], 'entry', 'entries')}"
    ),
    "string_pattern_mismatch": lambda context: PATTERNS.get(
        context["pattern"], f"must match {context['pattern']}"
    ),
}


def _form_of_uri(pattern: str, got: str) -> str | None:
    """Return how a URI with the scheme of this one is written, if the pattern accepts that scheme."""
    scheme = (uri_for(got) or got).partition("://")[0]
    for form, written in uris.FORMS.values():
        if form in pattern and written.startswith(f"{scheme}://"):
            return written
    return None


def _number(value: float) -> str:
    if float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:g}"


def _count(number: int, singular: str, plural: str) -> str:
    if number == 1:
        return f"{number:,} {singular}"
    return f"{number:,} {plural}"


def _string_expected(value: YamlNode) -> str:
    match value.data:
        # YAML 1.1 reads yes, no, on and off as booleans: few users know.
        case bool() if value.source.lower() not in {"true", "false"}:
            return f'must be a string, but unquoted {value.source} means {quoted(value.data)}; write "{value.source}"'
        case bool() | int() | float():
            return f'must be a string (got {quoted(value.data)}); put it in quotes: "{value.source}"'
        case list() | dict():
            return f"must be a string (got {quoted(value.plain())}); write one value"
        case _:
            return f"must be a string (got {quoted(value.plain())})"


def _choice_expected(choices: list[str], got: Any) -> str:
    if len(choices) == 1:
        return f"must be {choices[0]} (got {quoted(got)})"
    # An empty text is allowed, but no choice to offer.
    names = ", ".join(choice for choice in choices if choice)
    message = f"must be one of {names} (got {quoted(got)})"
    match = None
    if isinstance(got, str):
        match = _same_choice(got, choices) or closest_match(got, choices)
    if match and str(got).lower() == match.lower():
        # The list of all values would hide that only the case differs.
        return f"must be written {match} (got {quoted(got)})"
    if match:
        message += f"; did you mean {match}?"
    return message


def _same_choice(got: str, choices: list[str]) -> str | None:
    """Return the choice that has this name elsewhere, or that the value begins with: Cosine for cosine_with_restarts.

    None if there is no such choice.
    """
    name = OTHER_CHOICES.get(got.lower())
    if name in choices:
        return name
    for choice in choices:
        if got.lower().startswith(choice.lower()):
            return choice
    return None


def _validator_message(message: str, got: Any) -> str:
    """Return the message of a validator of the API; `must be one of a, b` gains a did-you-mean."""
    prefix = "must be one of "
    if message.startswith(prefix):
        return _choice_expected(message.removeprefix(prefix).split(", "), got)
    return f"{message} (got {quoted(got)})"
