"""Rules of the spec itself let a stored object be edited that has broken them since before they were rules.

The API server forgives a broken rule on a part that an edit leaves as it is. The spec as a whole is never such a part,
so that a rule on it would refuse every edit. It is forgiven if the edit leaves the fields as they are that it names.
"""

import re
from collections.abc import Iterator

from finetune_operator.crd.structural import OLD_SELF, RULES, Schema

FIELD = re.compile(r"(has\()?\bself((?:\.\??\w+\b(?!\())+)")
"""A field in a rule: whether only its presence counts, and its path. A name before a parenthesis is a function."""


def with_ratchets(spec: Schema) -> Schema:
    """Return the schema of a spec whose own rules hold for what an edit changes."""
    return spec | {RULES: [_ratcheted(rule) for rule in spec.get(RULES, ())]}


def _ratcheted(rule: Schema) -> Schema:
    # Such a rule names the object before itself.
    if rule.get(OLD_SELF):
        return rule
    cel = rule["rule"]
    unchanged = " && ".join(["oldSelf.hasValue()", *_comparisons(cel)])
    return rule | {"rule": f"({cel}) || ({unchanged})", OLD_SELF: True}


def _comparisons(cel: str) -> Iterator[str]:
    """Yield the conditions, in CEL, under which the fields of a rule are as they were before."""
    values, presences = _fields(cel)
    for path in sorted(values):
        # The API server bounds the cost of comparing lists of one element, but not of comparing optional values.
        field = path.replace(".", ".?")
        yield f"[self{field}] == [oldSelf{field}]"
    for path in sorted(presences):
        field = path.replace(".", ".?")
        yield f"self{field}.hasValue() == oldSelf{field}.hasValue()"


def _fields(cel: str) -> tuple[set[str], set[str]]:
    """Return the paths of the fields whose values a rule names, and the paths whose presence alone it names."""
    values: set[str] = set()
    presences: set[str] = set()
    for presence, path in FIELD.findall(cel):
        chosen = presences if presence else values
        chosen.add(path.replace("?", ""))
    # Of an object whose fields are named, only the presence counts: an edit may add it without these fields.
    named = values | presences
    outer = {path for path in named if any(_is_within(other, path) for other in named)}
    compared = values - outer
    return compared, (presences | outer) - compared


def _is_within(path: str, outer: str) -> bool:
    return path.startswith(f"{outer}.")
