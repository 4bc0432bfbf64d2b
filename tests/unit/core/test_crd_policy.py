"""Which rules of the spec stay in the schema if a policy has all of them."""

from collections.abc import Iterator
from typing import Any

from finetune_operator.crd import generate

RULES = "x-kubernetes-validations"


def rules_in(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the rules in a schema."""
    members = value if isinstance(value, list) else []
    if isinstance(value, dict):
        yield from value.get(RULES, ())
        members = list(value.values())
    for member in members:
        yield from rules_in(member)


def test_schema_beside_the_policy_has_the_rules_about_deploy():
    """The subresource scale writes deploy, and no policy about it sees the pipeline."""
    version = generate.definition(rules=False)["spec"]["versions"][0]
    kept = [rule["message"].partition(":")[0] for rule in rules_in(version["schema"])]
    assert kept == ["deploy", "deploy.when", "whenExpired"]
