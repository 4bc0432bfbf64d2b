"""The verbs of a cluster on a run of this machine; the stages run `fake_stage.py` instead of the trainer."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.cli.workspace import CliWorkspace

from finetune_operator.local.job_folder import is_locked
from finetune_operator.local.pipeline_file import PipelineFile

SECONDS = 60


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[CliWorkspace]:
    """A workspace whose training takes long; no process outlives the test."""
    result = CliWorkspace(tmp_path)
    result.set_env("train", STEPS="900", STEP_SECONDS="0.1", SAVE_EVERY="7")
    yield result
    if (result.run_folder / "pipeline.json").exists():
        finetune(result, "stop")
    result.wait_for_processes()


def finetune(
    workspace: CliWorkspace, verb: str, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Run a verb on the run of p.yaml."""
    command = [sys.executable, "-m", "finetune_cli", verb, "p.yaml"]
    return subprocess.run(
        [*command, "--workdir", "run", *arguments],
        cwd=workspace.folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def detach(workspace: CliWorkspace, *arguments: str) -> int:
    """Start a run in the background and return the id of its process."""
    started = workspace.finetune("run", "--detach", *arguments)
    assert started.returncode == 0, started.stdout + started.stderr
    return int(started.stdout.partition("(process ")[2].partition(")")[0])


def wait_for(condition: Callable[[], bool], reason: str) -> None:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError(reason)


def wait_for_step(workspace: CliWorkspace, step: int) -> None:
    def is_there() -> bool:
        train = workspace.status["stages"].get("train", {})
        progress = train.get("progress", {})
        return train.get("state") == "Running" and progress.get("step", 0) >= step

    wait_for(is_there, "train did not reach the step")


def listed_phase(workspace: CliWorkspace) -> str:
    """Return the phase that `finetune list` shows."""
    command = [sys.executable, "-m", "finetune_cli", "list", "run"]
    done = subprocess.run(
        command, cwd=workspace.folder, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()[1].split()[1]


def shown_phase(workspace: CliWorkspace) -> str:
    """Return the phase that `finetune get --json` shows."""
    phase: str = json.loads(finetune(workspace, "get", "--json").stdout)["status"][
        "phase"
    ]
    return phase


def test_detached_run_goes_on_and_wait_returns_its_code(
    workspace: CliWorkspace,
) -> None:
    workspace.set_env("train", STEPS="20", STEP_SECONDS="0.05")
    detach(workspace)
    done = finetune(workspace, "wait")
    assert (done.returncode, done.stdout) == (
        0,
        "default/demo: Succeeded: all requested stages are done\n",
    )
    assert "Succeeded" in (workspace.run_folder / "run.log").read_text()


def test_detached_run_reports_an_invalid_manifest_at_once(
    workspace: CliWorkspace,
) -> None:
    workspace.manifest["spec"]["datasets"] = [{"uri": "pvc://nowhere/data.jsonl"}]
    refused = workspace.finetune("run", "--detach")
    assert refused.returncode == 2
    assert "claim nowhere has no folder on this machine" in refused.stderr
    assert not is_locked(workspace.run_folder)


def test_wait_and_watch_return_the_gates_code(workspace: CliWorkspace) -> None:
    workspace.set_env("train", STEPS="8", STEP_SECONDS="0.01")
    workspace.set_env("evaluate", SCORE="0.2")
    detach(workspace)
    watched = finetune(workspace, "get", "-w")
    assert watched.returncode == 3
    assert "\nBelowThreshold: " in watched.stdout
    assert finetune(workspace, "wait", "--for", "Ready").returncode == 3


def test_wait_ends_after_its_timeout(workspace: CliWorkspace) -> None:
    detach(workspace)
    refused = workspace.finetune("run", "--detach")
    assert (refused.returncode, "another finetune run uses" in refused.stderr) == (
        2,
        True,
    )
    late = finetune(workspace, "wait", "--timeout", "0s")
    assert late.returncode == 1
    assert "(not Finished after 0s)" in late.stderr
    assert is_locked(workspace.run_folder)


def test_suspend_saves_and_resume_continues_there(workspace: CliWorkspace) -> None:
    detach(workspace)
    wait_for_step(workspace, 10)
    suspended = finetune(workspace, "suspend")
    assert suspended.returncode == 0
    assert suspended.stdout.splitlines()[0] == (
        "default/demo: is being suspended; `finetune resume` continues it"
    )
    assert not is_locked(workspace.run_folder)
    assert workspace.processes() == []
    assert (listed_phase(workspace), shown_phase(workspace)) == ("Suspended",) * 2
    [first] = workspace.status["stages"]["train"]["attempts"]
    assert (first["outcome"], first["exitCode"]) == ("Stopped", 75)
    assert finetune(workspace, "suspend").stdout.startswith(
        "default/demo: is already suspended\n"
    )
    assert finetune(workspace, "wait").returncode == 1
    resumed = finetune(workspace, "resume")
    assert resumed.returncode == 0, resumed.stderr
    wait_for_step(workspace, first["lastStep"] + 1)
    second = workspace.status["stages"]["train"]["attempts"][-1]
    assert second["startStep"] == first["lastStep"]
    assert "is not suspended" in finetune(workspace, "resume").stdout


def test_run_of_a_suspended_manifest_continues_it(workspace: CliWorkspace) -> None:
    detach(workspace)
    finetune(workspace, "stop")
    workspace.set_env("train", STEPS="8", STEP_SECONDS="0.01")
    assert workspace.finetune("run").returncode == 0


def test_resume_goes_on_up_to_the_stage_of_until(workspace: CliWorkspace) -> None:
    workspace.set_env("train", STEPS="40", STEP_SECONDS="0.1")
    detach(workspace, "--until", "train")
    wait_for_step(workspace, 5)
    stopped = finetune(workspace, "stop")
    assert "finetune run p.yaml --workdir" in stopped.stdout
    assert "--until train" in stopped.stdout
    assert finetune(workspace, "resume").returncode == 0
    done = finetune(workspace, "wait")
    assert done.returncode == 0
    assert "stopped as --until train asks" in done.stdout
    assert workspace.starts("evaluate") == []
    shown = finetune(workspace, "get").stdout
    assert "push      not asked" in shown
    assert "pending" not in shown


def test_cancelled_run_starts_again_only_on_retry(workspace: CliWorkspace) -> None:
    detach(workspace)
    wait_for_step(workspace, 3)
    cancelled = finetune(workspace, "cancel")
    assert cancelled.returncode == 0
    assert "is being cancelled; `finetune retry` starts it again" in cancelled.stdout
    assert workspace.status["phase"] == "Cancelled"
    assert finetune(workspace, "wait").returncode == 1
    assert "has already finished (Cancelled)" in finetune(workspace, "cancel").stdout
    assert "has already finished (Cancelled)" in finetune(workspace, "resume").stdout
    again = workspace.finetune("run")
    assert (again.returncode, "To start it again: finetune retry" in again.stdout) == (
        1,
        True,
    )
    workspace.set_env("train", STEPS="8", STEP_SECONDS="0.01")
    assert workspace.finetune("retry").returncode == 0


def test_cancel_of_a_run_without_a_process_is_recorded(
    workspace: CliWorkspace,
) -> None:
    assert workspace.finetune("run", "--until", "prepare").returncode == 0
    assert listed_phase(workspace) == "Stopped"
    assert finetune(workspace, "cancel").returncode == 0
    assert listed_phase(workspace) == "Cancelled"


@pytest.mark.parametrize("victim", ["run", "runner", "stage"])
def test_killed_process_is_not_shown_as_running(
    workspace: CliWorkspace, victim: str
) -> None:
    """Only the process of the run decides: the runner and the stage are started again by it."""
    process = detach(workspace)
    wait_for_step(workspace, 3)
    if victim == "run":
        os.kill(process, signal.SIGKILL)
        wait_for(lambda: not is_locked(workspace.run_folder), "it holds its lock")
        assert workspace.status["phase"] == "Running"
        assert (listed_phase(workspace), shown_phase(workspace)) == ("Stopped",) * 2
        shown = finetune(workspace, "get").stdout
        assert "no `finetune run` works on it; to continue" in shown
        assert "●" not in shown
        assert finetune(workspace, "wait").returncode == 1
        workspace.wait_for_processes()
        return
    [job] = workspace.run_folder.glob("jobs/*-train-a1")
    child = json.loads((job / "started.json").read_text())["pid"]
    pid = child
    if victim == "runner":
        pid = int(Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(pid, signal.SIGKILL)
    wait_for_second_attempt(workspace)
    assert listed_phase(workspace) == "Running"


def wait_for_second_attempt(workspace: CliWorkspace) -> None:
    def has_two() -> bool:
        train = workspace.status["stages"]["train"]
        return len(train["attempts"]) > 1 and train["state"] == "Running"

    wait_for(has_two, "there is no second attempt")


def test_request_outlives_the_killed_run_it_was_for(workspace: CliWorkspace) -> None:
    """The command does what the run would have done."""
    process = detach(workspace)
    wait_for_step(workspace, 3)
    os.kill(process, signal.SIGSTOP)  # it cannot read the request
    command = [sys.executable, "-m", "finetune_cli", "cancel", "p.yaml"]
    with subprocess.Popen(
        [*command, "--workdir", "run"], cwd=workspace.folder
    ) as cancel:
        file = PipelineFile(workspace.run_folder)
        wait_for(lambda: bool((p := file.read()) and p.cancel), "nothing was asked")
        os.kill(process, signal.SIGKILL)
        assert cancel.wait(SECONDS) == 0
    assert workspace.status["phase"] == "Cancelled"
    assert workspace.status["stages"]["train"]["attempts"][-1]["finishedAt"]
    assert workspace.processes() == []


def test_two_requests_at_once_are_both_done(workspace: CliWorkspace) -> None:
    detach(workspace)
    wait_for_step(workspace, 3)
    base = [sys.executable, "-m", "finetune_cli"]
    commands = [
        subprocess.Popen(
            [*base, verb, "p.yaml", "--workdir", "run"], cwd=workspace.folder
        )
        for verb in ("suspend", "cancel", "stop")
    ]
    assert [command.wait(SECONDS) for command in commands] == [0, 0, 0]
    assert workspace.status["phase"] == "Cancelled"


def test_delete_needs_a_yes_and_stops_a_running_run(workspace: CliWorkspace) -> None:
    detach(workspace)
    wait_for_step(workspace, 3)
    refused = finetune(workspace, "delete")
    assert (refused.returncode, "add --yes" in refused.stderr) == (2, True)
    assert is_locked(workspace.run_folder)
    deleted = finetune(workspace, "delete", "--yes")
    assert deleted.returncode == 0, deleted.stderr
    assert deleted.stdout.startswith("demo: deleted (")
    assert not workspace.run_folder.exists()
    assert workspace.processes() == []
    assert (workspace.folder / "material").is_dir()


def test_delete_keeps_the_users_files_and_a_damaged_run_goes(
    workspace: CliWorkspace,
) -> None:
    workspace.set_env("train", STEPS="8", STEP_SECONDS="0.01")
    assert workspace.finetune("run").returncode == 0
    (workspace.run_folder / "notes.txt").write_text("mine")
    (workspace.run_folder / "pipeline.json").write_text("{")
    assert finetune(workspace, "delete", "-y").returncode == 0
    assert [path.name for path in workspace.run_folder.iterdir()] == ["notes.txt"]


def test_killed_delete_leaves_no_partial_result(workspace: CliWorkspace) -> None:
    """The next run removes what is left of the deletion, and makes its results anew or finds them whole."""
    workspace.set_env("train", STEPS="8", STEP_SECONDS="0.01")
    assert workspace.finetune("run").returncode == 0
    code = (
        "import os, shutil, sys, pathlib; from finetune_cli.local import work_folder as w;"
        "shutil.rmtree = lambda *_, **__: os.kill(os.getpid(), 9);"
        "w.delete(pathlib.Path(sys.argv[1]))"
    )
    command = [sys.executable, "-c", code, str(workspace.run_folder)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert finetune(workspace, "get").returncode == 2
    assert workspace.finetune("run").returncode == 0
    assert list(workspace.run_folder.glob(".deleted-*")) == []


def test_stop_during_a_save_keeps_the_save(workspace: CliWorkspace) -> None:
    """The stage saves at each step here, so the stop always comes during a save or just beside it."""
    workspace.set_env("train", STEPS="900", STEP_SECONDS="0.02", SAVE_EVERY="1")
    detach(workspace)
    for _ in range(3):
        wait_for(
            lambda: (
                workspace.status["stages"].get("train", {}).get("state") == "Running"
            ),
            "train does not run",
        )
        assert finetune(workspace, "stop").returncode == 0
        last = workspace.status["stages"]["train"]["attempts"][-1]
        assert last["outcome"] == "Stopped"
        assert last.get("savedStep") == last.get("lastStep")
        assert finetune(workspace, "resume").returncode == 0
