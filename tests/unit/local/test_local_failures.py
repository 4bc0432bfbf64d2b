"""`finetune run` where something is not as it should be: the manifest, the disk, the terminal."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.cli_workspace import CliWorkspace

from finetune_cli.__main__ import main


@pytest.fixture
def desk(tmp_path: Path) -> CliWorkspace:
    return CliWorkspace(tmp_path)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"model": {"uri": "."}}, "the work folder, "),
        ({"push": {"target": "pvc://demo/base/tuned"}}, "push.target, "),
        ({"workspace": {"existingClaim": "demo"}, "model": {"uri": "pvc://demo/"}}, "the workspace, "),
    ],
)
def test_a_run_that_would_write_into_what_it_reads_is_refused(
    desk: CliWorkspace, spec: dict[str, object], words: str
) -> None:
    (desk.folder / "material" / "base").mkdir()
    desk.manifest["spec"].update(spec)
    for verb in ("plan", "run"):
        refused = desk.do(verb)
        assert refused.returncode == 2, verb
        assert words in refused.stderr
        assert "lies in it" in refused.stderr


def test_a_suspended_pipeline_starts_nothing_and_the_command_ends(desk: CliWorkspace) -> None:
    assert desk.do("run", "--until", "prepare").returncode == 0
    desk.manifest["spec"]["suspend"] = True
    foretold = {s["stage"]: s["action"] for s in json.loads(desk.do("plan", "--json").stdout)["stages"]}
    assert foretold == {"prepare": "reuse", "train": "stay", "evaluate": "stay", "push": "stay", "deploy": "stay"}
    suspended = desk.do("run")
    assert suspended.returncode == 130
    assert "spec.suspend is true" in suspended.stdout
    assert [desk.starts(stage) for stage in ("prepare", "train")] == [["work"], []]
    desk.manifest["spec"]["suspend"] = False
    assert desk.do("run").returncode == 0


def test_a_command_that_is_not_there_is_named(desk: CliWorkspace) -> None:
    desk.manifest["spec"]["prepare"] |= {"command": ["no-such-program"], "retries": {"failures": 0}}
    assert desk.do("run").returncode == 1
    assert "cannot start no-such-program" in desk.do("get").stdout


def test_a_runner_that_cannot_start_is_a_failure_and_not_tried_for_ever(
    desk: CliWorkspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("finetune_operator.local.cluster.RUNNER", (sys.executable, "-c", "exit(3)"))
    monkeypatch.chdir(desk.folder)
    desk.manifest["spec"]["prepare"]["retries"] = {"failures": 0}
    assert main(desk.command("run")[3:]) == 1
    assert "its runner ended with code 3 before anything was started" in capsys.readouterr().out


def test_files_in_the_folder_of_the_command_take_no_librarys_place(desk: CliWorkspace) -> None:
    (desk.folder / "select.py").write_text("raise SystemExit(3)")
    finetune = Path(sys.executable).with_name("finetune")
    words = desk.command("run", "--until", "prepare")[3:]
    done = subprocess.run([finetune, *words], cwd=desk.folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_a_drill_that_never_strikes_is_named(desk: CliWorkspace) -> None:
    done = desk.do("run", "--evict", "train@4", "--kill", "train@1000")
    assert "DrillMissed: --kill train@1000 never struck" in done.stdout
    assert "--evict" not in done.stdout.replace("on purpose (--evict)", "")


def test_a_gate_of_any_name_and_a_folder_of_any_name_can_be_told(tmp_path: Path) -> None:
    folder = tmp_path / "a [b] ç"
    folder.mkdir()
    desk = CliWorkspace(folder)
    desk.manifest["spec"]["evaluate"]["gate"]["metric"] = "[/x]"
    failed = desk.do("run")
    assert "[/x] was not measured" in failed.stdout
    assert failed.stderr == ""
    assert f"finetune retry p.yaml --workdir '{folder}/run'" in failed.stdout


@pytest.mark.parametrize("place", ["p.yaml", "/proc/nowhere"])
def test_a_work_folder_that_cannot_be_made_is_said_in_one_line(desk: CliWorkspace, place: str) -> None:
    desk.command("run")
    command = [sys.executable, "-m", "finetune_cli", "run", "p.yaml", "--claim", "demo=material", "--workdir", place]
    failed = subprocess.run(command, cwd=desk.folder, capture_output=True, text=True, check=False)
    assert failed.returncode == 1
    assert failed.stderr.startswith("finetune: [Errno ")
    assert failed.stderr.count("\n") == 1


def test_a_claims_name_leads_nowhere_else(desk: CliWorkspace) -> None:
    refused = subprocess.run(
        [*desk.command("run"), "--claim", "..=material"], cwd=desk.folder, capture_output=True, text=True, check=False
    )
    assert refused.returncode == 2
    assert "must be NAME=FOLDER" in refused.stderr
    desk.manifest["spec"] |= {"dataset": {"uri": "pvc://../pipeline.json"}, "push": {"target": "pvc:///demo/out"}}
    refused = desk.do("run")
    assert refused.returncode == 2
    assert "spec.dataset.uri: must be hf://ORG/NAME, pvc://CLAIM/PATH" in refused.stderr
    assert "spec.push.target: must be pvc://CLAIM/PATH" in refused.stderr


def test_a_reader_that_goes_away_evicts_what_runs(desk: CliWorkspace) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run(
        desk.command("run"), cwd=desk.folder, stdout=writing, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (141, "")
    desk.settle()
    assert desk.processes() == []


def test_a_work_folder_that_cannot_be_written_for_a_while_is_said(desk: CliWorkspace) -> None:
    for stage in ("prepare", "train"):
        desk.env(stage, STEPS="40", STEP_SECONDS="0.05")
    running = desk.start()
    while not list(desk.run_folder.glob("jobs/*/started.json")):
        time.sleep(0.02)
    file = desk.run_folder / "pipeline.json"
    file.rename(away := file.with_name("away.json"))
    file.mkdir()
    time.sleep(1.5)
    file.rmdir()
    away.rename(file)
    said, _ = running.communicate(timeout=60)
    assert running.returncode == 0, said
    assert said.count("WorkFolder: ") == 1
    assert "Is a directory" in said


def servers(desk: CliWorkspace) -> list[str]:
    """Every process that serves what this desk has pushed."""
    place = str(desk.folder / "material" / "out").encode()
    return [file.parent.name for file in Path("/proc").glob("[0-9]*/cmdline") if place in _read(file)]


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_server_outlives_the_command_that_keeps_serving(desk: CliWorkspace, number: signal.Signals) -> None:
    published = desk.folder / "material" / "out"
    published.mkdir()
    (published / "config.json").write_text("{}")
    running = desk.start("--keep-serving")
    while not servers(desk):
        assert running.poll() is None
        time.sleep(0.02)
    running.send_signal(number)
    running.communicate(timeout=60)
    until = time.monotonic() + 20
    while servers(desk) and time.monotonic() < until:
        time.sleep(0.05)
    assert servers(desk) == []


def test_a_model_that_cannot_be_kept_serving_is_told_by_the_exit_code(desk: CliWorkspace) -> None:
    (desk.folder / "material" / "out").mkdir()
    failed = desk.do("run", "--keep-serving", "--json")
    assert failed.returncode == 1
    assert json.loads(failed.stdout)["phase"] == "Succeeded"
    assert "holds no config.json" in failed.stderr


def test_the_plan_speaks_of_resuming_only_where_something_was_kept(desk: CliWorkspace) -> None:
    assert desk.do("run", "--until", "prepare").returncode == 0

    def train() -> dict[str, str]:
        stages: list[dict[str, str]] = json.loads(desk.do("plan", "--json").stdout)["stages"]
        return stages[1]

    folder = desk.run_folder / "volumes/workspace/train" / train()["identity"]
    for name in ("config.json", "checkpoints/.step-00000005.77/state.json", "server.log"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    assert train()["action"] == "run"
    (folder / "checkpoints/step-00000005").mkdir()
    (folder / "checkpoints/step-00000005/state.json").touch()
    assert train()["action"] == "resume"


def test_a_run_that_was_stopped_from_the_keyboard_is_not_said_to_be_suspended_by_its_spec(desk: CliWorkspace) -> None:
    desk.env("train", STEPS="200", STEP_SECONDS="0.05")
    running = desk.start()
    while not list(desk.run_folder.glob("jobs/*train*/progress.json")):
        time.sleep(0.02)
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=60)
    assert running.returncode == 130
    told = desk.do("get").stdout
    assert "suspended, goes on where it stopped" in told
    assert "spec.suspend" not in told


def test_only_the_owner_reads_the_work_folder(desk: CliWorkspace) -> None:
    desk.env("prepare", TOKEN="secret")
    assert desk.do("run", "--until", "prepare").returncode == 0
    assert desk.run_folder.stat().st_mode & 0o077 == 0


def test_the_plan_does_not_promise_what_waits_for_a_failed_stage(desk: CliWorkspace) -> None:
    desk.manifest["spec"]["prepare"] |= {"command": ["false"], "retries": {"failures": 0}}
    assert desk.do("run").returncode == 1
    stages = json.loads(desk.do("plan", "--json").stdout)["stages"]
    assert [stage["action"] for stage in stages] == ["stay"] * 5
    assert stages[1]["why"] == "waits for prepare"


def test_a_score_below_the_gate_is_told_also_where_the_run_ends_with_the_exam(desk: CliWorkspace) -> None:
    desk.env("evaluate", SCORE="0.1")
    assert desk.do("run", "--until", "train").returncode == 0
    assert desk.do("run", "--until", "evaluate").returncode == 3
