"""An API server refuses a field without an effect, unless the stored object has had it before the rule."""

import json
from collections.abc import Iterator

import pytest
from support.operator.crd_rules import delete_policies
from support.operator.ignored_fields import IGNORED, USED, spec_with
from support.operator.operator_process import GROUP
from support.operator.scenario import merged

from finetune_operator.crd import generate
from testcluster.errors import TimedOut
from testcluster.kube_namespace import KubeNamespace, temporary_namespace, until
from testcluster.provider import Provider

OLD_WORKSPACE = {
    "size": "50Gi",
    "accessMode": "ReadWriteOnce",
    "whenDeleted": "Retain",
}
"""What API servers have stored in each workspace."""


@pytest.fixture(scope="module")
def namespace(control_plane: Provider, rules: list[dict]) -> Iterator[KubeNamespace]:
    """A namespace with pipelines from before the rules, on an API server that checks them now."""
    kube = control_plane.kube
    delete_policies(kube)
    kube.apply([generate.definition(rules=False)])
    until(lambda: "finetunepipelines" in kube.run("api-resources", GROUP), 30)
    with temporary_namespace(kube, f"ignored-in-{len(rules)}-objects") as created:
        until(lambda: not refuses(created), 30)
        plain = pipeline("plain", spec_with({"workspace": OLD_WORKSPACE}))
        apply(created, [*old_pipelines({}).values(), plain])
        kube.apply(rules)
        until(lambda: refuses(created), 30)
        yield created
    delete_policies(kube)


def pipeline(name: str, spec: dict) -> dict:
    """Return a manifest."""
    return {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTunePipeline",
        "metadata": {"name": name},
        "spec": spec,
    }


def old_pipelines(changes: dict) -> dict[str, dict]:
    """Return a manifest with each field without an effect, and with more fields, by its name."""
    return {
        f"old-{number}": pipeline(f"old-{number}", spec_with(merged(fields, changes)))
        for number, (fields, _) in enumerate(IGNORED.values())
    }


def apply(namespace: KubeNamespace, manifests: list[dict]) -> None:
    """Apply all manifests at once. Raises TimedOut if the API server refuses one of them."""
    content = {"apiVersion": "v1", "kind": "List", "items": manifests}
    namespace.run("apply", "--server-side", "-f", "-", given=json.dumps(content))


def refuses(namespace: KubeNamespace) -> bool:
    """Return whether the API server checks the rules: it reads a policy some time after its creation."""
    return bool(refusal(namespace, spec_with(IGNORED["push.dtype"][0])))


def refusal(namespace: KubeNamespace, spec: dict) -> str:
    """Return the error of the API server about a new pipeline; empty if it accepts the pipeline."""
    text = json.dumps(pipeline("probe", spec))
    try:
        namespace.run("create", "--dry-run=server", "-f", "-", given=text)
    except TimedOut as error:
        return str(error)
    return ""


def edit(namespace: KubeNamespace, name: str, spec: dict) -> None:
    patch = json.dumps({"spec": spec})
    namespace.run("patch", "ft", name, "--type=merge", "-p", patch)


def test_field_without_effect_is_refused_by_its_path(namespace: KubeNamespace):
    for path, (fields, fix) in IGNORED.items():
        error = refusal(namespace, spec_with(fields))
        assert fix in error, path
        assert path.rpartition(".")[2] in error


def test_field_with_an_effect_is_accepted(namespace: KubeNamespace):
    accepted = [
        pipeline(f"used-{number}", spec_with(fields))
        for number, fields in enumerate(USED.values())
    ]
    apply(namespace, accepted)
    assert namespace.get("ft", "used-0")["spec"]["workspace"]["size"] == "10Gi"


def test_pipeline_from_before_the_rule_is_edited_elsewhere(namespace: KubeNamespace):
    """Also beside the field, in the object of the rule."""
    more = {"suspend": True, "train": {"maxFailures": 7}}
    edited = old_pipelines(more)
    for (path, _), manifest in zip(IGNORED.items(), edited.values(), strict=True):
        stage = path.partition(".")[0]
        if stage in {"evaluate", "push"}:
            manifest["spec"][stage]["maxFailures"] = 7
    apply(namespace, [*edited.values()])
    for name in edited:
        spec = namespace.get("ft", name)["spec"]
        assert spec["suspend"] is True
        assert spec["train"]["maxFailures"] == 7


def test_stored_default_does_not_keep_a_claim_out(namespace: KubeNamespace):
    edit(namespace, "plain", {"workspace": {"existingClaim": "shared"}})
    stored = namespace.get("ft", "plain")["spec"]["workspace"]
    assert stored == {**OLD_WORKSPACE, "existingClaim": "shared"}
    with pytest.raises(TimedOut, match="size: has no effect beside existingClaim"):
        edit(namespace, "plain", {"workspace": {"size": "10Gi"}})


def test_new_pipeline_stores_no_default_of_the_workspace(namespace: KubeNamespace):
    namespace.create(pipeline("new", spec_with({"workspace": {"existingClaim": "a"}})))
    assert namespace.get("ft", "new")["spec"]["workspace"] == {"existingClaim": "a"}
    error = refusal(
        namespace, spec_with({"workspace": {"existingClaim": "a", "size": "50Gi"}})
    )
    assert "size: has no effect beside existingClaim" in error
