"""Two processes train for the same stage: an attempt that was frozen publishes nothing."""

import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.trainer.forkserver import ForkedStage, ForkServer
from support.trainer.training import (
    adapter_digest,
    environment,
    stage_folder,
    train_config,
)

from finetune_trainer.contract import ExitCode, TerminationMessage, TrainConfig

FAST = {
    "finetune_trainer.runtime.fence.SILENT_SECONDS": 0.5,
    "finetune_trainer.runtime.fence.HEARTBEAT_SECONDS": 0.1,
}
OUTPUT_ONLY: dict[str, object] = {"every_steps": 1000}
CHECKPOINTS: dict[str, object] = {"every_steps": 2}
TRAINER = "finetune_trainer"


def config_for(model: Path, rule: dict[str, object], **changes: object) -> TrainConfig:
    return train_config(model, max_steps=8, eval_steps=4, checkpoint=rule, **changes)


@pytest.fixture(scope="module")
def undisturbed(fork_server: ForkServer, tiny_model: Path, packed: Path) -> str:
    config = config_for(tiny_model, CHECKPOINTS, identity="w" * 16)
    assert (
        fork_server.start(config, environment(packed), packed / "log").wait()
        == ExitCode.DONE
    )
    return adapter_digest(packed, "w" * 16)


Start = Callable[..., ForkedStage]


@pytest.fixture
def start(fork_server: ForkServer, tiny_model: Path, workspace: Path) -> Start:
    """Start an attempt of the stage, with its own termination message and log."""

    def start(number: int, rule: dict[str, object], **options: object) -> ForkedStage:
        variables = replace(
            environment(workspace),
            pipeline_uid="p",
            attempt=number,
            termination_log=workspace / f"termination-{number}.json",
            progress_file=None,
        )
        config = config_for(tiny_model, rule)
        return fork_server.start(
            config, variables, workspace / f"log-{number}", constants=FAST, **options
        )

    return start


def content_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


FREEZES: dict[str, tuple[str, int, dict[str, object]]] = {
    "before the lock": (f"{TRAINER}.runtime.locks.try_lock", 1, CHECKPOINTS),
    "after the lock": (f"{TRAINER}.runtime.stage_folder.take_token", 1, CHECKPOINTS),
    "before its token": (f"{TRAINER}.runtime.fence._create", 1, CHECKPOINTS),
    "before it cleans up": (
        f"{TRAINER}.training.checkpoints.manager._prepare_folder",
        1,
        CHECKPOINTS,
    ),
    "before it resumes metrics": (
        f"{TRAINER}.tracking.appended_file.write_durably",
        1,
        CHECKPOINTS,
    ),
    "in a step": (f"{TRAINER}.training.loop.clip_gradients", 3, CHECKPOINTS),
    "before a save": (
        f"{TRAINER}.training.checkpoints.manager.write_files",
        1,
        CHECKPOINTS,
    ),
    "in a save": (
        f"{TRAINER}.training.checkpoints.format.save_tensors",
        2,
        CHECKPOINTS,
    ),
    "before the rename of a save": (
        f"{TRAINER}.runtime.artifacts.move_into_place",
        1,
        CHECKPOINTS,
    ),
    "after the rename of a save": (
        f"{TRAINER}.runtime.artifacts.sync_folder",
        1,
        CHECKPOINTS,
    ),
    "in its output": (
        f"{TRAINER}.training.methods.trainable.save_tensors",
        1,
        OUTPUT_ONLY,
    ),
    "before the rename of its output": (
        f"{TRAINER}.runtime.artifacts.move_into_place",
        1,
        OUTPUT_ONLY,
    ),
    "before its result": (f"{TRAINER}.runtime.entrypoint.write_result", 1, OUTPUT_ONLY),
    "in its result": (f"{TRAINER}.files.temporary_name", 4, OUTPUT_ONLY),
}


@pytest.mark.parametrize("moment", FREEZES)
def test_frozen_attempt_publishes_nothing_when_it_wakes_up(
    moment: str, workspace: Path, undisturbed: str, start: Start
) -> None:
    function, number, rule = FREEZES[moment]
    check_zombie(workspace, undisturbed, start, rule, freeze=(function, number))


@pytest.mark.parametrize(
    "moment", ["before a save", "before the rename of a save", "before its result"]
)
def test_fence_holds_without_locks(
    moment: str, workspace: Path, undisturbed: str, start: Start
) -> None:
    function, number, rule = FREEZES[moment]
    check_zombie(
        workspace, undisturbed, start, rule, freeze=(function, number), locks=False
    )


def check_zombie(
    workspace: Path,
    undisturbed: str,
    start: Start,
    rule: dict[str, object],
    *,
    locks: bool = True,
    **freeze: object,
) -> None:
    """Freeze attempt 1, let attempt 2 finish, wake attempt 1: it ends with 75 and has changed no byte."""
    zombie = start(1, rule, locks=locks, **freeze)
    try:
        assert zombie.until(zombie.is_frozen)
        assert start(2, rule, locks=locks).wait() == ExitCode.DONE, (
            workspace / "log-2"
        ).read_text()
        before = content_of(stage_folder(workspace))
        assert adapter_digest(workspace) == undisturbed
    finally:
        zombie.kill(signal.SIGCONT)
    assert zombie.wait() == ExitCode.INTERRUPTED, (workspace / "log-1").read_text()
    assert content_of(stage_folder(workspace)) == before
    message = TerminationMessage.model_validate_json(
        (workspace / "termination-1.json").read_bytes()
    )
    assert message.interruption
    assert (
        message.interruption.message
        == "attempt 1 was replaced by attempt 2: it ends and publishes nothing"
    )
    unfinished = [
        path
        for path in stage_folder(workspace).rglob(".*")
        if path.name not in {".attempts", ".lock", ".pipelines"}
    ]
    assert unfinished == []
