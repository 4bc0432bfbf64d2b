"""The loss curve of a stage in `finetune get`: its shape, its width, and the marks of interruptions."""

import io

import pytest
from rich.console import Console
from support.operator.scenario import Scenario

from finetune_cli.comparison.compare import Run, measurements
from finetune_cli.output.loss_curve import sparkline
from finetune_cli.output.status.tree import live_table
from finetune_trainer.contract import LossCurve, ValidationPoint

VALIDATIONS = (ValidationPoint(step=40, loss=2.25), ValidationPoint(step=80, loss=2.5))


def falling(points, every=1, **more):
    """Return a curve that falls from 6 to 2 by equal factors."""
    losses = tuple(
        6 * (1 / 3) ** (point / max(1, points - 1)) for point in range(points)
    )
    return LossCurve(every_steps=every, step=points * every, losses=losses, **more)


def trained(curve, *evictions):
    """Return the status of a pipeline whose training was evicted at these steps and now has this curve."""
    scenario = Scenario().run("prepare")
    for step in evictions:
        job = scenario.start("train")
        scenario.cluster.progress(job, step=step, start_step=0)
        scenario.reconcile_until_stable().cluster.evict(job, step=step, saved=step)
        scenario.pass_interruption_backoff().reconcile_until_stable()
    scenario.cluster.progress(
        scenario.start("train"), step=curve.step, loss_curve=curve
    )
    return scenario.reconcile_until_stable().status


def shown(status, width=80, encoding="utf-8"):
    """Return the lines that a terminal of this width and encoding shows."""
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="replace")
    Console(file=file, width=width, soft_wrap=True).print(live_table("demo", status))
    file.seek(0)
    return file.read().splitlines()


def test_falling_loss_falls_from_the_highest_block_to_the_lowest():
    assert sparkline(falling(8), [], 40) == "█▇▆▅▄▃▂▁"
    assert sparkline(falling(8), [], 40, plain=True) == "@#*+=-:."


def test_loss_below_zero_has_a_linear_scale():
    assert (
        sparkline(LossCurve(every_steps=1, step=3, losses=(6.0, 2.5, -1.0)), [], 40)
        == "█▅▁"
    )


def test_constant_loss_is_a_flat_line():
    assert (
        sparkline(LossCurve(every_steps=1, step=3, losses=(2.0, 2.0, 2.0)), [], 40)
        == "▁▁▁"
    )


@pytest.mark.parametrize("points", [1, 2, 30, 64])
@pytest.mark.parametrize("width", [8, 20, 63, 64, 65, 200])
def test_line_has_all_points_and_marks_or_fits_the_width(points, width):
    curve = falling(points, every=6)
    interrupted = [1, 60, 61, 10**9]
    marks = len({min(points, -(-step // 6)) for step in interrupted})
    length = len(sparkline(curve, interrupted, width))
    assert (
        length == points + marks
        if points + marks <= width
        else width - marks < length <= width
    )


def test_narrow_line_has_the_mean_of_several_points_in_a_cell():
    curve = LossCurve(every_steps=1, step=4, losses=(9.0, 1.0, 4.0, 2.0))
    assert sparkline(curve, [], 2) == "█▁"  # 5 and 3


@pytest.mark.parametrize(
    ("step", "line"),
    [
        (0, "╎█▆▃▁"),
        (1, "█╎▆▃▁"),
        (10, "█╎▆▃▁"),
        (11, "█▆╎▃▁"),
        (35, "█▆▃▁╎"),
        (99, "█▆▃▁╎"),
    ],
)
def test_mark_follows_the_point_of_its_step(step, line):
    curve = LossCurve(every_steps=10, step=35, losses=(8.0, 4.0, 2.0, 1.0))
    assert sparkline(curve, [step], 40) == line


def test_get_shows_the_curve_its_validations_and_evictions():
    lines = shown(trained(falling(8, every=10, validations=VALIDATIONS), 30, 55))
    at = next(index for index, line in enumerate(lines) if " train " in line)
    assert lines[at + 1] == "      loss 6 █▇▆╎▅▄▃╎▂▁ 2"
    assert lines[at + 2] == (
        "      validation loss 2.5 at step 80, best 2.25 at step 40; ╎ interrupted at step 30, 55"
    )
    assert "attempt 1 on Spot, interrupted at 30" in lines[at + 3]


def test_newest_validation_that_is_the_best_is_shown_once():
    status = trained(falling(8, every=10, validations=VALIDATIONS[:1]))
    assert "      validation loss 2.25 at step 40, the best" in shown(status)


@pytest.mark.parametrize(("every", "points"), [(1, "each step"), (10, "10 steps")])
def test_finished_training_names_both_of_its_last_losses(every, points):
    """The curve ends with its last point, and `finetune compare` has the mean of the last steps."""
    scenario = Scenario().run("prepare")
    scenario.cluster.progress(
        scenario.start("train"), step=8 * every, loss_curve=falling(8, every=every)
    )
    scenario.reconcile_until_stable().after(60).complete("train", loss=2.75)
    status = scenario.status
    assert measurements(Run("demo", {}, status)).training_loss == 2.75
    lines = shown(status)
    assert any(line.endswith(" 2") for line in lines)
    note = f"      training loss 2.75, mean of the last steps; the curve has a point for {points}"
    assert note in lines


def test_interruptions_without_a_known_step_are_counted():
    status = trained(falling(8, every=10), 30, 55)
    stage = status.stages["train"]
    first = stage.attempts[0].model_copy(update={"last_step": None})
    changed = stage.model_copy(update={"attempts": (first, *stage.attempts[1:])})
    lines = shown(status.model_copy(update={"stages": {"train": changed}}))
    assert "      ╎ interrupted at step 55, and 1 more" in lines


@pytest.mark.parametrize("width", [40, 80, 120])
def test_curve_respects_the_width_of_the_terminal(width):
    lines = [
        line
        for line in shown(trained(falling(64, every=10), 300), width)
        if line.startswith("      loss")
    ]
    assert [len(line) for line in lines] == [min(width, len("      loss 6  2") + 65)]


@pytest.mark.parametrize("encoding", ["ascii", "iso-8859-1", "cp1252"])
def test_terminal_without_block_characters_gets_ascii(encoding):
    lines = shown(
        trained(falling(8, every=10, validations=VALIDATIONS), 30), encoding=encoding
    )
    assert "      loss 6 @#*|+=-:. 2" in lines
    assert any("| interrupted at step 30" in line for line in lines)
