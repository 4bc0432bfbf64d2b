from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.trainer.mlflow_server import MlflowServer, serve_mlflow

from finetune_trainer.contract.metric_rows import Row
from finetune_trainer.tracking.port import TrackedRun


@pytest.fixture
def mlflow() -> Iterator[MlflowServer]:
    with serve_mlflow() as server:
        yield server


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_TRACKING_TOKEN", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def new_run(tmp_path: Path) -> Callable[..., TrackedRun]:
    """A function that returns the run as a stage of it sees it."""

    def new(stage: str = "train") -> TrackedRun:
        folder = tmp_path / stage
        folder.mkdir(exist_ok=True)
        params = {"optimizer.learningRate": "0.0002", "lora.rank": "16"}
        return TrackedRun(
            "a" * 16, "team/support", params, stage, folder, tmp_path / "train"
        )

    return new


@pytest.fixture
def rows() -> list[Row]:
    """The rows of 250 steps; every tenth has a validation loss."""
    more = [
        {"validation_loss": 2 / step} if step % 10 == 0 else {}
        for step in range(1, 251)
    ]
    return [
        Row(step, 1e9 + step, {"loss": 1 / step, **more[step - 1]})
        for step in range(1, 251)
    ]
