"""A stage that hangs ends by itself, and a slow stage does not."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from support.trainer import watched_stages
from support.trainer.training import environment
from support.trainer.watched_stages import exit_code_of, started

from finetune_trainer.contract import ExitCode, TerminationMessage
from finetune_trainer.runtime.watchdog import WORKING_BYTES

LIMIT = 4
"""Seconds without a sign of work, longer than a start takes on a busy machine."""
STEP = "finetune_trainer.training.loop.train_step"
GATHER = "finetune_trainer.training.distributed.sharding.whole"
SHARDED = {"processes_per_node": 2, "parallelism": "FSDP"}


def hanging(new_training, options, **recipe):
    training = new_training(options, **{"max_steps": 8, **recipe})
    training.max_silence_seconds = LIMIT
    return training


def assert_ended_by_watchdog(training, process):
    started = time.monotonic()
    assert process.wait() == ExitCode.UNAVAILABLE
    assert time.monotonic() - started < 10 * LIMIT
    message = training.message
    assert message.failure.message.startswith(f"train: no sign of work for {LIMIT} s")
    assert "train.maxSilenceSeconds" in message.failure.message
    assert "most recent call first" in training.log
    return message


def test_blocked_step_ends_and_the_next_attempt_resumes(new_training):
    training = hanging(new_training, {"hang": (STEP, 6)})
    message = assert_ended_by_watchdog(training, training.start())
    assert message.progress.step == 5
    assert "in wait_for_ever" in training.log
    training.options = {}
    training.run()
    assert "resumed from step" in training.log


def test_hang_that_keeps_pythons_lock_ends_the_process(new_training):
    """The watchdog cannot run then. A thread of C ends the process, without a message."""
    training = hanging(new_training, {"hang_in_c": (STEP, 3)})
    assert training.start().wait() == 1
    assert "Timeout (0:00:08)" in training.log


def test_slow_training_is_left_alone(new_training):
    training = hanging(new_training, {"slow": (STEP, LIMIT / 4)})
    started = time.monotonic()
    training.run()
    assert time.monotonic() - started > LIMIT


def test_frozen_process_ends_a_training_of_two(new_training):
    training = hanging(new_training, {}, processes_per_node=2, max_steps=400)
    process = training.start()
    process.until(lambda: training.step() > 5)
    other = process.other_ranks()[0]
    os.kill(other, signal.SIGSTOP)
    assert_ended_by_watchdog(training, process)
    assert is_gone(other)


def test_gathering_that_never_ends_ends_the_training(new_training):
    """Both processes wait in the gathering of the first checkpoint's weights."""
    training = hanging(new_training, {"hang": (GATHER, 1)}, **SHARDED)
    message = assert_ended_by_watchdog(training, training.start())
    assert message.progress.step == 3


def is_gone(pid):
    """Return whether a process ends soon; the kernel kills it when its parent has ended."""
    deadline = time.monotonic() + 10
    stat = Path(f"/proc/{pid}/stat")
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture
def place(tmp_path):
    return replace(environment(tmp_path), max_silence_seconds=1, progress_file=None)


def test_stage_that_hangs_before_its_first_report_ends(place):
    assert exit_code_of(watched_stages.hang, place) == ExitCode.UNAVAILABLE
    message = TerminationMessage.model_validate_json(place.termination_log.read_bytes())
    assert message.failure
    assert message.failure.message.startswith("push: no sign of work for 1 s. ")


def test_reports_keep_the_stage_alive(place):
    assert exit_code_of(watched_stages.report, place) == 0


def test_bytes_that_a_library_reads_keep_the_stage_alive(place):
    """A library loads a model in a single call, which reports nothing."""
    place.termination_log.with_name("model").write_bytes(bytes(WORKING_BYTES))
    assert exit_code_of(watched_stages.read, place) == 0


def test_stage_without_a_limit_may_be_silent(place):
    assert exit_code_of(watched_stages.be_silent, place) == 0


def test_frozen_stage_is_given_time_to_work(place):
    """A laptop that slept, or a process that was stopped, had no time for a sign of work."""
    process = started(watched_stages.work_briefly, place)
    assert process.pid
    begun = place.termination_log.with_name("begun")
    deadline = time.monotonic() + 60
    while not begun.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(1.6)
    os.kill(process.pid, signal.SIGCONT)
    process.join(60)
    assert process.exitcode == 0


def test_two_ends_at_once_leave_one_message(place):
    """The watchdog finds the silence while the main thread already writes another message."""
    assert exit_code_of(watched_stages.end_twice, place) == 2
    assert "first" in place.termination_log.read_text()
