"""What SECURITY.md and the guide say of the operator's rights is what the chart grants."""

import re
from pathlib import Path

from support.operator.charts import CLUSTER_WIDE, grants, of_kind, render

from e2e.pipelines.chart import RELEASE

ROOT = Path(__file__).parents[2]
SECURITY = (ROOT / "SECURITY.md").read_text()
GUIDE = (ROOT / "docs" / "guides" / "operate.md").read_text()
WORDS = {
    "finetunepipelines": "pipelines",
    "persistentvolumeclaims": "claims",
    "configmaps": "ConfigMaps `finetune-defaults`",
    "leases": "Leases of the operator",
}
"""Resource -> its name in SECURITY.md, if that is not the resource itself."""
ALL_RIGHTS = {**CLUSTER_WIDE, "nodeLost": {"replaceAfterSeconds": 600}}
"""Values with which the chart grants all rights that the operator can use."""
OF_SOME_NAMESPACES = {"leases"}
"""Resources whose rights differ between namespaces, so that no row of the guide has all of them."""


def rights() -> dict[str, set[str]]:
    """Return the verbs of each resource that the operator's own ClusterRole grants."""
    roles = of_kind(render(ALL_RIGHTS), "ClusterRole")
    own = [role for role in roles if role["metadata"]["name"] == RELEASE]
    verbs: dict[str, set[str]] = {}
    for _, resource, verb in grants(own):
        verbs.setdefault(resource, set()).add(verb)
    return verbs


def rows(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the first table below a heading."""
    _, _, section = page.partition(f"## {heading}\n")
    lines = re.findall(r"^\|(.*)\|$", section.partition("\n## ")[0], re.MULTILINE)
    # After the names of the columns and the line below them.
    return [[cell.strip() for cell in line.split(" | ")] for line in lines[2:]]


def test_guide_lists_the_verbs_of_the_role() -> None:
    written = {}
    for resource, verbs, _ in rows(GUIDE, "Rights"):
        name = resource.partition(" with ")[0].partition(",")[0]
        if name not in OF_SOME_NAMESPACES:
            written[name] = set(verbs.split(", "))
    granted = {
        resource: verbs
        for resource, verbs in rights().items()
        if resource not in OF_SOME_NAMESPACES
    }
    assert written == granted


def test_security_page_lists_each_rule_of_the_policies() -> None:
    policies = of_kind(render(ALL_RIGHTS), "ValidatingAdmissionPolicy")
    messages = [
        validation["message"]
        for policy in policies
        if policy["metadata"]["name"] != "finetunepipelines.finetune.dev"
        for validation in policy["spec"]["validations"]
    ]
    # The rule of the ConfigMap is described above the table.
    rules = {message.partition(":")[0] for message in messages} - {"defaults"}
    # The chart has this rule only with a value for it.
    rules |= {"image"}
    table = rows(SECURITY, "Rules of the admission policies")
    written = {name for names, _ in table for name in re.findall(r"`(\w+)`", names)}
    assert written == rules


def test_security_page_names_all_that_a_leaked_token_reads() -> None:
    sentence = re.search(r"A leaked token can read (.*?)\. The", SECURITY, re.DOTALL)
    assert sentence
    text = " ".join(sentence[1].split()).casefold()
    read = {resource for resource, verbs in rights().items() if "list" in verbs}
    assert {"leases", "configmaps", "pods"} <= read
    for resource in read:
        assert WORDS.get(resource, resource).casefold() in text
