"""The progress of a training whose result is reused: an earlier attempt has written its rows."""

import json
from pathlib import Path

from finetune_trainer.contract import TrainResult
from finetune_trainer.stages.train import progress_of


def a_result(steps: int) -> TrainResult:
    return TrainResult(
        identity="a", digest="sha256:0", steps=steps, loss=1.0, best_step=1, tokens=1
    )


def write_rows(folder: Path, *rows: dict[str, float]) -> None:
    lines = [
        json.dumps({"step": step, "time": 1.0, **row})
        for step, row in enumerate(rows, start=1)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(lines))


def test_reused_training_has_its_curve_and_accuracy(tmp_path: Path) -> None:
    write_rows(
        tmp_path,
        {"loss": 4.0, "rewards/accuracies": 0.25},
        {"loss": 2.0, "validation_loss": 3.0, "rewards/accuracies": 0.75},
    )
    fields = progress_of(a_result(2), tmp_path)
    curve = fields["loss_curve"]
    assert getattr(curve, "losses", None) == (4.0, 2.0)
    assert [point.loss for point in getattr(curve, "validations", ())] == [3.0]
    assert fields["reward_accuracy"] == 0.75


def test_reused_result_without_rows_has_no_curve(tmp_path: Path) -> None:
    """A program of the user wrote none."""
    assert progress_of(a_result(2), tmp_path) == {"loss_curve": None}
