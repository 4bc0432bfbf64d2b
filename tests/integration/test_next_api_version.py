"""The way to the next version of the API (ADR 37): both versions are served, the storage moves, and nothing reruns.

The next version is a copy of this checkout that reads and writes v1beta1. The test follows docs/release.md.
"""

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from support.operator.pipeline_objects import pipeline_manifest
from support.operator.scenario import ALL_STAGES
from support.operator.stored_objects import changes
from support.operator.stored_pipelines import (
    BARE,
    Object,
    StoredPipeline,
    store,
    stored_pipelines,
)
from support.operator.upgrades import (
    CRD,
    Write,
    definition,
    install,
    pipelines_of,
    run_until,
    run_until_settled,
    with_api,
    without_schema_rules,
    writes_of,
)

from e2e.pipelines import next_version
from finetune_operator.api.group import VERSION
from finetune_operator.api.status import PipelineStatus
from finetune_operator.crd import generate
from testcluster import fixtures
from testcluster.errors import TimedOut
from testcluster.kube_namespace import KubeNamespace, temporary_namespace, until
from testcluster.provider import ControlPlaneOptions, Provider

ROOT = Path(__file__).parents[2]
NEXT = "v1beta1"
GROUP_FILE = "operator/finetune_operator/api/group.py"
NEXT_API = (
    (GROUP_FILE, f'VERSION = "{VERSION}"\n', f'VERSION = "{NEXT}"\n'),
    (
        GROUP_FILE,
        "OLDER_VERSIONS: tuple[str, ...] = ()\n",
        f'OLDER_VERSIONS: tuple[str, ...] = ("{VERSION}",)\n',
    ),
)
"""What the next version changes: two lines, and the files that are generated from them."""
TEAM = "api-team"
OWN = "api-operator"
UNRESTRICTED = {"pod-security.kubernetes.io/enforce": "privileged"}
COUNT = 45
"""Each pipeline of the corpus once."""
COLLECTED: ControlPlaneOptions = replace(
    BARE,
    flags={
        **BARE.flags,
        "kube-controller-manager": {
            "controllers": "namespace-controller,serviceaccount-controller,garbage-collector-controller"
        },
    },
)
"""The bare API server, and the controller that deletes children with their owner."""
pytestmark = pytest.mark.skipif(
    fixtures.PROVIDER == "kind", reason="the provider kind has no audit log"
)


@dataclass
class Migration:
    """What each step has left, in the order of docs/release.md."""

    cluster: Provider
    team: KubeNamespace
    stored: list[StoredPipeline]
    pipelines: dict[str, dict[str, Object]] = field(default_factory=dict)
    """Step -> the pipelines after it, by name."""
    writes: dict[str, list[Write]] = field(default_factory=dict)
    """Step -> what the operator wrote in it."""
    stored_versions: dict[str, list[str]] = field(default_factory=dict)
    """Step -> the versions in which the API server may have stored objects."""

    def note(self, step: str, version: str) -> None:
        known = sum(map(len, self.writes.values()))
        self.writes[step] = writes_of(self.cluster, OWN, known)
        self.pipelines[step] = pipelines_of(self.cluster, TEAM, version)
        status = self.cluster.kube.json("get", "crd", CRD)["status"]
        self.stored_versions[step] = status["storedVersions"]


@pytest.fixture(scope="module")
def next_checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkout: Path = tmp_path_factory.mktemp("next")
    next_version.write(checkout, *NEXT_API)
    return checkout


@pytest.fixture(scope="module")
def migration(
    next_checkout: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Migration]:
    """Pipelines that were stored as v1alpha1, after all steps to an API server that has v1beta1 only."""
    stored = list(stored_pipelines(COUNT))
    folder: Path = tmp_path_factory.mktemp("operator")
    with fixtures.cluster("api", "none", control_plane=COLLECTED) as cluster:
        kube = cluster.kube
        with (
            temporary_namespace(kube, OWN) as own,
            temporary_namespace(kube, TEAM, UNRESTRICTED) as team,
        ):
            steps = Migration(cluster, team, stored)
            install(kube, without_schema_rules(definition(ROOT)))
            with_api(cluster, lambda api: store(api, TEAM, stored))
            run_until_settled(cluster, TEAM, own, folder, ROOT)
            steps.note("this version", VERSION)
            # The CRD comes first: the operator of this version goes on beside it for a while.
            install(kube, without_schema_rules(definition(next_checkout)))
            run_until(lambda: True, own, folder, ROOT)
            steps.note("next CRD", VERSION)
            run_until_settled(cluster, TEAM, own, folder, next_checkout)
            steps.note("next version", NEXT)
            for command in documented_commands():
                run_documented(team, command)
            steps.note("migrated", NEXT)
            yield steps


def documented_commands() -> list[str]:
    """Return the commands of docs/release.md that move what is stored."""
    page = (ROOT / "docs" / "release.md").read_text()
    [section] = re.findall(
        r"^## A next version of the API\n(.*?)(?=^## |\Z)",
        page,
        re.MULTILINE | re.DOTALL,
    )
    [block] = re.findall(r"^ *```\n(.*?)^ *```", section, re.MULTILINE | re.DOTALL)
    joined = block.replace("\\\n", " ")
    return [line for line in joined.splitlines() if line.strip()]


def run_documented(team: KubeNamespace, line: str) -> None:
    """Run a line of `kubectl` and `sed` commands that a pipe may join."""
    given = ""
    for command in line.replace("NAMESPACE", team.name).split(" | "):
        program, *arguments = shlex.split(command)
        if program == "sed":
            _, old, new, _ = arguments[0].split(",")
            given = given.replace(old, new)
            continue
        assert program == "kubectl"
        given = team.kube.run(*arguments, given=given)


def test_next_crd_alone_changes_nothing(migration: Migration) -> None:
    assert migration.writes["next CRD"] == []
    assert migration.stored_versions["next CRD"] == [VERSION, NEXT]


def test_next_version_writes_each_status_once(migration: Migration) -> None:
    """The write makes the API server store the pipeline as v1beta1."""
    names = migration.pipelines["this version"]
    assert Counter(migration.writes["next version"]) == {
        ("update", "finetunepipelines/status", name): 1 for name in names
    }


def test_next_version_reruns_nothing(migration: Migration) -> None:
    changed = {}
    for pipeline in migration.stored:
        before = migration.pipelines["this version"][pipeline.name]
        after = migration.pipelines["next version"][pipeline.name]
        assert after["apiVersion"] == f"finetune.dev/{NEXT}"
        assert before["spec"] == after["spec"]
        assert before["metadata"]["generation"] == after["metadata"]["generation"]
        statuses = [
            PipelineStatus.model_validate(item["status"]) for item in (before, after)
        ]
        changed[pipeline.name] = changes(pipeline.entry, *statuses)
    assert {name: paths for name, paths in changed.items() if paths} == {}


def test_migration_leaves_the_next_version_alone(migration: Migration) -> None:
    assert migration.stored_versions["migrated"] == [NEXT]
    for name, before in migration.pipelines["next version"].items():
        after = migration.pipelines["migrated"][name]
        for part in ("spec", "status"):
            assert before[part] == after[part]
        assert before["metadata"]["generation"] == after["metadata"]["generation"]


def test_manifest_of_the_earlier_version_stays_valid(
    migration: Migration, next_checkout: Path, tmp_path: Path
) -> None:
    """It is the same object: a GitOps tool may go on with it, or change its apiVersion and nothing else."""
    kube = migration.team
    manifest = pipeline_manifest("both", ALL_STAGES)
    kube.run("apply", "-f", "-", given=json.dumps(manifest))
    created = kube.get(f"finetunepipelines.{NEXT}.finetune.dev", "both")
    newer = {**manifest, "apiVersion": f"finetune.dev/{NEXT}"}
    for modes in ((), ("--server-side", "--force-conflicts")):
        kube.run("apply", *modes, "-f", "-", given=json.dumps(newer))
    applied = kube.get("ft", "both")
    for key in ("uid", "generation"):
        assert created["metadata"][key] == applied["metadata"][key]
    kube.run("delete", "ft", "both")


def test_rules_hold_for_the_earlier_version(migration: Migration) -> None:
    """The policy names the next version only; the API server converts the object for it."""
    kube = migration.cluster.kube
    text = json.dumps(generate.rules_policy())
    kube.apply(json.loads(text.replace(VERSION, NEXT)))
    expires = {"ttlSecondsAfterFinished": 1, "whenExpired": "Delete"}
    broken = json.dumps(pipeline_manifest("broken", {**ALL_STAGES, **expires}))

    def is_refused() -> bool:
        try:
            migration.team.run("create", "--dry-run=server", "-f", "-", given=broken)
        except TimedOut as error:
            return "deploy" in str(error)
        return False

    until(is_refused, 30)


def test_api_server_reads_all_without_the_earlier_version(migration: Migration) -> None:
    """The last step, in a later release: v1alpha1 is no longer in the CRD."""
    kube = migration.cluster.kube
    patch = [{"op": "remove", "path": "/spec/versions/1"}]
    kube.run("patch", "crd", CRD, "--type=json", "-p", json.dumps(patch))
    until(lambda: f"finetune.dev/{VERSION}" not in kube.run("api-versions").split(), 30)
    left = pipelines_of(migration.cluster, TEAM, NEXT)
    for name, pipeline in left.items():
        assert pipeline["status"] == migration.pipelines["migrated"][name]["status"]
    assert len(left) >= COUNT - 1


def test_children_go_with_their_pipeline(migration: Migration) -> None:
    """The garbage collector finds no owner in a version that is not served: the migration has renamed it."""
    team = migration.team
    name = "serving-6"
    assert children_of(migration, name)
    team.run("delete", "ft", name, "--wait=false")
    until(lambda: not children_of(migration, name), 30)


def children_of(migration: Migration, name: str) -> list[str]:
    """Return the Jobs, Deployments and Services that the pipeline owns."""
    items = migration.team.kube.json("-n", TEAM, "get", "jobs,deployments,services")
    return [
        item["metadata"]["name"]
        for item in items["items"]
        for owner in item["metadata"].get("ownerReferences", [])
        if owner["name"] == name
    ]
