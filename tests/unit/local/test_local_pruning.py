"""`finetune run` after edits: the disk does not fill with results of earlier edits."""

from pathlib import Path

import pytest
from support.cli.workspace import CliWorkspace


@pytest.fixture
def workspace(tmp_path: Path) -> CliWorkspace:
    workspace = CliWorkspace(tmp_path)
    for stage in ("prepare", "train", "evaluate"):
        workspace.set_env(stage, STEPS="1")
    for stage in ("push", "deploy"):
        del workspace.manifest["spec"][stage]
    return workspace


def run(workspace: CliWorkspace, rank: int, keep_unused: int | None = None) -> str:
    """Run with this rank; return the identity of the training."""
    workspace.manifest["spec"]["train"]["lora"] = {"rank": rank}
    if keep_unused is not None:
        workspace.manifest["spec"]["workspace"] = {"keepUnused": keep_unused}
    done = workspace.finetune("run")
    assert done.returncode == 0, done.stdout + done.stderr
    identity: str = workspace.status["stages"]["train"]["identity"]
    return identity


def trainings(workspace: CliWorkspace) -> set[str]:
    folder = workspace.run_folder / "volumes/workspace/train"
    return {path.name for path in folder.iterdir()}


def test_edits_leave_the_result_before_and_no_more(workspace: CliWorkspace) -> None:
    first = run(workspace, 4)
    second = run(workspace, 8)
    assert trainings(workspace) == {first, second}
    # Back at once: the result is still there.
    assert run(workspace, 4) == first
    assert sorted(workspace.starts("train")) == ["again", "work", "work"]
    third = run(workspace, 16)
    assert trainings(workspace) == {first, third}
    fourth = run(workspace, 32, keep_unused=0)
    assert trainings(workspace) == {fourth}
    assert len(workspace.starts("prepare")) == 1
