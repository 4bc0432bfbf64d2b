"""`finetune drill` from another process than the `finetune run` whose stage it evicts."""

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.cli.workspace import CliWorkspace

from finetune_operator.local.runner import COMMANDS


@pytest.fixture
def workspace(tmp_path: Path) -> CliWorkspace:
    result = CliWorkspace(tmp_path)
    result.set_env("train", STEPS="900", STEP_SECONDS="0.1", SAVE_EVERY="7")
    return result


def wait_for_step(workspace: CliWorkspace, step: int) -> None:
    """Wait until the status shows that train has reached a step."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if (workspace.run_folder / "pipeline.json").exists():
            train = workspace.status["stages"].get("train", {})
            if (
                train.get("state") == "Running"
                and train.get("progress", {}).get("step", 0) >= step
            ):
                return
        time.sleep(0.05)
    raise AssertionError("train did not reach the step")


@contextmanager
def training(workspace: CliWorkspace) -> Iterator[subprocess.Popen[str]]:
    """Run the pipeline in another process; in the context, train has reached step 10."""
    with workspace.start_run() as process:
        try:
            wait_for_step(workspace, 10)
            yield process
        finally:
            process.terminate()
            process.communicate(timeout=60)


def drill(workspace: CliWorkspace, *arguments: str) -> subprocess.CompletedProcess[str]:
    return workspace.finetune("drill", "p.yaml", *arguments)


def test_eviction_by_another_process_loses_no_step(workspace: CliWorkspace) -> None:
    with training(workspace) as running:
        done = drill(workspace, "--yes", "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        assert running.poll() is None
    report = json.loads(done.stdout)
    assert (report["outcome"], report["lostSteps"], report["complete"]) == (
        "Interrupted",
        0,
        True,
    )
    assert report["savedStep"] == report["lastStep"] == report["resumedAtStep"] >= 10
    assert (
        0
        <= report["seconds"]["durable"]
        <= report["seconds"]["nextJob"]
        <= report["seconds"]["nextStep"]
    )
    first, second = workspace.status["stages"]["train"]["attempts"]
    assert (first["exitCode"], first["message"].partition(";")[0]) == (
        75,
        "evicted on purpose (finetune drill)",
    )
    assert second["startStep"] == report["resumedAtStep"]
    assert list(workspace.run_folder.glob(f"jobs/*/{COMMANDS}")) == []


def test_kill_by_another_process_loses_unsaved_steps(workspace: CliWorkspace) -> None:
    with training(workspace):
        done = drill(workspace, "train", "--kill", "--yes", "--json")
        assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    first, second = workspace.status["stages"]["train"]["attempts"]
    assert (first["outcome"], first["exitCode"]) == ("Interrupted", 137)
    assert (
        report["lostSteps"]
        == first["lastStep"] - second["startStep"]
        == first["lostSteps"]
    )
    assert second["startStep"] % 7 == 0
    assert workspace.status["stages"]["train"]["failures"] == 0


def test_timeout_reports_what_was_seen_and_leaves_the_run(
    workspace: CliWorkspace,
) -> None:
    with training(workspace) as running:
        done = drill(workspace, "--yes", "--timeout", "0s", "--json")
        assert (done.returncode, json.loads(done.stdout)["complete"]) == (1, False)
        assert running.poll() is None


def test_run_without_a_process_is_refused(workspace: CliWorkspace) -> None:
    with training(workspace) as running:
        running.kill()
    workspace.wait_for_processes()
    refused = drill(workspace, "--yes")
    assert refused.returncode == 1
    assert (
        "no `finetune run` works on default/demo, so nothing would resume"
        in refused.stderr
    )


def test_finished_run_is_refused_with_its_state(workspace: CliWorkspace) -> None:
    workspace.set_env("train", STEPS="2", STEP_SECONDS="0.01")
    assert workspace.finetune("run").returncode == 0
    refused = drill(workspace, "--yes")
    assert refused.returncode == 1
    assert (
        "nothing of default/demo runs, so there is nothing to evict; it is Succeeded"
        in refused.stderr
    )


def test_runner_without_a_pipe_is_refused(workspace: CliWorkspace) -> None:
    with training(workspace):
        [pipe] = workspace.run_folder.glob(f"jobs/*-train-a1/{COMMANDS}")
        pipe.unlink()
        refused = drill(workspace, "--yes")
        assert refused.returncode == 1
        assert "its runner takes no commands" in refused.stderr
