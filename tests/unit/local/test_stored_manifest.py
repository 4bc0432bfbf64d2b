"""`finetune run` in the work folder of another manifest or of another version."""

import json
from pathlib import Path

import pytest
from support.cli.workspace import STAGES, CliWorkspace


@pytest.fixture
def workspace(tmp_path: Path) -> CliWorkspace:
    return CliWorkspace(tmp_path)


@pytest.mark.parametrize("with_edit", [False, True])
def test_another_version_reruns_only_what_was_edited(
    workspace: CliWorkspace, *, with_edit: bool
) -> None:
    """The version that wrote the work folder had another default, and hashed the values in another way."""
    assert workspace.finetune("run").returncode == 0
    file = workspace.run_folder / "pipeline.json"
    stored = json.loads(file.read_text())
    stored["spec"]["train"]["optimizer"]["beta2"] = 0.95
    stored["status"]["observedVersion"] = "earlier"
    for stage in stored["status"]["stages"]:
        contents = stage["inputs"].partition("-")[2]
        stage["inputs"] = f"0123456789abcdef-{contents}"
    file.write_text(json.dumps(stored))
    starts = [1, 1, 1, 1, 1]
    if with_edit:
        workspace.manifest["spec"]["evaluate"]["tasks"][0]["fewShot"] = 2
        starts = [1, 1, 2, 2, 2]
    planned = json.loads(workspace.finetune("plan", "--json").stdout)["stages"]
    assert [stage["action"] == "run" for stage in planned] == [
        count == 2 for count in starts
    ]
    assert workspace.finetune("run").returncode == 0
    assert [len(workspace.starts(stage)) for stage in STAGES] == starts
    # The same manifest once more: the default of the earlier version stays.
    assert workspace.finetune("run").returncode == 0
    assert [len(workspace.starts(stage)) for stage in STAGES] == starts


def test_field_that_leaves_the_manifest_leaves_the_spec(
    workspace: CliWorkspace,
) -> None:
    workspace.manifest["spec"]["train"]["lora"] = {"rank": 4, "dropout": 0.5}
    assert workspace.finetune("run").returncode == 0
    workspace.manifest["spec"]["train"]["lora"] = {"rank": 4}
    assert workspace.finetune("run").returncode == 0
    stored = json.loads((workspace.run_folder / "pipeline.json").read_text())
    assert stored["spec"]["train"]["lora"]["rank"] == 4
    assert stored["spec"]["train"]["lora"]["dropout"] != 0.5
    assert len(workspace.starts("train")) == 2
