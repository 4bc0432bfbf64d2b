"""Runs on this machine that are looked for from another folder; their records are written here, and no stage runs."""

import os
from pathlib import Path

import pytest
from support.cli.manifest import MINIMAL
from support.operator.scenario import Scenario

from finetune_cli.__main__ import main
from finetune_cli.arguments import workdir_for
from finetune_cli.manifest.manifest import read
from finetune_cli.runs import MANIFEST, remember, run_named, runs_elsewhere
from finetune_operator.core.pipeline import Key
from finetune_operator.local.pipeline_file import PipelineFile


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a manifest that has run there; the current folder is another one, without a kubeconfig."""
    project = tmp_path / "project"
    elsewhere = tmp_path / "elsewhere"
    project.mkdir()
    elsewhere.mkdir()
    (project / "p.yaml").write_text(MINIMAL)
    start(project, "minimal")
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr(
        "kubernetes.aio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION",
        str(tmp_path / "none"),
    )
    return project


def start(folder, name, *, manifest="p.yaml"):
    """Record a run of the manifest in the folder."""
    run = folder / ".finetune" / name
    PipelineFile(run).apply(Key("default", name), Scenario().spec, {})
    (run / MANIFEST).write_text(str(folder / manifest))
    remember(run)
    return run


def test_name_finds_a_run_of_another_folder(project, capsys):
    assert main(["get", "minimal"]) == 0
    assert capsys.readouterr().out.startswith("minimal")
    assert run_named("minimal") == project / ".finetune/minimal"


def test_manifest_finds_its_run_beside_it_without_the_index(project, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
    assert runs_elsewhere() == []
    manifest = read(project / "p.yaml")
    assert workdir_for(manifest, None) == project / ".finetune/minimal"
    assert run_named("minimal") is None


def test_other_manifest_of_the_same_name_is_another_run(project):
    Path("p.yaml").write_text(MINIMAL)
    assert (
        workdir_for(read(Path("p.yaml")), None) == Path(".finetune/minimal").absolute()
    )


def test_run_in_this_folder_comes_first(project):
    start(Path.cwd(), "minimal")
    assert run_named("minimal") == Path(".finetune/minimal")


def test_several_runs_of_a_name_must_be_told_apart(project, tmp_path, capsys):
    (tmp_path / "third").mkdir()
    start(tmp_path / "third", "minimal")
    assert main(["get", "minimal"]) == 2
    error = capsys.readouterr().err
    assert "there are several runs minimal on this machine" in error
    assert f"{project}/.finetune/minimal" in error


def test_run_that_was_removed_is_forgotten(project, tmp_path):
    for file in (project / ".finetune/minimal").iterdir():
        file.unlink()
    assert runs_elsewhere() == []
    start(Path.cwd(), "other")
    index = Path(os.environ["XDG_STATE_HOME"]) / "finetune/runs"
    assert [link.readlink().name for link in index.iterdir()] == ["other"]


def test_unknown_name_is_answered_without_a_kubeconfig(project, capsys):
    for verb in (
        "get",
        "wait",
        "cancel",
        "suspend",
        "stop",
        "resume",
        "delete",
        "logs",
    ):
        assert main([verb, "nothing"]) == 2
        error = capsys.readouterr().err
        assert error == (
            "finetune: no run nothing in ./.finetune; "
            f"runs of this machine: {project}/.finetune/minimal\n"
        )
    start(Path.cwd(), "tickets")
    assert main(["get", "ticket"]) == 2
    assert capsys.readouterr().err == (
        "finetune: no run ticket in ./.finetune; did you mean tickets?\n"
    )


def test_list_names_other_folders_and_refuses_a_missing_one(project, capsys):
    assert main(["list"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == (
        f"runs in other folders: finetune list {project}/.finetune"
    )
    assert main(["list", str(project / ".finetune")]) == 0
    assert f"{project}/.finetune/minimal" in capsys.readouterr().out
    assert main(["list", "nope"]) == 2
    assert "there is no folder nope" in capsys.readouterr().err


def test_home_that_cannot_be_written_stops_no_run(project, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
    start(Path.cwd(), "other")
    assert run_named("other") == Path(".finetune/other")


def test_workdir_must_hold_the_named_run(project, capsys):
    folder = str(project / ".finetune/minimal")
    assert main(["delete", "other", "--workdir", folder, "--yes"]) == 2
    assert "holds the run minimal, not other" in capsys.readouterr().err
