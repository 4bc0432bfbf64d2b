"""The loss of a training in few points."""

import json

import pytest

from finetune_trainer.contract import (
    LossCurve,
    Progress,
    TerminationMessage,
    TrainResult,
)
from finetune_trainer.contract.metric_rows import Row
from finetune_trainer.contract.results import TERMINATION_MESSAGE_BYTES
from finetune_trainer.tracking.loss_curve import LossCurveBuilder

RESULT = TrainResult(
    identity="a" * 16,
    digest="sha256:" + "b" * 64,
    steps=10**6,
    loss=2.5,
    best_step=9,
    tokens=10**9,
)


def curve_of(steps, last, every_validation=None, loss=lambda step: 10 / step):
    """Return the curve of a training of so many steps that has reached `last`."""
    builder = LossCurveBuilder(steps)
    for step in range(1, last + 1):
        builder.add(step, {"loss": loss(step), "gradient_norm": 1.0})
        if every_validation and step % every_validation == 0:
            builder.add(step, {"validation_loss": loss(step) + 1})
    return builder.curve()


def test_short_training_has_a_point_for_each_step():
    curve = curve_of(24, 3)
    assert curve.every_steps == 1
    assert curve.step == 3
    assert curve.losses == (10.0, 5.0, 3.3333)


@pytest.mark.parametrize(
    ("last", "points"), [(1, 1), (6, 1), (7, 2), (341, 57), (342, 57)]
)
def test_long_training_has_points_of_equal_length(last, points):
    curve = curve_of(342, last)
    assert curve.every_steps == 6
    assert len(curve.losses) == points
    assert curve.step == last


def test_point_is_the_mean_of_its_steps():
    curve = curve_of(65, 3, loss=lambda step: step)
    assert curve.losses == (1.5, 3.0)


@pytest.mark.parametrize("steps", [1, 63, 64, 65, 10_000, 10**8])
def test_curve_has_at_most_64_points(steps):
    builder = LossCurveBuilder(steps)
    width = builder._every
    for step in range(width, steps + 1, width):
        builder.add(step, {"loss": 1.0})
    curve = builder.curve()
    assert curve
    assert len(curve.losses) <= 64


def test_newest_and_best_validation_are_in_the_curve():
    """Ten steps a point and a validation at each: only the newest of a point stays, and the best of all."""
    builder = LossCurveBuilder(640)
    for step in range(1, 31):
        builder.add(step, {"loss": 2.0, "validation_loss": 1.0 if step == 13 else 2.0})
    curve = builder.curve()
    assert curve
    assert curve.best
    assert [point.step for point in curve.validations] == [10, 13, 20, 30]
    assert curve.best.step == 13
    assert curve.best.loss == 1.0


def test_resumed_curve_is_that_of_an_undisturbed_training():
    rows = [Row(step, 1e9, {"loss": 1 / step} | ({"validation_loss": 2 / step} if step % 7 == 0 else {}))
            for step in range(1, 101)]  # fmt: skip
    undisturbed = LossCurveBuilder(300)
    resumed = LossCurveBuilder(300)
    undisturbed.restart(rows)
    resumed.restart(rows[:90])
    resumed.restart(rows[:50])
    for row in rows[50:]:
        resumed.add(row.step, row.values)
    assert resumed.curve() == undisturbed.curve()


def test_curve_without_its_first_rows_is_left_out():
    builder = LossCurveBuilder(640)
    assert builder.curve() is None
    builder.add(21, {"loss": 1.0})
    assert builder.curve() is None


def test_loss_beyond_the_bounds_of_the_api_is_cut():
    assert curve_of(10, 1, loss=lambda _: 1e30).losses == (1e15,)


def test_largest_curve_fits_beside_the_result():
    builder = LossCurveBuilder(10**6)
    for step in range(1, 10**6 + 1, 1000):
        builder.add(
            step,
            {
                "loss": 12345.678 / step,
                "validation_loss": 12345.678 / (step if step != 3001 else 1e6 + 1),
            },
        )
    progress = Progress(
        stage="train", updated_at="2030-01-01T00:00:00.123456Z", step=10**6, total=10**6, start_step=10**5,
        saved_step=10**6, loss=2.123456789012345, validation_loss=2.123456789012345, tokens_per_second=12345.67890123,
        step_seconds=0.123456789012345, eta_seconds=0.0, notice="x" * 256, loss_curve=builder.curve(),
    )  # fmt: skip
    assert progress.loss_curve
    assert len(progress.loss_curve.validations) == 65
    message = TerminationMessage(result=RESULT, progress=progress)
    assert (
        len(message.model_dump_json(by_alias=True, exclude_none=True))
        <= TERMINATION_MESSAGE_BYTES
    )


@pytest.mark.parametrize(
    "curve",
    [
        {"everySteps": 1, "step": 2, "losses": [1.0]},
        {"everySteps": 1, "step": 65, "losses": [1.0] * 65},
        {"everySteps": 0, "step": 1, "losses": [1.0]},
        {"everySteps": 1, "step": 1, "losses": ["NaN"]},
        {"everySteps": 1, "step": 1, "losses": [1e300]},
        {"everySteps": 10**400, "step": 1, "losses": [1.0]},
        {"everySteps": 1, "step": 1, "losses": [1.0], "validations": [{"step": 1}]},
        "flat",
    ],
)
def test_invalid_curve_is_left_out_of_the_progress(curve):
    text = json.dumps(
        {
            "stage": "train",
            "updatedAt": "2030-01-01T00:00:00Z",
            "step": 3,
            "lossCurve": curve,
        }
    )
    progress = Progress.model_validate_json(text)
    assert progress.step == 3
    assert progress.loss_curve is None


def test_last_step_of_a_point_is_not_after_the_curve():
    curve = LossCurve(every_steps=6, step=8, losses=(2.0, 1.0))
    assert [curve.last_step(point) for point in (0, 1)] == [6, 8]
