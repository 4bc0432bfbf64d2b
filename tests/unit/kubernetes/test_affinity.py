"""The affinity that keeps pods away from nodes with some labels, together with the user's own."""

import pytest

from finetune_operator.core.job_template import REQUIRED_AFFINITY
from finetune_operator.kubernetes.resources.affinity import affinity_without

LABELS = (("spot", "true"), ("zone", "b"))
EXCLUDED = [
    {"key": "spot", "operator": "NotIn", "values": ["true"]},
    {"key": "zone", "operator": "NotIn", "values": ["b"]},
]
OWN = {"key": "gpu", "operator": "Exists"}


def terms_of(affinity):
    return affinity["nodeAffinity"][REQUIRED_AFFINITY]["nodeSelectorTerms"]


def own(*terms):
    return {"nodeAffinity": {REQUIRED_AFFINITY: {"nodeSelectorTerms": list(terms)}}}


@pytest.mark.parametrize(
    "affinity",
    [{}, {"nodeAffinity": None}, {"nodeAffinity": {REQUIRED_AFFINITY: None}}],
)
def test_labels_are_excluded_without_an_own_requirement(affinity):
    assert terms_of(affinity_without(LABELS, affinity)) == [
        {"matchExpressions": EXCLUDED}
    ]


def test_each_own_term_excludes_the_labels_too():
    """A node must match one of the terms only."""
    fields = [{"key": "metadata.name", "operator": "In", "values": ["a"]}]
    result = terms_of(
        affinity_without(
            LABELS, own({"matchExpressions": [OWN]}, {"matchFields": fields})
        )
    )
    assert result == [
        {"matchExpressions": [OWN, *EXCLUDED]},
        {"matchFields": fields, "matchExpressions": EXCLUDED},
    ]


def test_other_parts_of_the_affinity_stay():
    preferred = [{"weight": 1, "preference": {"matchExpressions": [OWN]}}]
    result = affinity_without(
        LABELS, {"podAntiAffinity": {}, "nodeAffinity": {"preferred": preferred}}
    )
    assert result["podAntiAffinity"] == {}
    assert result["nodeAffinity"]["preferred"] == preferred


@pytest.mark.parametrize(
    "term", [{}, {"matchExpressions": []}, {"matchExpressions": None}]
)
def test_empty_term_still_matches_no_node(term):
    assert terms_of(affinity_without(LABELS, own(term))) == [term]


@pytest.mark.parametrize(
    "affinity",
    [
        {"nodeAffinity": [1]},
        {"nodeAffinity": {REQUIRED_AFFINITY: "x"}},
        {"nodeAffinity": {REQUIRED_AFFINITY: {"nodeSelectorTerms": {"a": 1}}}},
        own("text", {"matchExpressions": {"a": 1}}),
    ],
)
def test_malformed_affinity_stays_for_the_api_server(affinity):
    assert affinity_without(LABELS, affinity) == affinity


def test_affinity_is_unchanged_without_labels():
    assert affinity_without((), own({"matchExpressions": [OWN]})) == own(
        {"matchExpressions": [OWN]}
    )
