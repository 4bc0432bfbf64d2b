"""The stage folder: a single writer at a time, and a termination message within the kubelet's limit."""

import json
import multiprocessing
from pathlib import Path

import pytest

from finetune_trainer.contract import (
    Environment,
    EvaluateResult,
    ExitCode,
    Failure,
    Score,
    TerminationMessage,
)
from finetune_trainer.runtime import locks
from finetune_trainer.runtime.errors import ServiceUnavailable
from finetune_trainer.runtime.stage_folder import exclusive, write_termination_message
from finetune_trainer.stop_signal import stop


def hold_lock(folder: Path, locked, release) -> None:
    with exclusive(folder):
        locked.set()
        release.wait(60)


def test_folder_has_one_writer_until_it_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "LOCK_TIMEOUT_SECONDS", 0.2)
    context = multiprocessing.get_context("fork")
    locked = context.Event()
    release = context.Event()
    other = context.Process(target=hold_lock, args=(tmp_path / "x", locked, release))
    other.start()
    assert locked.wait(60)
    with (
        pytest.raises(ServiceUnavailable, match="is locked by another process"),
        exclusive(tmp_path / "x"),
    ):
        pass
    other.kill()
    other.join()
    with exclusive(tmp_path / "x"):
        assert (tmp_path / "x").is_dir()


def wait_for_lock(folder: Path) -> None:
    stop.install()
    with exclusive(folder):
        pass


def test_wait_for_the_folder_is_logged_once_and_ends_on_sigterm(tmp_path, capfd):
    context = multiprocessing.get_context("fork")
    with exclusive(tmp_path / "x"):
        other = context.Process(target=wait_for_lock, args=(tmp_path / "x",))
        other.start()
        other.join(1.5)
        other.terminate()
        other.join(10)
    assert other.exitcode == ExitCode.INTERRUPTED
    assert (
        capfd.readouterr().out.count(
            "waiting up to 120 s for another run of this stage"
        )
        == 1
    )


def test_half_written_results_of_killed_processes_are_removed(tmp_path):
    (tmp_path / ".result.json.0123abcd").touch()
    with exclusive(tmp_path):
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            ".attempts",
            ".lock",
            ".pipelines",
        ]


def test_termination_message_is_shrunk_to_4096_bytes(tmp_path):
    log = tmp_path / "log"
    environment = Environment(workspace=tmp_path, termination_log=log)
    write_termination_message(
        environment, TerminationMessage(failure=Failure(message="ü" * 9000))
    )
    assert len(log.read_bytes()) <= 4096
    assert json.loads(log.read_bytes())["failure"]["message"].endswith("…")
    score = Score(
        value=-0.123456,
        stderr=0.0123456,
        base=-1.23456e-07,
        difference_stderr=1.23456e-07,
    )
    metrics = {f"metric_{number}": score for number in range(9)}
    # The longest names that the API allows for a task.
    tasks = [f"{n:02}" + "t" * 126 for n in range(16)]
    result = EvaluateResult(
        identity="i" * 16,
        digest="sha256:" + "0" * 64,
        scores=dict.fromkeys(tasks, metrics),
    )
    write_termination_message(environment, TerminationMessage(result=result))
    assert len(log.read_bytes()) <= 4096
    scores = json.loads(log.read_bytes())["result"]["scores"]
    assert len(scores) == 16  # every task keeps its first metrics
    assert all("metric_0" in metrics for metrics in scores.values())
