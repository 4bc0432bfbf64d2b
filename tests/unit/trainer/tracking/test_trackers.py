"""Trackers that are down, slow or missing: one line in the log, and no time of the stage."""

import sys
import threading
import time
from typing import ClassVar

import pytest

from finetune_trainer.contract import Environment, ExitCode, Tracking
from finetune_trainer.contract.metric_rows import Row
from finetune_trainer.runtime.errors import ConfigInvalid, Interrupted
from finetune_trainer.tracking import trackers as module
from finetune_trainer.tracking.mlflow import MlflowTracker
from finetune_trainer.tracking.port import ReportEnd, Tracker
from finetune_trainer.tracking.registry import TRACKERS, _requested
from finetune_trainer.tracking.trackers import Trackers
from finetune_trainer.tracking.training_metrics import TrainingMetrics


class MemoryTracker(Tracker):
    """A tracker that keeps what it gets, as the port asks; each call may wait for `released` or raise."""

    name: ClassVar[str] = "memory"
    package: ClassVar[str] = "json"

    def __init__(self, error=None):
        self.steps = []
        self.outcome = None
        self.error = error
        self.released = threading.Event()
        self.released.set()

    def log_rows(self, rows):
        assert self.released.wait(10)
        if self.error:
            raise self.error
        self.steps += [row.step for row in rows if row.step not in self.steps]

    def log_scores(self, scores):
        """Keep none: no test here logs scores."""

    def register_model(self, uri, digest):
        """Keep none: no test here publishes a model."""

    def log_card(self, card):
        """Keep none: no test here publishes a model."""

    def close(self, end):
        self.outcome = end


@pytest.fixture
def short_limit(monkeypatch):
    monkeypatch.setattr(module, "CLOSE_SECONDS", dict.fromkeys(ReportEnd, 0.2))


def rows(count):
    return [Row(step, 1.0, {"loss": 1.0}) for step in range(1, count + 1)]


def test_every_row_arrives_before_the_block_ends():
    tracker = MemoryTracker()
    with Trackers("train", [tracker]) as trackers:
        trackers.log_rows(rows(3))
        trackers.log_all_rows(rows(5))
    assert tracker.steps == [1, 2, 3, 4, 5]
    assert tracker.outcome == ReportEnd.FINISHED


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(Interrupted(), ReportEnd.INTERRUPTED), (ConfigInvalid("x"), ReportEnd.FAILED)],
)
def test_outcome_is_that_of_the_block(error, outcome):
    tracker = MemoryTracker()
    trackers = Trackers("train", [tracker])
    trackers.log_rows(rows(1))
    with pytest.raises(type(error)), trackers:
        raise error
    assert tracker.outcome is outcome


def test_failing_tracker_costs_one_line_and_the_other_gets_all(capsys):
    down = MemoryTracker(ConnectionError("refused\nsecond line"))
    up = MemoryTracker()
    with Trackers("train", [down, up]) as trackers:
        for count in range(1, 9):
            trackers.log_all_rows(rows(count))
    assert len(up.steps) == 8
    [line] = capsys.readouterr().out.splitlines()
    assert "tracking.memory failed: ConnectionError: refused;" in line


def test_slow_tracker_delays_neither_a_call_nor_the_end(short_limit, capsys):
    tracker = MemoryTracker()
    tracker.released.clear()
    began = time.monotonic()
    with Trackers("train", [tracker]) as trackers:
        for count in range(1, 1000):
            trackers.log_rows(rows(3)[:count])
    assert time.monotonic() - began < 2
    assert "tracking.memory is too slow" in capsys.readouterr().out
    tracker.released.set()


def test_busy_tracker_gets_skipped_rows_with_the_last_call():
    tracker = MemoryTracker()
    tracker.released.clear()
    with Trackers("train", [tracker]) as trackers:
        for count in (1, 2, 3):
            trackers.log_rows(rows(count))
        trackers.log_all_rows(rows(4))
        tracker.released.set()
    assert tracker.steps == [1, 2, 3, 4]


def test_rows_are_sent_when_training_cannot_repeat_them(tmp_path):
    tracker = MemoryTracker()
    metrics = TrainingMetrics(tmp_path, Trackers("train", [tracker]), steps=9)
    metrics.resume(0)
    for step in range(1, 8):
        metrics.record_step(step, {"loss": 1.0})
    metrics.send(5)
    with pytest.raises(Interrupted), metrics:
        raise Interrupted
    assert tracker.steps == [1, 2, 3, 4]


def test_long_training_logs_every_nth_step_and_validations(tmp_path):
    tracker = MemoryTracker()
    metrics = TrainingMetrics(tmp_path, Trackers("train", [tracker]), steps=30_000)
    with metrics:
        metrics.resume(0)
        for step in range(1, 13):
            metrics.record_step(step, {"loss": 1.0})
        metrics.record(10, {"validation_loss": 1.0})
    assert tracker.steps == [3, 6, 9, 10, 12]


@pytest.mark.parametrize("kind", TRACKERS, ids=lambda kind: kind.name)
def test_missing_package_is_an_invalid_config_with_the_fix(
    kind, new_run, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, kind.package, None)
    uri = {
        "mlflow": {"uri": "http://x"},
        "wandb": {"project": "x"},
        "tensorboard": {},
    }
    settings = Tracking.model_validate({kind.name: uri[kind.name]})
    with pytest.raises(
        ConfigInvalid, match=rf"install finetune-operator\[{kind.name}\]"
    ) as raised:
        list(_requested(TRACKERS, settings, new_run(), Environment(tmp_path)))
    assert raised.value.exit_code == ExitCode.CONFIG


def test_server_that_is_down_ends_the_call_within_the_limit(
    new_run, tmp_path, capsys, monkeypatch
):
    settings = Tracking.model_validate({"mlflow": {"uri": "http://127.0.0.1:9"}}).mlflow
    assert settings
    tracker = MlflowTracker(settings, new_run(), Environment(tmp_path))
    with Trackers("train", [tracker]) as trackers:
        trackers.log_rows(rows(3))
    assert (
        len(
            [
                line
                for line in capsys.readouterr().out.splitlines()
                if "tracking.mlflow" in line
            ]
        )
        == 1
    )
