"""The stage folder: one writer at a time, and a termination message within the kubelet's limit."""

import json
import multiprocessing
from pathlib import Path

import pytest

from finetune_trainer.contract import Environment, EvaluateResult, Failure, Score, TerminationMessage
from finetune_trainer.runtime import stage_folder
from finetune_trainer.runtime.errors import ServiceUnavailable
from finetune_trainer.runtime.stage_folder import exclusive, write_termination_message


def hold_lock(folder: Path, locked, release) -> None:
    with exclusive(folder):
        locked.set()
        release.wait(60)


def test_folder_has_one_writer_until_it_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(stage_folder, "LOCK_TIMEOUT_SECONDS", 1)
    context = multiprocessing.get_context("fork")
    locked, release = context.Event(), context.Event()
    other = context.Process(target=hold_lock, args=(tmp_path / "x", locked, release))
    other.start()
    assert locked.wait(60)
    with pytest.raises(ServiceUnavailable, match="is locked by another process"), exclusive(tmp_path / "x"):
        pass
    other.kill()
    other.join()
    with exclusive(tmp_path / "x"):
        assert (tmp_path / "x").is_dir()


def test_termination_message_is_shrunk_to_4096_bytes(tmp_path):
    log = tmp_path / "log"
    environment = Environment(workspace=tmp_path, termination_log=log)
    write_termination_message(environment, TerminationMessage(failure=Failure(message="ü" * 9000)))
    assert len(log.read_bytes()) <= 4096
    assert json.loads(log.read_bytes())["failure"]["message"].endswith("…")
    metrics = {f"metric_{number}": Score(value=0.123456, stderr=0.0123456) for number in range(9)}
    result = EvaluateResult(identity="i", digest="sha256:0", scores={f"a_task_{n}": metrics for n in range(16)})
    write_termination_message(environment, TerminationMessage(result=result))
    assert len(log.read_bytes()) <= 4096
    scores = json.loads(log.read_bytes())["result"]["scores"]
    assert len(scores) == 16  # every task keeps its first metrics
    assert all("metric_0" in metrics for metrics in scores.values())
