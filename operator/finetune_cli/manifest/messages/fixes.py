"""The fix for a value of a wrong type: what to write in its place."""

import re
from collections.abc import Callable
from typing import Any, get_args

from pydantic_core import ErrorDetails

from finetune_cli.manifest.annotations import is_model, required_keys, unwrap_optional
from finetune_cli.manifest.messages.forms import UNKNOWN, form_of
from finetune_cli.manifest.messages.quantities import kubernetes_forms
from finetune_operator.api.group import API_VERSION, KIND
from finetune_operator.api.names import DNS_LABEL, DNS_SUBDOMAIN
from finetune_operator.api.stages.pod import BYTES
from finetune_trainer.contract.uris import FORMS

HEAD = {"apiVersion": API_VERSION, "kind": KIND}
"""The first keys of a manifest, with their only value."""
NO_VALUE = frozenset({"none", "null", "nil", "~", "default", "auto"})
"""Texts that mean no value; of some fields, Auto is a value."""
NO_FORM = frozenset({UNKNOWN, f"[{UNKNOWN}]", f"{{{UNKNOWN}: {UNKNOWN}}}"})
"""Forms without a name and a value: they show nothing that the message does not say."""
DEFAULT = "remove the key to have the default"
TRUE = frozenset({"true", "yes", "on", "1"})
FALSE = frozenset({"false", "no", "off", "0"})
PERCENTS = 100
SHARES = ("fraction", "dropout", "smoothing")
"""Ends of the keys whose values people write in percent."""
DURATION = re.compile(r"(\d+\s*(s|sec|m|min|h|hours?|d|days?)\s*)+", re.IGNORECASE)
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
FRACTIONS: dict[re.Pattern[str], Callable[[str], str]] = {
    re.compile(r"\d+(\.\d+)?\s*%"): lambda text: (
        f"write {float(text.rstrip('% ')) / PERCENTS:g}"
    ),
    # A comma before three digits may separate thousands, unless a 0 stands before it.
    re.compile(r"\d+,\d{1,2}|0,\d+"): lambda text: f"write {text.replace(',', '.')}",
}
"""Forms of a fraction -> the fix."""
INTEGERS: dict[re.Pattern[str], Callable[[str], str]] = {
    re.compile(r"\$.*"): lambda _: "variables are not replaced: write the number",
    # Signs between groups of digits.
    re.compile(r"\d{1,3}([,_ ']\d{3})+"): lambda text: (
        f"write {re.sub('[^0-9]', '', text)}"
    ),
    re.compile(r"\d+(\.\d+)?\s*[A-Za-z]+"): lambda _: (
        "write the number alone, with all its digits"
    ),
}
"""Forms of a number -> the fix."""
SLICE = re.compile(r"\[.*")
"""The part of a split in the library `datasets`."""
FIRST_PERCENTS = re.compile(r"[^\[+]*\[(\d{1,2})?%?:(\d{1,3})%\]")
"""A part of a split in percent, such as train[:10%]."""
WEB_PAGE = re.compile(
    r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/((?:datasets/)?[\w.-]+/[\w.-]+)"
)
"""The page of a repository on the hub."""
HUB_KIND = re.compile(r"hf://(?:datasets|models|spaces)/(?=[^/]+/)")
"""The beginning of a URI of huggingface_hub's file system, before ORG/NAME."""


def fix_of(error: ErrorDetails, annotation: Any) -> str:
    """Return what to write in place of the value; empty if only the user can know."""
    find = _FIXES.get(error["type"])
    if find is None:
        return ""
    return find(error, annotation)


def _number(error: ErrorDetails, _: Any) -> str:
    got = error["input"]
    if isinstance(got, list):
        return "one pipeline has one value: write a manifest for each"
    if isinstance(got, float) and got.is_integer():
        return f"write {got:.0f}"
    if not isinstance(got, str):
        return "write a number" if isinstance(got, bool | dict) else ""
    text = got.strip()
    if _is_number(text):
        return f"remove the quotes: {text}"
    if text.lower() in NO_VALUE:
        return DEFAULT
    return _number_in(text, error)


def _number_in(text: str, error: ErrorDetails) -> str:
    key = str(error["loc"][-1])
    if "Seconds" in key and DURATION.fullmatch(text):
        parts = re.findall(r"(\d+)\s*([a-z])", text.lower())
        seconds = [int(count) * SECONDS[unit] for count, unit in parts]
        return f"write {sum(seconds)}"
    patterns = INTEGERS
    if error["type"] == "float_type":
        # Fractions first: 0,125 also has the form of an integer with groups of digits.
        patterns = {**FRACTIONS, **INTEGERS}
    for pattern, fix in patterns.items():
        if pattern.fullmatch(text):
            return fix(text)
    return "write it in digits"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    # Python also reads nan and infinity, which no number of a manifest may be.
    return text[-1:].isdigit() or text.endswith(".")


def _bool(error: ErrorDetails, _: Any) -> str:
    text = str(error["input"]).strip().lower()
    if text in TRUE:
        return "write true, without quotes"
    if text in FALSE:
        return "write false, without quotes"
    if text in NO_VALUE:
        return DEFAULT
    return ""


def _mapping(error: ErrorDetails, annotation: Any) -> str:
    got = error["input"]
    # As in deploy: false. Without its key, deploy is left out.
    if got is False or str(got).lower() in NO_VALUE:
        return "remove the key"
    # A - too many makes a mapping the only entry of a list.
    match got:
        case [dict()]:
            return "remove the - before its first key"
        case _:
            return _form(error, annotation)


def _form(error: ErrorDetails, annotation: Any) -> str:
    if annotation is None:
        return ""
    form = form_of(annotation, error["input"])
    if form in NO_FORM:
        return ""
    return f"write {_with_key(error, form)}"


def _with_key(error: ErrorDetails, form: str) -> str:
    key = error["loc"][-1]
    if isinstance(key, int):
        return form
    return f"{key}: {form}"


def _entries(error: ErrorDetails, annotation: Any) -> str:
    # An empty list: the form of one entry.
    if error["input"] or annotation is None:
        return ""
    entry = unwrap_optional(get_args(unwrap_optional(annotation))[0])
    if not is_model(entry) or not required_keys(entry):
        return ""
    return f"write {_with_key(error, f'[{form_of(entry, None)}]')}"


def _missing(error: ErrorDetails, annotation: Any) -> str:
    key = error["loc"][-1]
    if error["loc"] == (key,) and key in HEAD:
        return f"add {key}: {HEAD[key]}"
    return f"add {_with_key(error, form_of(annotation, None))}"


def _pattern(error: ErrorDetails, _: Any) -> str:
    pattern = error["ctx"]["pattern"]
    got = str(error["input"])
    if error["loc"][-1] == "split":
        return _split_fix(got, is_data_set="datasets" in error["loc"])
    # A source may be on the hub, so its pattern contains the hub's. Targets have patterns of their own.
    if FORMS["hf"][0] in pattern or FORMS["hf-file"][0] in pattern:
        return _uri_fix(got, pattern)
    # The patterns of quantities, and no other pattern, end in the prefixes.
    if "Ei" in pattern:
        return _quantity_fix(got, pattern)
    if pattern in {DNS_LABEL, DNS_SUBDOMAIN}:
        name = re.sub(r"[^a-z0-9]+", "-", got.lower()).strip("-")
        return f"write {name}" if name else ""
    return ""


def _split_fix(got: str, *, is_data_set: bool) -> str:
    """Return the fix for the syntax of the library `datasets`: a part of a split, or several splits."""
    parts = got.split("+")
    names = [SLICE.sub("", part).strip() for part in parts]
    if len(names) > 1:
        if not is_data_set:
            return f"write {names[0]}: validation has a single split"
        entries = ", ".join(f"split: {name}" for name in names)
        return f"add a data set for each: {entries}"
    share = FIRST_PERCENTS.fullmatch(got)
    if share and is_data_set:
        begin = int(share[1] or 0)
        weight = (int(share[2]) - begin) / PERCENTS
        if 0 < weight < 1:
            return f"write split: {names[0]} and weight: {weight:g}, for a random sample of that size"
    if "[" in got:
        part = ", and weight for a random sample" if is_data_set else ""
        return f"write {names[0]}{part}: a part of a split is not read"
    return ""


def _uri_fix(got: str, pattern: str) -> str:
    uri = uri_for(got)
    if re.fullmatch(pattern, uri):
        return f"write {uri}"
    if "$" in got or "{{" in got:
        return "variables are not replaced: write the value"
    if got.startswith("~"):
        return "~ is not replaced: write the whole path, as file:///PATH"
    return ""


def _quantity_fix(got: str, pattern: str) -> str:
    forms = kubernetes_forms(got)
    if forms:
        return f"write {' or '.join(forms)}"
    if pattern == BYTES and got.isdecimal() and int(got) > 0:
        return f"write {got}Gi for gibibytes or {got}G for gigabytes"
    return ""


def uri_for(got: str) -> str:
    """Return the URI that was meant: a page of the hub, or a scheme without its slashes; empty if it is not known."""
    page = WEB_PAGE.match(got)
    if page:
        return f"hf://{page[1].removeprefix('datasets/')}"
    if got.startswith("/"):
        return f"file://{got}"
    kind = HUB_KIND.match(got)
    if kind:
        return f"hf://{got[kind.end() :]}"
    return _with_slashes(got)


def _with_slashes(got: str) -> str:
    """Return the URI of a scheme without its slashes, or with three of them."""
    scheme, _, path = got.partition(":")
    has_slashes = re.match("//[^/]", path)
    if scheme == "file" and not path.startswith("/"):
        # Without ./ it might be the name of a repository on the hub.
        return f"./{path.removeprefix('./')}"
    if path.startswith("///") and "/" not in path.lstrip("/"):
        # Without its bucket: the rest is a path, and no bucket.
        return ""
    if scheme in FORMS and not has_slashes:
        return f"{scheme}://{path.lstrip('/')}"
    return ""


def _fraction(error: ErrorDetails, _: Any) -> str:
    """Return the fraction for a number that was meant in percent."""
    context = error["ctx"]
    limit = float(context.get("le", context.get("lt", 0)))
    got = error["input"]
    key = str(error["loc"][-1])
    if not key.lower().endswith(SHARES):
        return ""
    # 1 is the whole, and no percent.
    if not isinstance(got, int | float) or got <= 1:
        return ""
    fraction = got / PERCENTS
    if fraction > limit:
        return ""
    return f"for {got:g} % write {fraction:g}"


def _time(_error: ErrorDetails, _: Any) -> str:
    return "write it as 2030-12-31T18:00:00Z"


_FIXES: dict[str, Callable[[ErrorDetails, Any], str]] = {
    "int_type": _number,
    "int_from_float": _number,
    "float_type": _number,
    "bool_type": _bool,
    "model_type": _mapping,
    "dict_type": _mapping,
    "tuple_type": _form,
    "list_type": _form,
    "too_short": _entries,
    "missing": _missing,
    # Only upper limits: a number in percent is too large for a fraction.
    "less_than_equal": _fraction,
    "less_than": _fraction,
    "string_pattern_mismatch": _pattern,
    "datetime_from_date_parsing": _time,
    "datetime_parsing": _time,
    "datetime_type": _time,
    "timezone_aware": _time,
}
"""Pydantic's type of an error -> the fix."""
