"""Progress reports of a stage; a failing report never ends the stage."""

import json
import socket
import urllib.request
from pathlib import Path

import pytest

from finetune_trainer.contract import Environment
from finetune_trainer.runtime.errors import ServiceUnavailable
from finetune_trainer.runtime.progress.progress import ProgressReporter


class FullDiskStream:
    """A stdout redirected to a file on a full disk."""

    def write(self, _text: str) -> None:
        raise OSError(28, "No space left on device")

    def isatty(self) -> bool:
        return False


def test_failing_progress_writes_do_not_end_the_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reporter = ProgressReporter(
        "train",
        Environment(tmp_path, progress_file=tmp_path / "missing" / "progress.json"),
    )
    monkeypatch.setattr("sys.stdout", FullDiskStream())
    reporter.update(step=3, note="training")
    reporter.flush()
    assert reporter.now.step == 3


def test_metrics_and_progress_are_served_on_the_metrics_port(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    reporter = ProgressReporter("train", Environment(tmp_path, metrics_port=port))
    reporter.update(step=7, loss=1.5)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
        assert 'finetune_stage_step{stage="train"} 7.0' in response.read().decode()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/progress") as response:
        assert json.load(response)["loss"] == 1.5
    with pytest.raises(
        ServiceUnavailable, match=f"FINETUNE_METRICS_PORT: cannot listen on port {port}"
    ):
        ProgressReporter("train", Environment(tmp_path, metrics_port=port))


def test_users_metrics_port_applies_if_the_environment_has_none(tmp_path: Path) -> None:
    variables = Environment(tmp_path).variables()
    assert (
        Environment.read({"FINETUNE_METRICS_PORT": "9100"} | variables).metrics_port
        == 9100
    )
    assert (
        Environment.read(Environment(tmp_path, metrics_port=9).variables()).metrics_port
        == 9
    )
