"""Real processes, really killed: whatever happens to them, the adapter has the undisturbed run's bytes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.forkserver import REPOSITORY, ForkServer
from support.training import adapter_digest, documents, environment, stage_folder, train_config, write_rows

from finetune_trainer.contract import ExitCode, TerminationMessage

STEPS = 24
SLOW_DISK = 0.01
"""Seconds an fsync takes: nine of them to a checkpoint, so that kills meet half-written ones."""


@pytest.fixture(scope="module")
def server():
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    workspace = tmp_path_factory.mktemp("packed")
    write_rows(workspace, documents(60), documents(8, seed=5))
    return workspace


@pytest.fixture(scope="module")
def config(tiny_model):
    return train_config(tiny_model, max_steps=STEPS, validate_every_steps=7, checkpoint={"every_steps": 3})


@pytest.fixture(scope="module")
def undisturbed(server, packed, config):
    whole = config.model_copy(update={"identity": "w" * 16})
    assert server.start(whole, environment(packed), packed / "log").wait() == ExitCode.DONE
    return adapter_digest(packed, "w" * 16)


@pytest.fixture
def workspace(packed, tmp_path):
    return fresh(packed, tmp_path / "workspace")


def fresh(packed, workspace):
    workspace.mkdir()
    shutil.copytree(packed / "prepare", workspace / "prepare")
    return workspace


def step_of(workspace: Path) -> int:
    try:
        return json.loads((workspace / "progress.json").read_text())["step"]
    except (OSError, ValueError):
        return 0


def half_written(workspace: Path) -> bool:
    return any((stage_folder(workspace) / "checkpoints").glob(".step-*"))


class Ordeal:
    """Runs the stage in a workspace over and over, killing it each time, until it is done."""

    def __init__(self, server: ForkServer, config, workspace: Path) -> None:
        self.server, self.config, self.workspace = server, config, workspace
        self.codes: list[int] = []

    def start(self):
        (self.workspace / "progress.json").unlink(missing_ok=True)
        return self.server.start(self.config, environment(self.workspace), self.workspace / "log", slow_disk=SLOW_DISK)

    def kill(self, moment: str, after: float, number: int) -> int:
        """Start, wait for a moment and some seconds more, kill; give the exit code."""
        process = self.start()
        match moment:
            case "start":
                come = True
            case "saving":
                come = process.until(lambda: half_written(self.workspace))
            case "training":
                begin = step_of(self.workspace)
                come = process.until(lambda: step_of(self.workspace) > begin)
        if come:
            time.sleep(after)
            process.kill(number)
        self.codes.append(process.wait())
        return self.codes[-1]

    def finish(self) -> str:
        code = self.start().wait()
        assert code == ExitCode.DONE, (self.workspace / "log").read_text()
        return adapter_digest(self.workspace)


@pytest.fixture(scope="module")
def begin(server, packed, config, tmp_path_factory):
    return lambda: Ordeal(server, config, fresh(packed, tmp_path_factory.mktemp("ordeal") / "workspace"))


kills = st.lists(
    st.tuples(
        st.sampled_from(["start", "saving", "training"]),
        st.floats(0, 0.4),
        st.sampled_from([signal.SIGTERM, signal.SIGKILL]),
    ),
    min_size=2,
    max_size=4,
)


@settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
@given(kills=kills)
def test_any_kills_at_any_moments_end_in_the_same_bytes(begin, undisturbed, kills):
    ordeal = begin()
    for moment, after, number in kills:
        code = ordeal.kill(moment, after, number)
        assert code in {ExitCode.DONE, ExitCode.INTERRUPTED, -signal.SIGKILL}
    assert ordeal.finish() == undisturbed
    assert "broken" not in (ordeal.workspace / "log").read_text()


def test_twelve_kills_in_a_row_while_saving_and_between_end_in_the_same_bytes(begin, undisturbed):
    ordeal = begin()
    for turn in range(12):
        moment = ("saving", "training")[turn % 2]
        ordeal.kill(moment, 0.004 * turn, (signal.SIGKILL, signal.SIGTERM, signal.SIGTERM)[turn % 3])
        if ordeal.codes[-1] == ExitCode.DONE:
            break
    assert len(ordeal.codes) >= 10
    assert {ExitCode.INTERRUPTED, -signal.SIGKILL} <= set(ordeal.codes)
    assert ordeal.finish() == undisturbed


def test_a_stop_while_a_checkpoint_is_written_waits_for_it(begin, undisturbed):
    ordeal = begin()
    assert ordeal.kill("saving", 0, signal.SIGTERM) == ExitCode.INTERRUPTED
    message = TerminationMessage.model_validate_json((ordeal.workspace / "termination.json").read_text())
    assert message.interruption.step == message.interruption.saved_step >= 3
    folders = sorted(folder.name for folder in (stage_folder(ordeal.workspace) / "checkpoints").iterdir())
    assert folders[-1] == f"step-{message.interruption.step:08d}"
    assert "step-00000003" in folders
    assert ordeal.finish() == undisturbed


def test_impatient_signals_break_nothing(begin, undisturbed):
    ordeal = begin()
    process = ordeal.start()
    process.until(lambda: step_of(ordeal.workspace) > 4)
    while process.is_running():
        process.kill(signal.SIGTERM)
        time.sleep(0.002)
    assert process.wait() == ExitCode.INTERRUPTED
    TerminationMessage.model_validate_json((ordeal.workspace / "termination.json").read_text())
    assert ordeal.finish() == undisturbed


def test_a_disk_too_small_for_checkpoints_does_not_stop_the_training(server, config, undisturbed, workspace):
    process = server.start(config, environment(workspace), workspace / "log", largest_file=30_000)
    assert process.wait() == ExitCode.DONE
    assert (
        "optimizer.safetensors: Error while serializing: I/O error: File too large" in (workspace / "log").read_text()
    )
    assert adapter_digest(workspace) == undisturbed


def test_a_disk_too_small_for_the_last_checkpoint_is_a_failure(server, config, workspace):
    process = server.start(config, environment(workspace), workspace / "log", largest_file=30_000)
    process.until(lambda: step_of(workspace) > 2)
    process.kill(signal.SIGTERM)
    assert process.wait() == ExitCode.UNAVAILABLE
    message = TerminationMessage.model_validate_json((workspace / "termination.json").read_text())
    assert "enlarge spec.workspace.size; training goes on from the beginning" in message.failure.message


def start_program(config, workspace: Path) -> subprocess.Popen:
    (workspace / "progress.json").unlink(missing_ok=True)
    variables = environment(workspace).variables() | {
        "FINETUNE_CONFIG": config.model_dump_json(by_alias=True),
        "PYTHONPATH": str(REPOSITORY / "trainer"),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen([sys.executable, "-m", "finetune_trainer", "train"], env=os.environ | variables)


def test_the_program_itself_can_be_stopped_while_it_imports_and_while_it_trains(server, config, undisturbed, workspace):
    importing = start_program(config, workspace)
    while b"finetune_trainer" not in Path(f"/proc/{importing.pid}/cmdline").read_bytes():
        time.sleep(0.01)
    while "libtorch" not in Path(f"/proc/{importing.pid}/maps").read_text():
        time.sleep(0.01)
    asked = time.monotonic()
    importing.terminate()
    assert importing.wait(20) == ExitCode.INTERRUPTED
    assert time.monotonic() - asked < 5
    assert TerminationMessage.model_validate_json((workspace / "termination.json").read_text()).interruption

    training = start_program(config, workspace)
    while step_of(workspace) < 2:
        assert training.poll() is None
        time.sleep(0.005)
    training.terminate()
    assert training.wait(20) == ExitCode.INTERRUPTED
    first = TerminationMessage.model_validate_json((workspace / "termination.json").read_text())
    assert first.interruption.saved_step
    assert (first.progress.start_step, first.progress.step) == (0, first.interruption.step)

    assert Ordeal(server, config, workspace).finish() == undisturbed
    last = TerminationMessage.model_validate_json((workspace / "termination.json").read_text())
    assert last.progress.start_step == first.interruption.saved_step  # nothing was lost, and nobody had to ask
