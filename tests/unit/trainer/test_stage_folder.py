"""What every stage owes: one writer a folder, last words that fit."""

import json
import multiprocessing
from pathlib import Path

import pytest

from finetune_trainer.contract import Environment, EvaluateResult, Failure, Score, TerminationMessage
from finetune_trainer.runtime import stage_folder as stage
from finetune_trainer.runtime.errors import ServiceUnavailable
from finetune_trainer.runtime.stage_folder import exclusive, write_termination_message


def stay(folder: Path, inside, leave) -> None:
    with exclusive(folder):
        inside.set()
        leave.wait(60)


def test_a_folder_has_one_writer_and_a_killed_one_makes_way(tmp_path, monkeypatch):
    monkeypatch.setattr(stage, "LOCK_TIMEOUT_SECONDS", 1)
    context = multiprocessing.get_context("fork")
    inside, leave = context.Event(), context.Event()
    other = context.Process(target=stay, args=(tmp_path / "x", inside, leave))
    other.start()
    assert inside.wait(60)
    with pytest.raises(ServiceUnavailable, match="is locked by another process"), exclusive(tmp_path / "x"):
        pass
    other.kill()
    other.join()
    with exclusive(tmp_path / "x"):
        assert (tmp_path / "x").is_dir()


def test_the_last_words_fit_into_what_the_kubelet_keeps(tmp_path):
    log = tmp_path / "log"
    environment = Environment(workspace=tmp_path, termination_log=log)
    write_termination_message(environment, TerminationMessage(failure=Failure(message="ü" * 9000)))
    assert len(log.read_bytes()) <= 4096
    assert json.loads(log.read_bytes())["failure"]["message"].endswith("…")
    metrics = {f"metric_{number}": Score(value=0.123456, stderr=0.0123456) for number in range(9)}
    result = EvaluateResult(identity="i", digest="sha256:0", scores={f"a_task_{n}": metrics for n in range(16)})
    write_termination_message(environment, TerminationMessage(result=result))
    assert len(log.read_bytes()) <= 4096
    told = json.loads(log.read_bytes())["result"]["scores"]
    assert len(told) == 16  # every task keeps its first metrics
    assert all("metric_0" in scores for scores in told.values())
