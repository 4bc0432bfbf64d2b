"""A rule of the spec itself is forgiven if an edit leaves the fields as they are that the rule names."""

import re

import pytest

from finetune_operator.crd.generate import spec_schema
from finetune_operator.crd.ratchet import with_ratchets

RULES = "x-kubernetes-validations"


def ratcheted(cel: str) -> str:
    """Return the condition, in CEL, under which a broken rule is forgiven."""
    [rule] = with_ratchets({RULES: [{"rule": cel, "message": "no"}]})[RULES]
    assert rule["optionalOldSelf"]
    return rule["rule"].removeprefix(f"({cel}) || ")


@pytest.mark.parametrize(
    ("cel", "expected"),
    [
        ("self.a == 1", "[self.?a] == [oldSelf.?a]"),
        ("!has(self.a) || self.a > 1", "[self.?a] == [oldSelf.?a]"),
        ("!has(self.a)", "self.?a.hasValue() == oldSelf.?a.hasValue()"),
        (
            "!has(self.a) || has(self.a.b)",
            "self.?a.hasValue() == oldSelf.?a.hasValue() && self.?a.?b.hasValue() == oldSelf.?a.?b.hasValue()",
        ),
        # An edit that adds a, without its b, is no edit that leaves the fields as they are.
        (
            "!has(self.a) || self.a.b != 1",
            "[self.?a.?b] == [oldSelf.?a.?b] && self.?a.hasValue() == oldSelf.?a.hasValue()",
        ),
        ("self.?a.?b.orValue('') == 'x'", "[self.?a.?b] == [oldSelf.?a.?b]"),
        ("self.a.all(one, one.b == 1)", "[self.?a] == [oldSelf.?a]"),
        (
            "self.b.c.matches('^x$') || has(self.a)",
            "[self.?b.?c] == [oldSelf.?b.?c] && self.?a.hasValue() == oldSelf.?a.hasValue()",
        ),
    ],
)
def test_broken_rule_compares_the_fields_that_it_names(cel, expected):
    assert ratcheted(cel) == f"(oldSelf.hasValue() && {expected})"


def test_each_rule_of_the_spec_forgives_what_stays():
    for rule in spec_schema()[RULES]:
        assert rule["optionalOldSelf"], rule["message"]
        assert re.search(r"oldSelf\.(\?|value)", rule["rule"]), rule["message"]
