"""The commit of the manifest reaches the stages, unless the shell or the manifest names another."""

import json
import subprocess

import pytest
from support.cli.workspace import CliWorkspace

VARIABLE = "FINETUNE_GIT_SHA"


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A workspace in a git repository with one commit."""
    monkeypatch.delenv(VARIABLE, raising=False)
    workspace = CliWorkspace(tmp_path)
    git(tmp_path, "init", "-q")
    author = ("-c", "user.name=a", "-c", "user.email=a@b.test")
    git(tmp_path, *author, "commit", "-q", "--allow-empty", "-m", "begin")
    return workspace


def git(folder, *arguments):
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(
        command, check=True, capture_output=True, text=True
    ).stdout.strip()


def variable_of_prepare(workspace):
    """Run prepare and return the variable that its job file sets, None if the stage inherits it."""
    result = workspace.finetune("run", "--until", "prepare")
    assert result.returncode == 0, result.stderr
    [job] = (workspace.run_folder / "jobs").glob("*/job.json")
    return json.loads(job.read_text())["env"].get(VARIABLE)


def test_stages_get_the_commit_of_the_manifest(repository):
    assert variable_of_prepare(repository) == git(
        repository.folder, "rev-parse", "HEAD"
    )


def test_commit_in_the_manifest_takes_precedence(repository):
    repository.set_env("prepare", **{VARIABLE: "chosen"})
    assert variable_of_prepare(repository) == "chosen"


def test_commit_in_the_shell_takes_precedence(repository, monkeypatch):
    monkeypatch.setenv(VARIABLE, "from-the-shell")
    assert variable_of_prepare(repository) is None
