"""An early save: requested over HTTP or by a notice, durable while training goes on, and it changes no byte."""

import http.client
import json
import shutil
import socket
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pytest
import torch
from support.trainer.metadata_servers import metadata_server
from support.trainer.training import (
    StoppingProgress,
    adapter_digest,
    environment,
    run_train,
    stage_folder,
    train_config,
)

from finetune_trainer.contract import Environment, TrainConfig
from finetune_trainer.runtime.machine import notices
from finetune_trainer.runtime.machine.notices import Ec2
from finetune_trainer.runtime.progress import early_save
from finetune_trainer.runtime.progress.early_save import EarlySave
from finetune_trainer.runtime.progress.progress import ProgressReporter
from finetune_trainer.runtime.stage_folder import Context
from finetune_trainer.stages import train
from finetune_trainer.stop_signal import StopSignal
from finetune_trainer.training.checkpoints import manager

torch.set_num_threads(1)
NEVER = {"every_steps": 1000, "keep": 9}


@pytest.fixture(scope="module")
def undisturbed(tiny_model: Path, packed: Path) -> str:
    """The adapter digest of ten steps without a checkpoint."""
    run_train(config_for(tiny_model, identity="w" * 16), packed)
    return adapter_digest(packed, "w" * 16)


def config_for(model: Path, **changes: object) -> TrainConfig:
    return train_config(
        model, **{"max_steps": 10, "eval_steps": 4, "checkpoint": NEVER} | changes
    )


class RequestingProgress(StoppingProgress):
    """Requests an early save when one of some steps is finished."""

    def __init__(self, environment: Environment, steps: set[int]) -> None:
        super().__init__(environment, StopSignal(), None, validating=False)
        self._steps = steps
        self.saved: list[tuple[int, int]] = []
        """Step, and the newest durable step that it was reported with."""

    def update(self, **fields: Any) -> None:
        super().update(**fields)
        if "loss" in fields:
            if fields["step"] in self._steps:
                self.announce(f"the test announces the end of step {fields['step']}")
            if fields.get("saved_step"):
                self.saved.append((fields["step"], fields["saved_step"]))


class InlineExecutor(Executor):
    """Writes a checkpoint before `submit` returns, so that no later step finds it being written."""

    def submit(
        self, function: Callable[..., Any], /, *arguments: Any, **options: Any
    ) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*arguments, **options))
        return future


def run_with(
    progress: ProgressReporter,
    config: TrainConfig,
    workspace: Path,
    variables: Environment,
) -> None:
    folder = stage_folder(workspace)
    folder.mkdir(parents=True, exist_ok=True)
    train.run(config, Context(variables, folder, progress, StopSignal()))


def checkpoints(workspace: Path) -> list[str]:
    return sorted(
        folder.name
        for folder in (stage_folder(workspace) / "checkpoints").glob("step-*")
    )


def test_early_saves_are_durable_and_change_no_byte(
    tiny_model: Path, workspace: Path, undisturbed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early_save, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(manager, "ThreadPoolExecutor", lambda *_: InlineExecutor())
    variables = environment(workspace)
    progress = RequestingProgress(variables, {2, 5, 7})
    run_with(progress, config_for(tiny_model), workspace, variables)
    assert checkpoints(workspace) == ["step-00000002", "step-00000005", "step-00000007"]
    assert [saved for _, saved in progress.saved] == [2, 5, 7]
    assert all(
        step <= 10 for step, _ in progress.saved
    )  # known while the attempt went on
    assert adapter_digest(workspace) == undisturbed


def test_run_resumes_exactly_from_an_early_save(
    tiny_model: Path, workspace: Path, undisturbed: str
) -> None:
    variables = environment(workspace)
    run_with(
        RequestingProgress(variables, {3}), config_for(tiny_model), workspace, variables
    )
    assert checkpoints(workspace) == ["step-00000003"]
    shutil.rmtree(stage_folder(workspace) / "output")
    run_train(config_for(tiny_model), workspace)
    assert adapter_digest(workspace) == undisturbed


def test_storm_of_requests_saves_once_in_ten_seconds(
    tiny_model: Path, workspace: Path, undisturbed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early_save, "MIN_SECONDS", 1000.0)
    variables = environment(workspace)
    progress = RequestingProgress(variables, set(range(1, 11)))
    run_with(progress, config_for(tiny_model), workspace, variables)
    assert checkpoints(workspace) == ["step-00000001"]
    assert adapter_digest(workspace) == undisturbed


def test_request_within_ten_seconds_waits_and_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [100.0]
    monkeypatch.setattr(
        "finetune_trainer.runtime.progress.early_save.time.monotonic", lambda: clock[0]
    )
    save = EarlySave()
    assert not save.take()
    assert (save.request(), save.request(), save.take(), save.take()) == (
        True,
        False,
        True,
        False,
    )
    assert save.request() is True
    assert save.take() is False
    clock[0] += 10
    assert save.take() is True
    assert save.take() is False


def answer(port: int, method: str, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, path)
    response = connection.getresponse()
    return response.status, response.read()


def test_post_to_save_is_accepted_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    reporter = ProgressReporter("train", Environment(tmp_path, metrics_port=port))
    assert answer(port, "GET", "/save")[0] == 405
    assert not reporter.early_save.take()
    assert [answer(port, "POST", "/save") for _ in range(3)] == [(202, b"")] * 3
    assert (
        json.loads(answer(port, "GET", "/progress")[1])["notice"]
        == "the operator announces the end of this node"
    )
    assert answer(port, "GET", "/metrics")[0] == 200
    assert reporter.early_save.take()
    assert capsys.readouterr().out.count("the next step boundary is saved") == 1


def test_notice_of_the_metadata_endpoint_saves_once(
    tiny_model: Path, workspace: Path, undisturbed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The notice comes after step 4; each later step waits until the endpoint has been polled again."""
    monkeypatch.setattr(notices, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(early_save, "MIN_SECONDS", 0.0)
    with metadata_server("EC2") as (served, base):
        variables = Environment(
            workspace,
            manifest_dir=workspace,
            interruption_notices="EC2",
            metadata_endpoint=base,
        )

        class Announced(ProgressReporter):
            def update(self, **fields: Any) -> None:
                super().update(**fields)
                if fields.get("step", 0) >= 4 and "loss" in fields:
                    served.set(
                        Ec2.ACTION,
                        {"action": "terminate", "time": "2030-01-01T08:22:00Z"},
                    )
                    wanted = len(served.requests) + 6
                    while len(served.requests) < wanted:
                        pass

        progress = Announced("train", variables)
        run_with(progress, config_for(tiny_model), workspace, variables)
    assert progress.now.notice == "EC2 announces terminate at 2030-01-01T08:22:00Z"
    assert checkpoints(workspace) == ["step-00000004"]
    assert adapter_digest(workspace) == undisturbed
