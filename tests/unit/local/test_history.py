"""What was measured of a run stays when its manifest or its data is edited; the stages run `fake_stage.py`."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.cli.workspace import CliWorkspace


@pytest.fixture
def workspace(tmp_path: Path) -> CliWorkspace:
    return CliWorkspace(tmp_path)


def edit_rank(workspace: CliWorkspace, rank: int, **environment: str) -> None:
    workspace.manifest["spec"]["train"]["lora"] = {"rank": rank}
    assert workspace.finetune("run").returncode == 0


def kept(workspace: CliWorkspace) -> list[dict[str, Any]]:
    """Return the records of earlier generations."""
    files = sorted((workspace.run_folder / "history").glob("*.json"))
    return [json.loads(file.read_text()) for file in files]


def history(workspace: CliWorkspace) -> list[str]:
    """Return the lines of `finetune list --history`, without the spaces between columns."""
    result = workspace.finetune_in("list", "--history", "run")
    assert result.returncode == 0, result.stderr
    return [" ".join(line.split()) for line in result.stdout.splitlines()]


def test_edit_keeps_what_was_measured_before(workspace: CliWorkspace) -> None:
    edit_rank(workspace, 4)
    workspace.set_env("evaluate", SCORE="0.7")
    edit_rank(workspace, 8)
    (record,) = kept(workspace)
    assert record["spec"]["train"]["lora"]["rank"] == 4
    (evaluate,) = [
        stage for stage in record["status"]["stages"] if stage["name"] == "evaluate"
    ]
    assert evaluate["result"]["scores"]["task"]["acc"]["value"] == 0.9
    lines = history(workspace)
    assert "acc 0.9" in lines[1]
    assert "acc 0.7" in lines[2]
    assert "train.lora.rank: 4 → 8" in lines
    compared = workspace.finetune_in("compare", "run@1", "run")
    assert "train.lora.rank" in compared.stdout, compared.stderr


def test_same_manifest_again_keeps_no_second_record(workspace: CliWorkspace) -> None:
    edit_rank(workspace, 4)
    edit_rank(workspace, 4)
    assert kept(workspace) == []
    assert workspace.finetune("retry").returncode == 0
    assert kept(workspace) == []


def test_failure_before_training_is_not_worth_keeping(
    workspace: CliWorkspace,
) -> None:
    workspace.set_env("prepare", EXIT_AT="2:65")
    assert workspace.finetune("run").returncode == 1
    workspace.set_env("prepare", EXIT_AT="-1:0", STEPS="9")
    edit_rank(workspace, 4)
    assert kept(workspace) == []


def test_data_edited_in_place_begins_a_generation(workspace: CliWorkspace) -> None:
    data = workspace.folder / "material/data.jsonl"
    data.write_text("{}\n")
    edit_rank(workspace, 4)
    data.write_text("{}\n{}\n")
    assert workspace.finetune("run").returncode == 0
    assert len(kept(workspace)) == 1
    assert len([line for line in history(workspace) if line.startswith("run@")]) == 2


def test_undone_edit_reuses_with_the_attempt_and_its_time(
    workspace: CliWorkspace,
) -> None:
    edit_rank(workspace, 4)
    edit_rank(workspace, 8)
    workspace.manifest["spec"]["train"]["lora"] = {"rank": 4}
    done = workspace.finetune("run")
    assert "train     reused from attempt 1 (" in done.stdout, done.stdout
    assert "prepare   done in" in done.stdout
    shown = workspace.finetune("get").stdout
    assert "this run: " in shown
    # Prepare ran once, every other stage three times, of which two attempts were of rank 4.
    assert "in 9 attempts; with earlier edits" in shown
    assert "in 13 attempts" in shown
    assert len(kept(workspace)) == 2


def test_interrupted_command_keeps_a_generation_once(workspace: CliWorkspace) -> None:
    """It may be killed after it has kept the generation, and before it applies the edit."""
    edit_rank(workspace, 4)
    before = (workspace.run_folder / "pipeline.json").read_bytes()
    edit_rank(workspace, 8)
    (workspace.run_folder / "pipeline.json").write_bytes(before)
    edit_rank(workspace, 8)
    assert len(kept(workspace)) == 1
