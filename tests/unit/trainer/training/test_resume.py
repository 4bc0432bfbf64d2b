"""Training processes that are really killed: the adapter always has the bytes of an uninterrupted run."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.trainer.forkserver import REPOSITORY, ForkServer
from support.trainer.training import (
    PREPARED,
    STEPS_OF_KILLED,
    adapter_digest,
    documents,
    environment,
    pairs,
    random_kills,
    stage_folder,
    stop_code,
    train_config,
    write_rows,
)

from finetune_trainer.contract import ExitCode, TerminationMessage

STEPS = 24
UNPACKED = "q" * 16
"""Identity of a prepare stage whose rows hold one document each."""
PAIRS = "s" * 16
"""Identity of a prepare stage whose rows are pairs."""
SLOW_DISK = 0.01
"""Seconds that each fsync takes. A checkpoint needs eight of them, so that kills hit unfinished checkpoints."""


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    workspace = tmp_path_factory.mktemp("packed")
    write_rows(workspace, documents(60), documents(8, seed=5))
    write_rows(
        workspace, documents(60), documents(8, seed=5), prepared=UNPACKED, packing=False
    )
    write_rows(workspace, pairs(60), pairs(8, seed=5), prepared=PAIRS, pairs=True)
    return workspace


@pytest.fixture(scope="module")
def config(tiny_model):
    return train_config(
        tiny_model, max_steps=STEPS, eval_steps=7, checkpoint={"every_steps": 3}
    )


@pytest.fixture(scope="module")
def train_uninterrupted(fork_server, packed):
    """A function that trains without kills, in a folder of its own, and returns the digest of the adapter."""

    def train(config, identity):
        other = config.model_copy(update={"identity": identity})
        assert (
            fork_server.start(other, environment(packed), packed / "log").wait()
            == ExitCode.DONE
        )
        return adapter_digest(packed, identity)

    return train


@pytest.fixture(scope="module")
def uninterrupted(train_uninterrupted, config):
    return train_uninterrupted(config, "w" * 16)


@pytest.fixture
def workspace(packed, tmp_path):
    return new_workspace(packed, tmp_path / "workspace")


def new_workspace(packed, workspace):
    workspace.mkdir()
    shutil.copytree(packed / "prepare", workspace / "prepare")
    return workspace


def reported_step(workspace: Path) -> int:
    """Return the step of the progress file, 0 if there is none."""
    try:
        return json.loads((workspace / "progress.json").read_text())["step"]
    except (OSError, ValueError):
        return 0


def is_saving(workspace: Path) -> bool:
    """Return whether there is an unfinished checkpoint."""
    return any((stage_folder(workspace) / "checkpoints").glob(".step-*"))


def message_in(workspace: Path) -> TerminationMessage:
    text = (workspace / "termination.json").read_text()
    return TerminationMessage.model_validate_json(text)


class KilledTraining:
    """A train stage in a workspace of its own that is started and killed repeatedly, then finished."""

    def __init__(self, server: ForkServer, config, workspace: Path) -> None:
        self.server = server
        self.config = config
        self.workspace = workspace
        self.codes: list[int] = []
        self.constants: dict[str, object] = {}

    def start(self):
        (self.workspace / "progress.json").unlink(missing_ok=True)
        options = {"slow_disk": SLOW_DISK, "constants": self.constants}
        return self.server.start(
            self.config, environment(self.workspace), self.workspace / "log", **options
        )

    def kill(self, moment: str, after: float, number: int) -> int:
        """Start the stage, wait for a moment and `after` seconds more, send the signal; return the exit code.

        Without a signal if the stage ended before the moment.
        """
        process = self.start()
        match moment:
            case "start":
                reached = True
            case "saving":
                reached = process.until(lambda: is_saving(self.workspace))
            case "training":
                first = reported_step(self.workspace)
                reached = process.until(lambda: reported_step(self.workspace) > first)
        if reached:
            time.sleep(after)
            process.kill(number)
        self.codes.append(process.wait())
        return self.codes[-1]

    def finish(self) -> str:
        code = self.start().wait()
        assert code == ExitCode.DONE, (self.workspace / "log").read_text()
        return adapter_digest(self.workspace)


@pytest.fixture(scope="module")
def new_training(fork_server, packed, config, tmp_path_factory):
    return lambda config=config: KilledTraining(
        fork_server,
        config,
        new_workspace(packed, tmp_path_factory.mktemp("killed") / "workspace"),
    )


def lora(**changes):
    return {"lora": {"rank": 4, "alpha": 8, "dropout": 0.1} | changes}


DPO = {"objective": "DPO", "dpo": {"beta": 0.5, "label_smoothing": 0.1}}
DECAYING = {
    "learning_rate": 1e-2,
    "scheduler": "WarmupStableDecay",
    "warmup_fraction": 0.2,
    "decay_fraction": 0.5,
    "min_learning_rate_fraction": 0.1,
}
ALL = os.environ.get("TRAINING") == "all"
DEFAULTS = (
    "LoRA",
    "DoRA",
    "LoRA-whole-layers-noise",
    "QLoRA",
    "Full",
    "Full-8-bit",
    "DPO-LoRA-noise",
    "DPO-from-adapter",
)
"""The methods whose training is killed in every run of the tests, each part of a checkpoint in one of them."""
METHODS = {
    **{variant: lora(variant=variant) for variant in ("LoRA", "RsLoRA", "DoRA")},
    **{
        f"{variant}-unpacked": lora(variant=variant)
        for variant in ("LoRA", "RsLoRA", "DoRA")
    },
    "LoRA-whole-layers-noise": lora(modules_to_save=["lm_head"])
    | {"neftune_noise_alpha": 5},
    "QLoRA": {"method": "QLoRA", "dtype": "BF16"} | lora(),
    "Full": {"method": "Full", "dtype": "BF16", "lora": None, "neftune_noise_alpha": 5},
    "Full-8-bit": {
        "method": "Full",
        "lora": None,
        "optimizer": {"name": "AdamW8Bit", "learning_rate": 1e-3},
    },
    "DPO-LoRA-noise": DPO | lora() | {"neftune_noise_alpha": 5},
    "DPO-QLoRA": DPO | {"method": "QLoRA", "dtype": "BF16"} | lora(),
    "DPO-from-adapter": DPO,
    "LoRA-decaying": lora() | {"optimizer": DECAYING},
    "DPO-Full": DPO | {"method": "Full", "dtype": "BF16", "lora": None},
}


@pytest.fixture(scope="module")
def start(packed, uninterrupted):
    """Settings to start from the adapter of the uninterrupted training."""
    return {
        "start_from": {"uri": f"file://{stage_folder(packed, 'w' * 16) / 'output'}"},
        "lora": None,
    }


@pytest.fixture(scope="module", params=METHODS if ALL else DEFAULTS)
def method(request, tiny_model, train_uninterrupted, start):
    """The config of one method, and the digest of its weights after a training without kills."""
    changes = start if request.param.endswith("from-adapter") else {}
    changes = (
        changes
        | {
            "max_steps": STEPS_OF_KILLED,
            "eval_steps": 7,
            "checkpoint": {"every_steps": 3},
        }
        | METHODS[request.param]
    )
    unpacked = UNPACKED if request.param.endswith("unpacked") else PREPARED
    prepared = PAIRS if request.param.startswith("DPO") else unpacked
    config = train_config(tiny_model, **changes).model_copy(
        update={"prepare": prepared}
    )
    return config, train_uninterrupted(config, request.param)


def test_random_kills_do_not_change_the_weights(new_training, method):
    config, uninterrupted = method
    training = new_training(config)
    training.kill("start", 0.2, signal.SIGTERM)
    for moment, after, number in random_kills(
        ("saving", "training"), longest_delay=0.05
    ):
        assert training.kill(moment, after, number) == stop_code(number)
    assert training.finish() == uninterrupted
    assert "corrupt" not in (training.workspace / "log").read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_kills_in_the_reference_do_not_change_the_weights(
    tiny_model, new_training, train_uninterrupted, number
):
    config = train_config(tiny_model, max_steps=6, **DPO, **lora()).model_copy(
        update={"prepare": PAIRS}
    )
    training = new_training(config)
    training.constants = {"finetune_trainer.training.objectives.reference.PART_ROWS": 8}
    reference = stage_folder(training.workspace) / "reference"
    counts = [0]
    for _ in range(3):
        process = training.start()
        assert process.until(lambda: len([*reference.glob("*-*.json")]) > counts[-1])
        process.kill(number)
        assert process.wait() == stop_code(number)
        counts.append(len([*reference.glob("*-*.json")]))
    assert 0 < counts[1] < counts[2] < counts[3] < 17
    assert training.finish() == train_uninterrupted(config, f"reference-{number}")
    assert len([*reference.glob("*-*.json")]) == 17


def test_twelve_consecutive_kills_do_not_change_the_adapter(
    new_training, uninterrupted
):
    """The kills alternate between writing a checkpoint and training between two checkpoints."""
    training = new_training()
    for attempt in range(12):
        moment = ("saving", "training")[attempt % 2]
        training.kill(
            moment,
            0.004 * attempt,
            (signal.SIGKILL, signal.SIGTERM, signal.SIGTERM)[attempt % 3],
        )
        if training.codes[-1] == ExitCode.DONE:
            break
    assert len(training.codes) >= 10
    assert {ExitCode.INTERRUPTED, -signal.SIGKILL} <= set(training.codes)
    assert training.finish() == uninterrupted


def test_sigterm_during_a_save_waits_for_the_checkpoint(new_training, uninterrupted):
    training = new_training()
    assert training.kill("saving", 0, signal.SIGTERM) == ExitCode.INTERRUPTED
    message = message_in(training.workspace)
    assert message.interruption
    assert message.interruption.saved_step
    assert message.interruption.step == message.interruption.saved_step >= 3
    folders = sorted(
        folder.name
        for folder in (stage_folder(training.workspace) / "checkpoints").iterdir()
    )
    assert folders[-1] == f"step-{message.interruption.step:08d}"
    assert "step-00000003" in folders
    assert training.finish() == uninterrupted


def test_repeated_sigterm_does_not_corrupt_anything(new_training, uninterrupted):
    training = new_training()
    process = training.start()
    process.until(lambda: reported_step(training.workspace) > 4)
    while process.is_running():
        process.kill(signal.SIGTERM)
        time.sleep(0.002)
    assert process.wait() == ExitCode.INTERRUPTED
    message_in(training.workspace)
    assert training.finish() == uninterrupted


def test_disk_too_small_for_checkpoints_does_not_stop_training(
    fork_server, config, uninterrupted, workspace
):
    process = fork_server.start(
        config, environment(workspace), workspace / "log", largest_file=30_000
    )
    assert process.wait() == ExitCode.DONE
    assert (
        "optimizer.safetensors: Error while serializing: I/O error: File too large"
        in (workspace / "log").read_text()
    )
    assert adapter_digest(workspace) == uninterrupted


def test_disk_too_small_for_the_last_checkpoint_is_a_failure(
    fork_server, config, workspace
):
    process = fork_server.start(
        config, environment(workspace), workspace / "log", largest_file=30_000
    )
    process.until(lambda: reported_step(workspace) > 2)
    process.kill(signal.SIGTERM)
    assert process.wait() == ExitCode.UNAVAILABLE
    message = message_in(workspace)
    assert message.failure
    assert "training will start from the beginning" in message.failure.message


def start_program(config, workspace: Path) -> subprocess.Popen:
    """Start the trainer as its image does, with its imports."""
    (workspace / "progress.json").unlink(missing_ok=True)
    variables = environment(workspace).variables() | {
        "FINETUNE_CONFIG": config.model_dump_json(by_alias=True),
        "PYTHONPATH": str(REPOSITORY / "trainer"),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "finetune_trainer", "train"], env=os.environ | variables
    )


def test_program_stops_on_sigterm_during_import_and_training(
    fork_server, config, uninterrupted, workspace
):
    importing = start_program(config, workspace)
    while (
        b"finetune_trainer" not in Path(f"/proc/{importing.pid}/cmdline").read_bytes()
    ):
        time.sleep(0.01)
    while "libtorch" not in Path(f"/proc/{importing.pid}/maps").read_text():
        time.sleep(0.01)
    signalled = time.monotonic()
    importing.terminate()
    assert importing.wait(20) == ExitCode.INTERRUPTED
    assert time.monotonic() - signalled < 5
    assert message_in(workspace).interruption

    training = start_program(config, workspace)
    while reported_step(workspace) < 2:
        assert training.poll() is None
        time.sleep(0.005)
    # Its import takes seconds, and a LoRA of 16 bits does not use it.
    loaded = Path(f"/proc/{training.pid}/maps").read_text()
    assert "libtorch" in loaded
    assert "libbitsandbytes" not in loaded
    training.terminate()
    assert training.wait(20) == ExitCode.INTERRUPTED
    first = message_in(workspace)
    assert first.interruption
    assert first.interruption.saved_step
    assert first.progress
    assert (first.progress.start_step, first.progress.step) == (
        0,
        first.interruption.step,
    )

    assert KilledTraining(fork_server, config, workspace).finish() == uninterrupted
    last = message_in(workspace)
    assert last.progress
    assert last.progress.start_step == first.interruption.saved_step  # no step was lost
