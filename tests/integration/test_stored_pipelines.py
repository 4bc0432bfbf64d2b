"""A new version of the operator beside 500 pipelines of earlier versions on an API server: nothing starts or stops."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.operator.stored_objects import changes
from support.operator.stored_pipelines import (
    BARE,
    Object,
    StoredPipeline,
    store,
    stored_pipelines,
)
from support.operator.upgrades import (
    Write,
    definition,
    install,
    pipelines_of,
    run_until_settled,
    with_api,
    without_schema_rules,
    writes_of,
)

from e2e.pipelines import next_version
from finetune_operator.api.status import PipelineStatus
from finetune_operator.crd.structural import without_defaults
from testcluster import fixtures
from testcluster.kube_namespace import temporary_namespace

COUNT = 500
TEAM = "stored-team"
OWN = "stored-operator"
UNRESTRICTED = {"pod-security.kubernetes.io/enforce": "privileged"}
pytestmark = pytest.mark.skipif(
    fixtures.PROVIDER == "kind", reason="the provider kind has no audit log"
)


@dataclass(frozen=True)
class Upgrade:
    """What a new version of the operator has done to the stored pipelines."""

    stored: list[StoredPipeline]
    before: dict[str, Object]
    after: dict[str, Object]
    """The pipelines by name, as the API server has them before and after the new version ran."""
    writes: list[Write]
    """What the operator has written meanwhile."""


@pytest.fixture(scope="module")
def upgrade(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Upgrade]:
    """The next version, with other results and another default, beside pipelines of this and an earlier version."""
    checkout = tmp_path_factory.mktemp("next")
    next_version.write(checkout, *next_version.REPLACED)
    stored = list(stored_pipelines(COUNT))
    with fixtures.cluster("stored", "none", control_plane=BARE) as cluster:
        kube = cluster.kube
        with (
            temporary_namespace(kube, OWN) as own,
            temporary_namespace(kube, TEAM, UNRESTRICTED),
        ):
            install(kube, without_defaults_of_the_spec(definition(checkout)))
            with_api(cluster, lambda api: store(api, TEAM, stored))
            install(kube, without_schema_rules(definition(checkout)))
            before = pipelines_of(cluster, TEAM)
            folder: Path = tmp_path_factory.mktemp("operator")
            run_until_settled(cluster, TEAM, own, folder, checkout)
            after = pipelines_of(cluster, TEAM)
        yield Upgrade(stored, before, after, writes_of(cluster, OWN))


def without_defaults_of_the_spec(crd: Object) -> Object:
    """Return the CRD without defaults and rules of the spec: the API server then stores a spec as it is sent."""
    changed = without_schema_rules(crd)
    parts = changed["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    parts["spec"] = without_defaults(parts["spec"])
    return changed


def test_corpus_has_all_states_of_two_results_versions(upgrade: Upgrade) -> None:
    phases = Counter(item["status"]["phase"] for item in upgrade.before.values())
    versions = {
        stage.get("resultsVersion")
        for item in upgrade.before.values()
        for stage in item["status"]["stages"]
    }
    assert len(upgrade.before) == COUNT
    assert {"Succeeded", "Running", "Suspended", "Failed", "Cancelled"} <= set(phases)
    assert len(versions) >= 2
    rates = {learning_rate(item) for item in upgrade.before.values()}
    assert rates >= {2e-4, 1e-4}, "no pipeline reads a default that has changed"


def learning_rate(pipeline: Object) -> float:
    rate: float = pipeline["spec"]["train"]["optimizer"]["learningRate"]
    return rate


def test_upgrade_writes_each_status_once_and_nothing_else(upgrade: Upgrade) -> None:
    assert Counter(upgrade.writes) == {
        ("update", "finetunepipelines/status", name): 1 for name in upgrade.before
    }


def test_upgrade_records_its_version_and_changes_no_status(upgrade: Upgrade) -> None:
    changed = {}
    for pipeline in upgrade.stored:
        before = upgrade.before[pipeline.name]
        after = upgrade.after[pipeline.name]
        assert before["spec"] == after["spec"]
        statuses = [
            PipelineStatus.model_validate(item["status"]) for item in (before, after)
        ]
        difference = changes(pipeline.entry, *statuses)
        if difference:
            changed[pipeline.name] = difference
    assert changed == {}
