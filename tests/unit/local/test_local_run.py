"""`finetune run` with real processes; the stages run `fake_stage.py` instead of the trainer."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import pytest
from support.cli.workspace import STAGES, CliWorkspace


@pytest.fixture
def workspace(tmp_path: Path) -> CliWorkspace:
    return CliWorkspace(tmp_path)


def set_pod(workspace: CliWorkspace, stage: str, **fields: object) -> None:
    """Set fields of a stage's pod in the manifest."""
    spec = workspace.manifest["spec"][stage]
    spec["pod"] = {**spec["pod"], **fields}


def test_second_run_of_finished_pipeline_starts_nothing(
    workspace: CliWorkspace,
) -> None:
    first = workspace.finetune("run")
    assert first.returncode == 0, first.stdout + first.stderr
    assert {
        name: stage["state"] for name, stage in workspace.status["stages"].items()
    } == dict.fromkeys(STAGES, "Succeeded")
    again = workspace.finetune("run", "--json")
    assert again.returncode == 0
    assert json.loads(again.stdout)["phase"] == "Succeeded"
    assert [workspace.starts(stage) for stage in STAGES] == [["work"]] * 5
    assert workspace.processes() == []


def test_evictions_are_interruptions_with_reported_lost_steps(
    workspace: CliWorkspace,
) -> None:
    workspace.set_env("train", STEPS="60", STEP_SECONDS="0.03", SAVE_EVERY="7")
    done = workspace.finetune("run", "--evict", "train@15", "--kill", "train@40")
    assert done.returncode == 0, done.stdout + done.stderr
    train = workspace.status["stages"]["train"]
    assert [attempt["outcome"] for attempt in train["attempts"]] == [
        "Interrupted",
        "Interrupted",
        "Succeeded",
    ]
    assert [attempt.get("exitCode") for attempt in train["attempts"]] == [75, 137, 0]
    assert train["failures"] == 0
    evicted, killed, last = train["attempts"]
    assert evicted["lostSteps"] == 0  # it saved a checkpoint at its last step
    assert killed["startStep"] == evicted["lastStep"]
    assert killed["lostSteps"] == killed["lastStep"] - last["startStep"]
    assert f"{workspace.status['lostSteps']} steps" in done.stdout


def test_run_continues_after_ctrl_c(workspace: CliWorkspace) -> None:
    workspace.set_env("train", STEPS="80", STEP_SECONDS="0.05")
    running = workspace.start_run()
    while "train" not in (
        workspace.status["stages"]
        if (workspace.run_folder / "pipeline.json").exists()
        else {}
    ) or (workspace.status["stages"]["train"].get("progress", {}).get("step", 0) < 5):
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    output, _ = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "To continue: finetune run" in output
    assert workspace.processes() == []
    train = workspace.status["stages"]["train"]
    assert (train["interruptions"], train["failures"]) == (
        0,
        0,
    )  # requested by the user: counts against no budget
    assert train["attempts"][-1]["outcome"] == "Stopped"
    workspace.set_env("train", STEPS="80", STEP_SECONDS="0.05")
    assert workspace.finetune("run").returncode == 0
    assert workspace.status["stages"]["train"]["attempts"][-1]["startStep"] >= 5


def test_permanent_failure_runs_again_only_on_retry(workspace: CliWorkspace) -> None:
    workspace.set_env("train", EXIT_AT="3:65")
    failed = workspace.finetune("run")
    assert failed.returncode == 1
    assert "made to fail at step 3" in failed.stdout
    train = workspace.status["stages"]["train"]
    assert (train["state"], train["reason"], len(train["attempts"])) == (
        "Failed",
        "DataInvalid",
        1,
    )
    assert (
        workspace.finetune("run").returncode == 1
    )  # nothing has changed, so no attempt is started
    assert len(workspace.status["stages"]["train"]["attempts"]) == 1
    retried = workspace.finetune("retry")
    assert retried.returncode == 0, retried.stdout + retried.stderr
    assert workspace.starts("prepare") == [
        "work",
        "again",
    ]  # `retry` runs it again, and it finds its result


def test_score_below_gate_skips_deploy_and_exits_3(workspace: CliWorkspace) -> None:
    workspace.set_env("evaluate", SCORE="0.5")
    assert workspace.finetune("run").returncode == 3
    states = {
        name: stage["state"] for name, stage in workspace.status["stages"].items()
    }
    assert states == {**dict.fromkeys(STAGES, "Succeeded"), "deploy": "Skipped"}
    workspace.manifest["spec"]["evaluate"]["gates"][0]["value"] = 0.4
    assert workspace.finetune("run").returncode == 0
    assert workspace.starts("evaluate") == [
        "work"
    ]  # another value does not repeat the measurement
    workspace.manifest["spec"]["evaluate"]["gates"][0]["value"] = 0.6
    del workspace.manifest["spec"]["deploy"]
    assert (
        workspace.finetune("run").returncode == 3
    )  # also without a stage that waits for the gate


def test_plan_of_more_steps_names_the_adapter(workspace: CliWorkspace) -> None:
    workspace.manifest["spec"]["train"]["maxSteps"] = 8
    assert workspace.finetune("run", "--until", "train").returncode == 0
    workspace.manifest["spec"]["train"]["maxSteps"] = 9
    assert "which begins at step 0\n" in workspace.finetune("plan").stdout
    identity = workspace.status["stages"]["train"]["identity"]
    adapter = workspace.run_folder / "volumes/workspace/train" / identity / "output"
    adapter.mkdir()
    (adapter / "adapter_config.json").touch()
    planned = workspace.finetune("plan").stdout
    assert f"set train.startFrom.uri to file://{adapter} (docs/" in planned


def test_edit_reruns_the_stages_that_plan_named(workspace: CliWorkspace) -> None:
    assert workspace.finetune("run").returncode == 0
    spec = workspace.manifest["spec"]
    spec["evaluate"]["tasks"][0]["fewShot"] = 2
    planned = {
        s["stage"]: s["action"]
        for s in json.loads(workspace.finetune("plan", "--json").stdout)["stages"]
    }
    assert planned == {
        "prepare": "reuse",
        "train": "reuse",
        "evaluate": "run",
        "push": "run",
        "deploy": "run",
    }
    assert workspace.finetune("run").returncode == 0
    assert [len(workspace.starts(stage)) for stage in STAGES] == [1, 1, 2, 2, 2]
    spec["train"]["lora"] = {"rank": 4}
    planned = {
        s["stage"]: s
        for s in json.loads(workspace.finetune("plan", "--json").stdout)["stages"]
    }
    assert planned["prepare"]["action"] == "reuse"
    assert planned["train"]["action"] == "run"
    assert "spec.train.lora.rank: 16 → 4" in planned["train"]["why"]
    before = workspace.status["stages"]["train"]["identity"]
    assert workspace.finetune("run").returncode == 0
    assert (
        workspace.status["stages"]["train"]["identity"]
        == planned["train"]["identity"]
        != before
    )


def test_edited_resources_resume_the_stage(workspace: CliWorkspace) -> None:
    workspace.set_env("train", STEPS="12", SAVE_EVERY="3", EXIT_AT="7:65")
    assert workspace.finetune("run").returncode == 1
    before = workspace.status["stages"]["train"]
    set_pod(workspace, "train", resources={"limits": {"memory": "8Gi"}})
    planned = {
        s["stage"]: s
        for s in json.loads(workspace.finetune("plan", "--json").stdout)["stages"]
    }
    assert planned["train"]["action"] == "resume"
    assert (
        "spec.train.pod.resources.limits.memory: absent → 8Gi"
        in planned["train"]["why"]
    )
    assert workspace.finetune("run").returncode == 0
    train = workspace.status["stages"]["train"]
    assert train["identity"] == before["identity"]
    assert train["attempts"][-1]["startStep"] == 6


def test_data_edited_in_place_reruns_all_stages(workspace: CliWorkspace) -> None:
    data = workspace.folder / "material" / "data.jsonl"
    data.write_text("one\n")
    assert workspace.finetune("run").returncode == 0
    data.write_text("two\n")
    assert workspace.finetune("run").returncode == 0
    assert [len(workspace.starts(stage)) for stage in STAGES] == [2, 2, 2, 2, 2]


def test_file_added_to_a_pattern_reruns_all_stages(workspace: CliWorkspace) -> None:
    data = workspace.folder / "material"
    workspace.manifest["spec"]["datasets"] = [{"uri": "pvc://demo/rows-*.jsonl"}]
    (data / "rows-1.jsonl").write_text("one\n")
    assert workspace.finetune("run").returncode == 0
    (data / "other.jsonl").write_text("two\n")
    assert workspace.finetune("run").returncode == 0
    assert [len(workspace.starts(stage)) for stage in STAGES] == [1, 1, 1, 1, 1]
    (data / "rows-2.jsonl").write_text("two\n")
    assert workspace.finetune("run").returncode == 0
    assert [len(workspace.starts(stage)) for stage in STAGES] == [2, 2, 2, 2, 2]


def test_second_run_in_same_work_folder_is_rejected(workspace: CliWorkspace) -> None:
    workspace.set_env("prepare", STEPS="60", STEP_SECONDS="0.05")
    first = workspace.start_run()
    while not (workspace.run_folder / "pipeline.json").exists():
        time.sleep(0.02)
    second = workspace.finetune("run")
    assert second.returncode == 2
    assert "another finetune run uses" in second.stderr
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=60)


def test_random_kills_of_the_command_lose_nothing(workspace: CliWorkspace) -> None:
    for stage in STAGES:
        workspace.set_env(stage, STEPS="25", STEP_SECONDS="0.04", SAVE_EVERY="2")
    rng = random.Random(
        20
    )  # a fixed seed: the kills must differ, but the exact moments do not matter
    kills = 0
    while kills < 20:
        running = workspace.start_run()
        try:
            running.communicate(timeout=rng.uniform(0.3, 2.0))
        except subprocess.TimeoutExpired:
            running.kill()
            running.communicate()
            kills += 1
        else:
            assert_succeeded_once(workspace)
            shutil.rmtree(
                workspace.run_folder
            )  # the pipeline has finished: the next kills hit a new one
        if rng.random() < 0.5:
            workspace.wait_for_processes()  # else the next run finds runners of the previous one
    workspace.wait_for_processes()
    assert workspace.processes() == []
    final = workspace.finetune("run")
    assert final.returncode == 0, final.stdout + final.stderr
    assert_succeeded_once(workspace)


def assert_succeeded_once(workspace: CliWorkspace) -> None:
    assert workspace.processes() == []
    assert workspace.status["phase"] == "Succeeded"
    for name, stage in workspace.status["stages"].items():
        assert stage["state"] == "Succeeded", name
        assert stage["failures"] == 0, name
        # No process was started after a success. A process that was killed between its result and its exit runs again.
        *earlier, last = stage["attempts"]
        assert last["outcome"] == "Succeeded", name
        assert all(attempt["outcome"] != "Succeeded" for attempt in earlier), name
        assert len(workspace.starts(name)) <= last["number"], workspace.starts(name)


def test_damaged_pipeline_file_is_named_and_results_are_reused(
    workspace: CliWorkspace,
) -> None:
    assert workspace.finetune("run").returncode == 0
    file = workspace.run_folder / "pipeline.json"
    file.write_text(file.read_text()[:200])
    for verb in ("run", "get", "plan"):
        rejected = workspace.finetune(verb)
        assert rejected.returncode == 1, verb
        assert re.search(r"cannot read \S*pipeline\.json: ", rejected.stderr)
    file.unlink()
    planned = {
        s["stage"]: s["action"]
        for s in json.loads(workspace.finetune("plan", "--json").stdout)["stages"]
    }
    assert planned == dict.fromkeys(STAGES, "reuse")
    assert workspace.finetune("run").returncode == 0
    assert [workspace.starts(stage) for stage in STAGES] == [["work", "again"]] * 5


def test_work_folder_of_another_pipeline_is_rejected(workspace: CliWorkspace) -> None:
    assert workspace.finetune("run", "--until", "prepare").returncode == 0
    workspace.manifest["metadata"]["name"] = "other"
    rejected = workspace.finetune("run")
    assert rejected.returncode == 1
    assert "belongs to the pipeline default/demo" in rejected.stderr


def test_run_continues_after_until(workspace: CliWorkspace) -> None:
    assert workspace.finetune("run", "--until", "train").returncode == 0
    assert [len(workspace.starts(stage)) for stage in STAGES] == [1, 1, 0, 0, 0]
    assert workspace.finetune("run").returncode == 0
    assert [len(workspace.starts(stage)) for stage in STAGES] == [1, 1, 1, 1, 1]


def test_usage_error_is_explained_and_writes_nothing(workspace: CliWorkspace) -> None:
    workspace.command("run")
    for arguments, message in (
        (
            ["run", "p.yaml", "--workdir", "run"],
            "claim demo has no folder on this machine; add --claim demo=FOLDER",
        ),
        (["run", "p.yaml", "--claim", "demo=nowhere"], "nowhere is not a folder"),
        (["run", "p.yaml", "--claim", "demo"], "must be NAME=FOLDER"),
        (["run", "p.yaml", "--evict", "train"], "is not STAGE@STEP"),
        (["run", "nothing.yaml"], "no such file"),
        (["get"], "this machine has no runs; start one with: finetune run FILE"),
        (["get", "p.yaml"], ".finetune/demo holds no run"),
        (["logs", "train"], "name the pipeline before the stage"),
        (["logs", "train", "--workdir", "nowhere"], "holds no run"),
    ):
        rejected = subprocess.run(
            [sys.executable, "-m", "finetune_cli", *arguments],
            cwd=workspace.folder,
            env=os.environ | {"KUBECONFIG": "nowhere"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert rejected.returncode == 2, arguments
        assert message in rejected.stderr, arguments
        assert "Traceback" not in rejected.stderr
    assert not (workspace.run_folder / "pipeline.json").exists()


def test_result_that_violates_the_contract_is_a_failure(
    workspace: CliWorkspace,
) -> None:
    code = "import os; open(os.environ['FINETUNE_TERMINATION_LOG'],'w').write('{\"result\": {\"stage\": \"train\"}}')"
    workspace.manifest["spec"]["train"] = {
        "pod": {"command": [sys.executable, "-c", code]},
        "maxFailures": 0,
    }
    failed = workspace.finetune("run")
    assert failed.returncode == 1
    assert (
        "the process exited with code 0, but its termination message violates the stage contract"
        in failed.stdout
    )


def test_logs_name_the_attempt(workspace: CliWorkspace) -> None:
    set_pod(
        workspace,
        "prepare",
        command=[sys.executable, "-c", "print('hello'); raise SystemExit(64)"],
    )
    assert workspace.finetune("run").returncode == 1
    logs = workspace.finetune("logs", "prepare")
    time, _, line = logs.stdout.partition(" ")
    assert datetime.fromisoformat(time).tzinfo
    assert line == "hello\n"
    assert "attempt 1" in logs.stderr
    assert "exit code 64" in workspace.finetune("get").stdout


def test_logs_of_a_run_that_is_called_like_a_stage(workspace: CliWorkspace) -> None:
    """`init` names a pipeline after its data: train.jsonl."""
    workspace.manifest["metadata"]["name"] = "train"
    workspace.command("run")
    claim = ("--claim", "demo=material")
    done = workspace.finetune_in("run", "p.yaml", *claim, "--until", "prepare")
    assert done.returncode == 0, done.stderr
    logs = workspace.finetune_in("logs", "train")
    assert logs.returncode == 0, logs.stderr
    assert "-prepare-a1" in logs.stderr


def test_edited_template_file_is_another_prepare(workspace: CliWorkspace) -> None:
    template = workspace.folder / "template.jinja"
    template.write_text("{{ messages }}")
    workspace.manifest["spec"]["prepare"]["chatTemplate"] = "template.jinja"
    for starts in (1, 1, 2):
        if starts == 2:
            template.write_text("{{ messages }}!")
        done = workspace.finetune("run", "--until", "prepare")
        assert done.returncode == 0, done.stdout + done.stderr
        assert len(workspace.starts("prepare")) == starts
