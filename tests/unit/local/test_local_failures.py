"""`finetune run` with a faulty manifest, work folder or terminal."""

import json
import os
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import pytest
from support.cli.workspace import CliWorkspace

from finetune_cli.__main__ import main


@pytest.fixture
def workspace(tmp_path: Path) -> CliWorkspace:
    return CliWorkspace(tmp_path)


@pytest.mark.parametrize(
    ("spec", "folder"),
    [
        ({"model": {"uri": "."}}, "the work folder, "),
        (
            {"push": {"targets": [{"uri": "pvc://demo/base/tuned"}]}},
            "push.targets pvc://demo/base/tuned, ",
        ),
        (
            {"workspace": {"existingClaim": "demo"}, "model": {"uri": "pvc://demo/"}},
            "the workspace, ",
        ),
    ],
)
def test_run_that_writes_into_its_source_is_rejected(
    workspace: CliWorkspace, spec: dict[str, object], folder: str
) -> None:
    (workspace.folder / "material" / "base").mkdir()
    workspace.manifest["spec"].update(spec)
    for verb in ("plan", "run"):
        rejected = workspace.finetune(verb)
        assert rejected.returncode == 2, verb
        assert f"is a source, but contains {folder}" in rejected.stderr


def test_code_of_a_task_is_refused_before_the_first_stage(
    workspace: CliWorkspace,
) -> None:
    (workspace.folder / "base.inc").write_text("process_docs: !function evil.docs\n")
    (workspace.folder / "quiz.yaml").write_text("task: quiz\ninclude: [base.inc]\n")
    task: dict[str, object] = {"name": "quiz", "file": "quiz.yaml"}
    workspace.manifest["spec"]["evaluate"] = {"tasks": [task]}
    workspace.manifest["spec"]["deploy"] = {"when": "Always"}
    for verb in ("plan", "run"):
        rejected = workspace.finetune(verb)
        assert rejected.returncode == 2, verb
        assert "it runs code (!function evil.docs); if you trust it" in rejected.stderr
    task["allowCode"] = True
    assert "!function" not in workspace.finetune("plan").stderr


def test_suspended_pipeline_starts_nothing_and_run_exits(
    workspace: CliWorkspace,
) -> None:
    assert workspace.finetune("run", "--until", "prepare").returncode == 0
    workspace.manifest["spec"]["suspend"] = True
    planned = {
        s["stage"]: s["action"]
        for s in json.loads(workspace.finetune("plan", "--json").stdout)["stages"]
    }
    assert planned == {
        "prepare": "reuse",
        "train": "blocked",
        "evaluate": "blocked",
        "push": "blocked",
        "deploy": "blocked",
    }
    suspended = workspace.finetune("run")
    assert suspended.returncode == 130
    assert "spec.suspend is true" in suspended.stdout
    assert [workspace.starts(stage) for stage in ("prepare", "train")] == [["work"], []]
    workspace.manifest["spec"]["suspend"] = False
    assert workspace.finetune("run").returncode == 0


def test_missing_command_is_named(workspace: CliWorkspace) -> None:
    workspace.manifest["spec"]["prepare"] = {
        "pod": {"command": ["no-such-program"]},
        "maxFailures": 0,
    }
    assert workspace.finetune("run").returncode == 1
    assert "cannot start no-such-program" in workspace.finetune("get").stdout


def test_runner_that_cannot_start_is_a_failure(
    workspace: CliWorkspace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        "finetune_operator.local.cluster.RUNNER", (sys.executable, "-c", "exit(3)")
    )
    monkeypatch.chdir(workspace.folder)
    workspace.manifest["spec"]["prepare"]["maxFailures"] = 0
    assert main(workspace.command("run")[3:]) == 1
    assert (
        "its runner ended with exit code 3 before it started the process"
        in capsys.readouterr().out
    )


def test_files_in_current_folder_do_not_shadow_libraries(
    workspace: CliWorkspace,
) -> None:
    (workspace.folder / "select.py").write_text("raise SystemExit(3)")
    finetune = Path(sys.executable).with_name("finetune")
    arguments = workspace.command("run", "--until", "prepare")[3:]
    done = subprocess.run(
        [finetune, *arguments],
        cwd=workspace.folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_fault_that_was_not_injected_is_named(workspace: CliWorkspace) -> None:
    done = workspace.finetune("run", "--evict", "train@4", "--kill", "train@1000")
    assert "FaultNotInjected: --kill train@1000 was not injected" in done.stdout
    assert "--evict" not in done.stdout.replace("on purpose (--evict)", "")


def test_names_with_markup_and_spaces_are_printed_verbatim(tmp_path: Path) -> None:
    folder = tmp_path / "a [b] ç"
    folder.mkdir()
    workspace = CliWorkspace(folder)
    workspace.manifest["spec"]["evaluate"]["gates"][0]["metric"] = "[/x]"
    failed = workspace.finetune("run")
    assert "[/x] was not measured" in failed.stdout
    assert failed.stderr == ""
    assert f"finetune retry p.yaml --workdir '{folder}/run'" in failed.stdout


@pytest.mark.parametrize("workdir", ["p.yaml", "/proc/nowhere"])
def test_unusable_work_folder_is_reported_in_one_line(
    workspace: CliWorkspace, workdir: str
) -> None:
    workspace.command("run")
    command = [
        sys.executable,
        "-m",
        "finetune_cli",
        "run",
        "p.yaml",
        "--claim",
        "demo=material",
        "--workdir",
        workdir,
    ]
    failed = subprocess.run(
        command, cwd=workspace.folder, capture_output=True, text=True, check=False
    )
    assert failed.returncode == 1
    assert failed.stderr.startswith("finetune: [Errno ")
    assert failed.stderr.count("\n") == 1


def test_claim_name_cannot_leave_the_claims_folder(workspace: CliWorkspace) -> None:
    rejected = subprocess.run(
        [*workspace.command("run"), "--claim", "..=material"],
        cwd=workspace.folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert rejected.returncode == 2
    assert "must be NAME=FOLDER" in rejected.stderr
    push = {"targets": [{"uri": "pvc:///demo/out"}]}
    workspace.manifest["spec"] |= {
        "datasets": [{"uri": "pvc://../pipeline.json"}],
        "push": push,
    }
    rejected = workspace.finetune("run")
    assert rejected.returncode == 2
    assert "spec.datasets[0].uri: must be pvc://CLAIM/PATH" in rejected.stderr
    assert "spec.push.targets[0].uri: must be pvc://CLAIM/PATH" in rejected.stderr


def test_closed_stdout_evicts_running_stages(workspace: CliWorkspace) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(
        workspace.command("run"),
        cwd=workspace.folder,
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, "")
    workspace.wait_for_processes()
    assert workspace.processes() == []


def test_unwritable_work_folder_is_reported_once_and_retried(
    workspace: CliWorkspace,
) -> None:
    for stage in ("prepare", "train"):
        workspace.set_env(stage, STEPS="40", STEP_SECONDS="0.05")
    running = workspace.start_run()
    while not list(workspace.run_folder.glob("jobs/*/started.json")):
        time.sleep(0.02)
    file = workspace.run_folder / "pipeline.json"
    away = file.rename(file.with_name("away.json"))
    file.mkdir()
    time.sleep(1.5)
    file.rmdir()
    away.rename(file)
    output, _ = running.communicate(timeout=60)
    assert running.returncode == 0, output
    assert output.count("WorkFolder: ") == 1
    assert "Is a directory" in output


def servers(workspace: CliWorkspace) -> list[str]:
    """Return the ids of all processes that serve the published model."""
    model = str(workspace.folder / "material" / "out").encode()
    return [
        file.parent.name
        for file in Path("/proc").glob("[0-9]*/cmdline")
        if model in _read(file)
    ]


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_server_outlives_keep_serving(
    workspace: CliWorkspace, number: signal.Signals
) -> None:
    published = workspace.folder / "material" / "out"
    published.mkdir()
    (published / "config.json").write_text("{}")
    running = workspace.start_run("--keep-serving")
    while not servers(workspace):
        assert running.poll() is None
        time.sleep(0.02)
    running.send_signal(number)
    running.communicate(timeout=60)
    deadline = time.monotonic() + 20
    while servers(workspace) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert servers(workspace) == []


def test_keep_serving_failure_sets_the_exit_code(workspace: CliWorkspace) -> None:
    (workspace.folder / "material" / "out").mkdir()
    failed = workspace.finetune("run", "--keep-serving", "--json")
    assert failed.returncode == 1
    assert json.loads(failed.stdout)["phase"] == "Succeeded"
    assert "has no config.json" in failed.stderr


def test_plan_resumes_only_from_a_complete_checkpoint(workspace: CliWorkspace) -> None:
    assert workspace.finetune("run", "--until", "prepare").returncode == 0

    def train() -> dict[str, str]:
        stages: list[dict[str, str]] = json.loads(
            workspace.finetune("plan", "--json").stdout
        )["stages"]
        return stages[1]

    folder = workspace.run_folder / "volumes/workspace/train" / train()["identity"]
    for name in (
        "config.json",
        "checkpoints/.step-00000005.77/state.json",
        "server.log",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    assert train()["action"] == "run"
    (folder / "checkpoints/step-00000005").mkdir()
    (folder / "checkpoints/step-00000005/state.json").touch()
    assert train()["action"] == "resume"


def test_run_stopped_by_ctrl_c_does_not_blame_spec_suspend(
    workspace: CliWorkspace,
) -> None:
    workspace.set_env("train", STEPS="200", STEP_SECONDS="0.05")
    running = workspace.start_run()
    while not list(workspace.run_folder.glob("jobs/*train*/progress.json")):
        time.sleep(0.02)
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=60)
    assert running.returncode == 130
    output = workspace.finetune("get").stdout
    assert "no `finetune run` works on it; to continue: finetune run" in output
    assert "spec.suspend" not in output


def test_work_folder_is_readable_by_its_owner_only(workspace: CliWorkspace) -> None:
    workspace.set_env("prepare", TOKEN="secret")
    assert workspace.finetune("run", "--until", "prepare").returncode == 0
    assert workspace.run_folder.stat().st_mode & 0o077 == 0


def test_plan_blocks_stages_after_a_failed_stage(workspace: CliWorkspace) -> None:
    workspace.manifest["spec"]["prepare"] = {
        "pod": {"command": ["false"]},
        "maxFailures": 0,
    }
    assert workspace.finetune("run").returncode == 1
    stages = json.loads(workspace.finetune("plan", "--json").stdout)["stages"]
    assert [stage["action"] for stage in stages] == ["blocked"] * 5
    assert stages[1]["why"] == "waits for prepare"


def test_score_below_gate_exits_3_with_until_evaluate(workspace: CliWorkspace) -> None:
    workspace.set_env("evaluate", SCORE="0.1")
    assert workspace.finetune("run", "--until", "train").returncode == 0
    assert workspace.finetune("run", "--until", "evaluate").returncode == 3


def test_interruptions_that_save_nothing_are_spread(workspace: CliWorkspace) -> None:
    """A process that only exits with 75 was started again at once, as often as maxInterruptions allowed."""
    spec = {
        "pod": {"command": ["sh", "-c", "exit 75"]},
        "maxInterruptions": 2,
    }
    workspace.manifest["spec"]["prepare"] = spec
    assert workspace.finetune("run").returncode == 1
    attempts = workspace.status["stages"]["prepare"]["attempts"]
    ends = [datetime.fromisoformat(attempt["finishedAt"]) for attempt in attempts[:-1]]
    starts = [datetime.fromisoformat(attempt["startedAt"]) for attempt in attempts[1:]]
    delays = [
        (start - end).total_seconds() for start, end in zip(starts, ends, strict=True)
    ]
    assert len(delays) == 2
    assert delays[0] >= 1
    assert delays[1] >= 2
