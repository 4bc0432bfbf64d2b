"""`finetune run` as people use it, over real processes; the stages are a container that is not ours."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.cli_workspace import STAGES, CliWorkspace


@pytest.fixture
def desk(tmp_path: Path) -> CliWorkspace:
    return CliWorkspace(tmp_path)


def test_a_pipeline_runs_through_and_a_second_run_starts_nothing(desk: CliWorkspace) -> None:
    first = desk.do("run")
    assert first.returncode == 0, first.stdout + first.stderr
    assert {name: stage["state"] for name, stage in desk.status["stages"].items()} == dict.fromkeys(STAGES, "Succeeded")
    again = desk.do("run", "--json")
    assert again.returncode == 0
    assert json.loads(again.stdout)["phase"] == "Succeeded"
    assert [desk.starts(stage) for stage in STAGES] == [["work"]] * 5
    assert desk.processes() == []


def test_evictions_are_interruptions_and_the_command_says_what_they_cost(desk: CliWorkspace) -> None:
    desk.env("train", STEPS="60", STEP_SECONDS="0.03", SAVE_EVERY="7")
    done = desk.do("run", "--evict", "train@15", "--kill", "train@40")
    assert done.returncode == 0, done.stdout + done.stderr
    train = desk.status["stages"]["train"]
    assert [attempt["outcome"] for attempt in train["attempts"]] == ["Interrupted", "Interrupted", "Succeeded"]
    assert [attempt.get("exitCode") for attempt in train["attempts"]] == [75, 137, 0]
    assert train["failures"] == 0
    evicted, killed, last = train["attempts"]
    assert evicted["lostSteps"] == 0  # it saved where it stopped
    assert killed["startStep"] == evicted["lastStep"]
    assert killed["lostSteps"] == killed["lastStep"] - last["startStep"]
    assert f"{desk.status['lostSteps']} steps" in done.stdout


def test_ctrl_c_stops_as_an_eviction_would_and_the_next_run_goes_on(desk: CliWorkspace) -> None:
    desk.env("train", STEPS="80", STEP_SECONDS="0.05")
    running = desk.start()
    while "train" not in (desk.status["stages"] if (desk.run_folder / "pipeline.json").exists() else {}) or (
        desk.status["stages"]["train"].get("progress", {}).get("step", 0) < 5
    ):
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    output, _ = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "To go on: finetune run" in output
    assert desk.processes() == []
    train = desk.status["stages"]["train"]
    assert (train["interruptions"], train["failures"]) == (0, 0)  # asked for: it counts against nothing
    assert train["attempts"][-1]["outcome"] == "Stopped"
    desk.env("train", STEPS="80", STEP_SECONDS="0.05")
    assert desk.do("run").returncode == 0
    assert desk.status["stages"]["train"]["attempts"][-1]["startStep"] >= 5


def test_a_failure_is_tried_again_and_a_hopeless_one_is_not(desk: CliWorkspace) -> None:
    desk.env("train", EXIT_AT="3:65")
    failed = desk.do("run")
    assert failed.returncode == 1
    assert "made to fail at step 3" in failed.stdout
    train = desk.status["stages"]["train"]
    assert (train["state"], train["reason"], len(train["attempts"])) == ("Failed", "DataInvalid", 1)
    assert desk.do("run").returncode == 1  # nothing has changed, so nothing is tried
    assert len(desk.status["stages"]["train"]["attempts"]) == 1
    retried = desk.do("retry")
    assert retried.returncode == 0, retried.stdout + retried.stderr
    assert desk.starts("prepare") == ["work", "again"]  # asked whether its work is there, and it is


def test_below_the_gate_nothing_is_deployed_and_the_exit_code_says_so(desk: CliWorkspace) -> None:
    desk.env("evaluate", SCORE="0.5")
    assert desk.do("run").returncode == 3
    states = {name: stage["state"] for name, stage in desk.status["stages"].items()}
    assert states == {**dict.fromkeys(STAGES, "Succeeded"), "deploy": "Skipped"}
    desk.manifest["spec"]["evaluate"]["gate"]["threshold"] = 0.4
    assert desk.do("run").returncode == 0
    assert desk.starts("evaluate") == ["work"]  # another threshold measures nothing again
    desk.manifest["spec"]["evaluate"]["gate"]["threshold"] = 0.6
    del desk.manifest["spec"]["deploy"]
    assert desk.do("run").returncode == 3  # although nothing waited for the gate


def test_an_edit_reruns_what_it_touches_and_plan_said_so(desk: CliWorkspace) -> None:
    assert desk.do("run").returncode == 0
    spec = desk.manifest["spec"]
    spec["evaluate"]["tasks"]["task"]["fewShot"] = 2
    foretold = {s["stage"]: s["action"] for s in json.loads(desk.do("plan", "--json").stdout)["stages"]}
    assert foretold == {"prepare": "reuse", "train": "reuse", "evaluate": "run", "push": "run", "deploy": "run"}
    assert desk.do("run").returncode == 0
    assert [len(desk.starts(stage)) for stage in STAGES] == [1, 1, 2, 2, 2]
    spec["train"]["lora"] = {"rank": 4}
    foretold = {s["stage"]: s for s in json.loads(desk.do("plan", "--json").stdout)["stages"]}
    assert foretold["prepare"]["action"] == "reuse"
    assert foretold["train"]["action"] == "run"
    assert "spec.train.lora.rank: 16 → 4" in foretold["train"]["why"]
    before = desk.status["stages"]["train"]["identity"]
    assert desk.do("run").returncode == 0
    assert desk.status["stages"]["train"]["identity"] == foretold["train"]["identity"] != before


def test_other_resources_resume_what_was_begun(desk: CliWorkspace) -> None:
    desk.env("train", STEPS="12", SAVE_EVERY="3", EXIT_AT="7:65")
    assert desk.do("run").returncode == 1
    before = desk.status["stages"]["train"]
    desk.manifest["spec"]["train"]["resources"] = {"memory": "8Gi"}
    foretold = {s["stage"]: s for s in json.loads(desk.do("plan", "--json").stdout)["stages"]}
    assert foretold["train"]["action"] == "resume"
    assert "spec.train.resources.memory: absent → 8Gi" in foretold["train"]["why"]
    assert desk.do("run").returncode == 0
    train = desk.status["stages"]["train"]
    assert train["identity"] == before["identity"]
    assert train["attempts"][-1]["startStep"] == 6


def test_data_that_changed_in_place_is_other_data(desk: CliWorkspace) -> None:
    data = desk.folder / "material" / "data.jsonl"
    data.write_text("one\n")
    assert desk.do("run").returncode == 0
    data.write_text("two\n")
    assert desk.do("run").returncode == 0
    assert [len(desk.starts(stage)) for stage in STAGES] == [2, 2, 2, 2, 2]


def test_two_runs_do_not_share_a_work_folder(desk: CliWorkspace) -> None:
    desk.env("prepare", STEPS="60", STEP_SECONDS="0.05")
    first = desk.start()
    while not (desk.run_folder / "pipeline.json").exists():
        time.sleep(0.02)
    second = desk.do("run")
    assert second.returncode == 2
    assert "another finetune run is working in" in second.stderr
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=60)


def test_killing_the_command_at_random_moments_loses_nothing(desk: CliWorkspace) -> None:
    for stage in STAGES:
        desk.env(stage, STEPS="25", STEP_SECONDS="0.04", SAVE_EVERY="2")
    chance = random.Random(20)  # which moments does not matter, that they differ does
    kills = 0
    while kills < 20:
        running = desk.start()
        try:
            running.communicate(timeout=chance.uniform(0.3, 2.0))
        except subprocess.TimeoutExpired:
            running.kill()
            running.communicate()
            kills += 1
        else:
            assert_whole(desk)
            shutil.rmtree(desk.run_folder)  # this one came through: the next kills are another pipeline's
        if chance.random() < 0.5:
            desk.settle()  # else the next run meets the runners of the last one
    desk.settle()
    assert desk.processes() == []
    final = desk.do("run")
    assert final.returncode == 0, final.stdout + final.stderr
    assert_whole(desk)


def assert_whole(desk: CliWorkspace) -> None:
    assert desk.processes() == []
    assert desk.status["phase"] == "Succeeded"
    for name, stage in desk.status["stages"].items():
        assert stage["state"] == "Succeeded", name
        assert stage["failures"] == 0, name
        # No process of a stage that had finished. One that had its result and was killed on its way out is asked again.
        *ended_before, last = stage["attempts"]
        assert last["outcome"] == "Succeeded", name
        assert all(attempt["outcome"] != "Succeeded" for attempt in ended_before), name
        assert len(desk.starts(name)) <= last["number"], desk.starts(name)


def test_a_damaged_work_folder_is_named_and_the_finished_work_is_found_again(desk: CliWorkspace) -> None:
    assert desk.do("run").returncode == 0
    file = desk.run_folder / "pipeline.json"
    file.write_text(file.read_text()[:200])
    for verb in ("run", "get", "plan"):
        refused = desk.do(verb)
        assert refused.returncode == 1, verb
        assert "pipeline.json cannot be read" in refused.stderr
    file.unlink()
    foretold = {s["stage"]: s["action"] for s in json.loads(desk.do("plan", "--json").stdout)["stages"]}
    assert foretold == dict.fromkeys(STAGES, "reuse")
    assert desk.do("run").returncode == 0
    assert [desk.starts(stage) for stage in STAGES] == [["work", "again"]] * 5


def test_a_work_folder_belongs_to_one_pipeline(desk: CliWorkspace) -> None:
    assert desk.do("run", "--until", "prepare").returncode == 0
    desk.manifest["metadata"]["name"] = "other"
    refused = desk.do("run")
    assert refused.returncode == 1
    assert "belongs to the pipeline default/desk" in refused.stderr


def test_until_stops_after_a_stage_and_a_later_run_goes_on(desk: CliWorkspace) -> None:
    assert desk.do("run", "--until", "train").returncode == 0
    assert [len(desk.starts(stage)) for stage in STAGES] == [1, 1, 0, 0, 0]
    assert desk.do("run").returncode == 0
    assert [len(desk.starts(stage)) for stage in STAGES] == [1, 1, 1, 1, 1]


def test_what_cannot_begin_says_why_and_writes_nothing(desk: CliWorkspace) -> None:
    desk.command("run")
    for arguments, words in (
        (["run", "p.yaml", "--workdir", "run"], "pvc://demo/… has no folder on this machine; add --claim demo=FOLDER"),
        (["run", "p.yaml", "--claim", "demo=nowhere"], "nowhere is no folder"),
        (["run", "p.yaml", "--claim", "demo"], "must be NAME=FOLDER"),
        (["run", "p.yaml", "--evict", "train"], "is not STAGE@STEP"),
        (["run", "nothing.yaml"], "no such file"),
        (["get"], "no kubeconfig at nowhere"),
        (["get", "p.yaml"], ".finetune/desk holds no run"),
        (["logs", "train"], "name the pipeline before the stage"),
        (["logs", "train", "--workdir", "nowhere"], "holds no run"),
    ):
        refused = subprocess.run(
            [sys.executable, "-m", "finetune_cli", *arguments],
            cwd=desk.folder,
            env=os.environ | {"KUBECONFIG": "nowhere"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert refused.returncode == 2, arguments
        assert words in refused.stderr, arguments
        assert "Traceback" not in refused.stderr
    assert not (desk.run_folder / "pipeline.json").exists()


def test_a_result_that_breaks_the_contract_is_a_failure_that_says_so(desk: CliWorkspace) -> None:
    code = "import os; open(os.environ['FINETUNE_TERMINATION_LOG'],'w').write('{\"result\": {\"stage\": \"train\"}}')"
    desk.manifest["spec"]["train"] = {"command": [sys.executable, "-c", code], "retries": {"failures": 0}}
    failed = desk.do("run")
    assert failed.returncode == 1
    assert "the process ended with 0, but its termination message keeps not to the stage contract" in failed.stdout


def test_logs_tell_the_attempts_apart(desk: CliWorkspace) -> None:
    desk.manifest["spec"]["prepare"]["command"] = [sys.executable, "-c", "print('hello'); raise SystemExit(64)"]
    assert desk.do("run").returncode == 1
    logs = desk.do("logs", "prepare")
    assert logs.stdout == "hello\n"
    assert "attempt 1" in logs.stderr
    assert "exit code 64" in desk.do("get").stdout
