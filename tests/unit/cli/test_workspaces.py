"""`finetune workspaces`: what lies in the workspaces of runs and on claims, what uses it, and what goes."""

import fcntl
import json
import os
from pathlib import Path

import pytest
from support.operator.scenario import ALL_STAGES, Scenario, merged

from finetune_cli.__main__ import main
from finetune_operator.api.spec import PipelineSpec
from finetune_operator.core.pipeline import Key
from finetune_operator.local.pipeline_file import PipelineFile

RUN = Path(".finetune/demo")
WORKSPACE = RUN / "volumes/workspace"


@pytest.fixture
def finished(tmp_path, monkeypatch):
    """A finished run in an empty folder; its status."""
    monkeypatch.chdir(tmp_path)
    return record(RUN)


def record(folder, workspace=None):
    """Store a finished run; return its status."""
    spec = PipelineSpec.model_validate(
        merged(ALL_STAGES, {"workspace": workspace or {}})
    )
    status = Scenario(spec).finish().status
    file = PipelineFile(folder)
    file.write_status(file.apply(Key("default", folder.name), spec, {}), status)
    return status


def add(stage, identity, *, size=2048, finished=True, age=0, workspace=WORKSPACE):
    """Add the folder of a result, last used at this age in seconds."""
    folder = workspace / stage / identity
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(b"x" * size)
    if finished:
        (folder / "result.json").write_text("")
    time = folder.stat().st_mtime - age
    os.utime(folder, (time, time))
    return folder


def identity_of(number):
    return f"{number:016x}"


def uses(capsys, *arguments):
    """Return the use of each listed folder."""
    assert main(["workspaces", "--json", *arguments]) == 0
    listed = json.loads(capsys.readouterr().out)
    return {folder["folder"]: folder["use"] for folder in listed}


def test_results_are_listed_with_size_age_and_use(finished, capsys):
    used = finished.stages["train"].identity
    add("train", used)
    add("train", identity_of(1), age=7200, size=3 << 20)
    add("train", identity_of(2), age=60)
    (WORKSPACE / "downloads").mkdir()
    assert main(["workspaces"]) == 0
    heading, *rows = [
        line.split(maxsplit=5) for line in capsys.readouterr().out.splitlines()
    ]
    assert heading == ["RUN", "FOLDER", "SIZE", "AGE", "USE"]
    assert sorted(rows[:3]) == [
        ["demo", f"train/{identity_of(1)}", "3.1", "MB", "2h", "unused, can go"],
        ["demo", f"train/{identity_of(2)}", "2.0", "kB", "1m", "unused, stays"],
        ["demo", f"train/{used}", "2.0", "kB", "0s", "in use"],
    ]
    assert rows[3][1] == "downloads"
    assert " ".join(rows[-1]).endswith("finetune workspaces demo --prune")
    assert len(list(WORKSPACE.glob("train/*"))) == 3


def test_prune_deletes_what_can_go_and_nothing_else(finished, capsys):
    used = add("train", finished.stages["train"].identity)
    add("train", identity_of(1), age=7200)
    newest = add("train", identity_of(2), age=60)
    unfinished = add("train", identity_of(3), age=9000, finished=False)
    (WORKSPACE / "downloads").mkdir()
    assert main(["workspaces", "demo", "--prune"]) == 0
    assert capsys.readouterr().out == "demo: deleted 1 unused results, 2.0 kB\n"
    assert set(WORKSPACE.glob("train/*")) == {used, newest, unfinished}
    assert main(["workspaces", "demo", "--prune", "--keep", "0"]) == 0
    assert set(WORKSPACE.glob("train/*")) == {used}
    assert (WORKSPACE / "downloads").is_dir()


def test_run_that_is_worked_on_is_listed_and_not_pruned(finished, capsys):
    add("train", identity_of(1))
    with (RUN / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert uses(capsys, "--keep", "0") == {
            f"train/{identity_of(1)}": "unused, can go"
        }
        assert main(["workspaces", "--prune", "--keep", "0"]) == 0
    assert "works on it, so nothing was deleted" in capsys.readouterr().out
    assert (WORKSPACE / "train" / identity_of(1)).is_dir()


def test_shared_folder_keeps_results_of_other_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    record(RUN, {"existingClaim": "shared"})
    stored = PipelineFile(RUN).read()
    assert stored
    (tmp_path / "shared").mkdir()
    (RUN / "claims").mkdir()
    (RUN / "claims/shared").symlink_to(tmp_path / "shared")
    own = add("train", identity_of(1), workspace=tmp_path / "shared")
    foreign = add("train", identity_of(2), workspace=tmp_path / "shared")
    for folder, user in ((own, stored.uid), (foreign, "another")):
        (folder / ".pipelines").mkdir()
        (folder / ".pipelines" / user).touch()
    assert uses(capsys, "--keep", "0") == {
        f"train/{identity_of(1)}": "unused, can go",
        f"train/{identity_of(2)}": "another pipeline may use it",
    }
    assert main(["workspaces", "--prune", "--keep", "0"]) == 0
    assert set((tmp_path / "shared/train").iterdir()) == {foreign}


def test_run_that_cannot_be_read_is_left_alone(finished, capsys):
    result = add("train", identity_of(1))
    (RUN / "pipeline.json").write_text("{")
    assert main(["workspaces", "--prune", "--keep", "0"]) == 0
    assert "its workspace is left alone" in capsys.readouterr().out
    assert result.is_dir()


def a_claim(name, *, owner=None, managed=True, namespace="team", pipeline=""):
    meta = {
        "name": name,
        "namespace": namespace,
        "creationTimestamp": "2026-01-01T00:00:00Z",
    }
    if managed:
        meta["labels"] = {"app.kubernetes.io/managed-by": "finetune-operator"}
        meta["annotations"] = {"finetune.dev/workspace-of": pipeline}
    if owner:
        meta["ownerReferences"] = [{"kind": "FineTunePipeline", "uid": owner}]
    return {
        "metadata": meta,
        "spec": {"resources": {"requests": {"storage": "50Gi"}}},
        "status": {"capacity": {"storage": "60Gi"}},
    }


def test_claims_are_listed_with_owner_and_users(cli, scenario):
    cli.api.claims = [
        a_claim("demo-workspace", owner="uid", pipeline="demo"),
        a_claim("gone-workspace", pipeline="gone"),
        a_claim("models", managed=False),
    ]
    result = cli.run("workspaces", "-n", "team")
    assert result.code == 0, result.err
    lines = [line.split() for line in result.out.splitlines()]
    heading = "NAMESPACE CLAIM SIZE AGE WHENDELETED PIPELINE USED BY"
    assert lines[0] == heading.split()
    demo, gone = lines[1:3]
    assert demo[:3] == ["team", "demo-workspace", "60Gi"]
    assert demo[4:8] == ["Delete", "demo", "pipeline", "demo"]
    assert gone[4:] == ["Retain", "gone", "nothing"]
    # A claim that is no workspace is not listed, even if a pipeline reads from it.
    assert "models" not in result.out.replace("pvc://models", "")
    assert lines[-1] == ["kubectl", "delete", "pvc", "-n", "team", "gone-workspace"]
    assert not [
        request for request in cli.api.requests if not request.startswith("GET")
    ]


def test_claim_that_is_read_or_mounted_is_not_proposed(cli, scenario):
    """A pipeline may read the results of a deleted pipeline by their path."""
    cli.api.claims = [a_claim("models", pipeline="gone")]
    result = cli.run("workspaces", "-n", "team")
    assert "pipeline demo" in result.out
    assert "kubectl" not in result.out


def test_claims_of_one_pipeline_and_of_all_namespaces(cli, scenario):
    cli.api.claims = [
        a_claim("demo-workspace", pipeline="demo"),
        a_claim("gone-workspace", pipeline="gone"),
        a_claim("far-workspace", pipeline="far", namespace="other"),
    ]
    everywhere = cli.run("workspaces", "-A", "--json")
    names = [claim["name"] for claim in json.loads(everywhere.out)]
    assert names == ["demo-workspace", "gone-workspace", "far-workspace"]
    alone = cli.run("workspaces", "gone", "-n", "team", "--context", "here")
    assert "demo-workspace" not in alone.out
    assert "kubectl --context here delete pvc -n team gone-workspace" in alone.out


def test_nothing_is_deleted_on_a_cluster(cli, scenario):
    result = cli.run("workspaces", "-n", "team", "--prune")
    assert result.code == 2
    assert "--prune and --keep work on this machine only" in result.err
