"""The comparing core: fields that differ, losses, paired differences, and the best run; all from statuses."""

import json
import math
import re
from dataclasses import replace
from decimal import Decimal

import pytest
from support.operator.scenario import Scenario, a_pipeline

from finetune_cli.comparison.best import rank
from finetune_cli.comparison.compare import (
    NO_MEAN,
    OTHER_QUESTIONS,
    Run,
    differing_fields,
    measurements,
    score_difference,
)
from finetune_cli.diagnostics import UsageError
from finetune_cli.output.comparison_lines import comparison_json, comparison_lines
from finetune_operator.api.status import StageStatus
from finetune_trainer.contract import LossCurve, ValidationPoint
from finetune_trainer.contract.question_scores import QuestionScores

ONES = (1.0,) * 4


def exam(*values, questions="q", weights=None, metric="acc"):
    """Return the values of single questions of the task exam."""
    scores = QuestionScores(questions, values, weights or (1.0,) * len(values))
    return {"exam": {metric: scores}}


def a_run(name, value=0.5, spec=None, questions=None, **changes):
    """Return a finished run with a score of the task exam."""
    metric = changes.pop("metric", "acc")
    score = {
        "value": value,
        "stderr": 0.25,
        **changes.pop("score", {}),
    }
    evaluate = {"scores": {"exam": {metric: score}}}
    status = Scenario().finish(evaluate=evaluate, **changes).status
    full = a_pipeline(**(spec or {})).model_dump(
        mode="json", by_alias=True, exclude_none=True
    )
    return Run(name, full, status, questions or {})


def with_curve(run, *losses, validations=()):
    """Return the run with a loss curve."""
    curve = LossCurve(
        every_steps=1,
        step=len(losses),
        losses=losses,
        validations=[
            ValidationPoint(step=step, loss=loss) for step, loss in validations
        ],
    )
    train = run.status.stages["train"].model_copy(update={"loss_curve": curve})
    return with_stage(run, "train", train)


def with_stage(run, name, stage: StageStatus):
    stages = {**run.status.stages, name: stage}
    return replace(run, status=run.status.model_copy(update={"stages": stages}))


def lines_of(*runs, best=None, width=80):
    ranking = rank(runs, best) if best else None
    return list(comparison_lines(runs, ranking, width, plain=False))


# Fields.


def fields(*specs):
    runs = [a_run(str(number), spec=spec) for number, spec in enumerate(specs)]
    return {field.path: field.values for field in differing_fields(runs)}


def test_only_the_fields_that_differ_are_listed():
    assert fields({"seed": 1}, {"seed": 2}) == {"seed": (1, 2)}
    assert fields({"seed": 1}, {"seed": 1}) == {}


def test_fields_come_in_the_order_of_the_manifest():
    first = {"seed": 1, "train": {"optimizer": {"learningRate": 0.1}}}
    second = {"seed": 2, "train": {"optimizer": {"learningRate": 0.2}}}
    assert list(fields(second, first)) == ["seed", "train.optimizer.learningRate"]


def test_default_equals_the_same_value_in_the_manifest():
    length = a_pipeline().prepare.context_length
    assert fields({}, {"prepare": {"contextLength": length}}) == {}


def test_block_of_one_run_alone_is_compared_by_field():
    values = fields({"push": None, "deploy": None}, {"deploy": None})
    assert values["push.targets[0].format"] == (None, "Merged")
    assert not [path for path, value in values.items() if isinstance(value[1], dict)]


def test_items_of_equally_long_lists_are_compared_by_item():
    gates = [{"task": "exam", "value": 0.6}]
    other = [{"task": "exam", "value": 0.7}]
    assert fields({"evaluate": {"gates": gates}}, {"evaluate": {"gates": other}}) == {
        "evaluate.gates[0].value": (0.6, 0.7)
    }


def test_item_of_one_run_alone_is_absent_in_the_others():
    short = [{"uri": "hf://org/a"}]
    both = [{"uri": "hf://org/a"}, {"uri": "hf://org/b"}]
    values = fields({"datasets": short}, {"datasets": both})
    assert values["datasets[1].uri"] == (None, "hf://org/b")
    assert not [path for path in values if path.startswith("datasets[0]")]


def test_data_that_was_edited_in_place_is_named_by_its_content():
    first = a_run("a")
    edited = a_run("b", prepare={"dataDigest": "sha256:" + "e" * 64})
    field = differing_fields([first, edited])[0]
    assert field.path == "content of datasets"
    assert field.values[1] == "sha256:eeeeeeeeeeee…"


def test_content_of_other_sources_is_not_named():
    first = a_run("a", spec={"datasets": [{"uri": "hf://org/a"}]})
    other = {"datasets": [{"uri": "hf://org/b"}]}
    second = a_run("b", spec=other, prepare={"dataDigest": "sha256:e"})
    paths = [field.path for field in differing_fields([first, second])]
    assert paths == ["datasets[0].uri"]


# Measurements.


def test_losses_are_those_of_the_result():
    run = with_curve(a_run("a"), 4.0, 3.0, validations=[(1, 2.0), (2, 2.5)])
    measured = measurements(run)
    assert measured.training_loss == 0.5
    assert measured.validation_loss == 0.6


def test_unfinished_training_has_the_losses_of_its_curve():
    status = Scenario().run("prepare").status
    run = with_curve(Run("a", {}, status), 4.0, 3.0, validations=[(1, 2.0), (2, 2.5)])
    measured = measurements(run)
    assert measured.training_loss == 3.0
    assert measured.validation_loss == 2.0


def test_run_that_has_not_begun_has_no_measurements():
    measured = measurements(Run("a", {}, Scenario().reconcile_until_stable().status))
    assert measured.training_loss is None
    assert measured.cost is None
    assert measured.scores == {}
    assert measured.seconds == 0


def test_time_and_cost_are_of_the_attempts_that_made_it():
    """An attempt of an earlier edit, and one that only reused the result, do not count."""
    run = a_run("a")
    train = run.status.stages["train"]
    made = train.attempts[-1].model_copy(update={"seconds": 18.0, "cost": Decimal(3)})
    earlier = made.model_copy(update={"number": 7, "identity": "0" * 16})
    reuse = made.model_copy(update={"number": 9, "seconds": 2.0})
    attempts = (earlier, made.model_copy(update={"number": 8}), reuse)
    for name, stage in run.status.stages.items():
        run = with_stage(run, name, stage.model_copy(update={"attempts": ()}))
    run = with_stage(run, "train", train.model_copy(update={"attempts": attempts}))
    measured = measurements(run)
    assert measured.training_seconds == 18.0
    assert measured.seconds == 18.0
    assert measured.cost == Decimal(3)


# Differences.


def difference_of(run, other):
    """Return the difference of the accuracies, which are known."""
    difference = score_difference(run, other, "exam", "acc")
    assert difference is not None
    return difference


def test_equal_questions_are_paired():
    first = a_run("a", 0.5, questions=exam(1.0, 0.0, 1.0, 0.0))
    second = a_run("b", 0.75, questions=exam(1.0, 0.0, 1.0, 1.0))
    difference = difference_of(second, first)
    assert difference.value == 0.25
    assert difference.unpaired == ""
    # The standard deviation of 0, 0, 0, 1 is 0.5.
    assert difference.stderr == 0.25


@pytest.mark.parametrize(
    ("questions", "reason"),
    [
        ({}, "b: the values of single questions are gone"),
        (exam(1.0, 0.0, 1.0, 1.0, questions="other"), OTHER_QUESTIONS),
        (exam(1.5, 0.0, 1.5, 0.0, weights=(2.0, 0.5, 0.5, 1.0)), OTHER_QUESTIONS),
        # A median: the values have another mean than the score.
        (exam(1.0, 0.0, 0.0, 0.0), NO_MEAN),
        (exam(1.0, 0.0, 1.0, 1.0, metric="f1"), NO_MEAN),
    ],
)
def test_difference_without_pairs_has_the_larger_error(questions, reason):
    first = a_run("a", 0.5, questions=exam(1.0, 0.0, 1.0, 0.0))
    second = a_run("b", 0.75, questions=questions)
    difference = difference_of(second, first)
    assert difference.value == 0.25
    assert difference.unpaired == reason
    assert difference.stderr == pytest.approx(0.25 * math.sqrt(2), rel=1e-5)


def test_single_question_has_a_difference_without_error():
    first = a_run("a", 0.0, questions=exam(0.0))
    second = a_run("b", 1.0, questions=exam(1.0))
    difference = difference_of(second, first)
    assert (difference.value, difference.stderr, difference.unpaired) == (1.0, None, "")


def test_score_of_one_run_alone_has_no_difference():
    first = a_run("a", metric="f1")
    assert score_difference(a_run("b"), first, "exam", "acc") is None


def test_score_that_is_no_number_has_no_difference():
    assert score_difference(a_run("b"), a_run("a", "nan"), "exam", "acc") is None


# The best.


def best(text, *runs):
    return rank(runs, text).best.name


def test_best_is_the_highest_accuracy_or_the_lowest_loss():
    low = a_run("low", 0.2, train={"validationLoss": 0.1})
    high = a_run("high", 0.8, train={"validationLoss": 0.9})
    assert best("acc", low, high) == "high"
    assert best("exam/acc", low, high) == "high"
    assert best("validation_loss", low, high) == "low"
    assert best("max:validation_loss", low, high) == "high"


def test_direction_of_another_metric_is_asked_for():
    runs = [a_run("a", 0.1, metric="rouge"), a_run("b", 0.2, metric="rouge")]
    with pytest.raises(UsageError, match="write max:rouge or min:rouge"):
        rank(runs, "rouge")
    assert best("max:rouge", *runs) == "b"
    assert best("min:rouge", *runs) == "a"


def test_gate_gives_the_direction_of_its_metric():
    spec = {
        "evaluate": {
            "gates": [
                {"task": "exam", "metric": "ppl", "operator": "LessThan", "value": 9}
            ]
        }
    }
    scenario = Scenario()
    scenario.edit(**spec)
    scenario.finish(evaluate={"scores": {"exam": {"ppl": {"value": 3.0}}}})
    first = Run("a", {}, scenario.status)
    assert best("ppl", first, a_run("b", 1.0, metric="ppl")) == "b"


def test_unknown_metric_is_answered_with_the_known_ones():
    with pytest.raises(UsageError, match=r"did you mean acc\?.*exam/acc"):
        rank([a_run("a"), a_run("b")], "acck")


def test_metric_that_no_run_has_yet_is_an_error():
    status = Scenario().reconcile_until_stable().status
    with pytest.raises(UsageError, match="no run has a loss yet"):
        rank([Run("a", {}, status), Run("b", {}, status)], "loss")


def test_run_without_the_metric_is_last():
    pending = Run("pending", {}, Scenario().reconcile_until_stable().status)
    ranking = rank([pending, a_run("low", 0.2), a_run("high", 0.8)], "acc")
    assert [run.name for run in ranking.runs] == ["high", "low", "pending"]


def test_best_within_the_error_of_the_next_is_said():
    first = a_run("a", 0.5, questions=exam(1.0, 0.0, 1.0, 0.0))
    second = a_run("b", 0.75, questions=exam(1.0, 0.0, 1.0, 1.0))
    assert lines_of(first, second, best="acc")[-1] == (
        "best acc: b (0.75); the difference from a is within two standard errors"
    )
    clear = a_run("c", 1.0, questions=exam(1.0, 1.0, 1.0, 1.0), score={"stderr": 0.0})
    worse = a_run("d", 0.0, questions=exam(0.0, 0.0, 0.0, 0.0), score={"stderr": 0.0})
    assert lines_of(worse, clear, best="acc")[-1] == "best acc: c (1)"


# Output.


def test_table_has_what_differs_and_what_was_measured():
    first = a_run(
        "a",
        0.5,
        {"seed": 1},
        exam(1.0, 0.0, 1.0, 0.0),
        score={"base": 0.25, "differenceStderr": 0.1},
    )
    second = a_run("b", 0.75, {"seed": 2}, exam(1.0, 0.0, 1.0, 1.0))
    rows = {}
    for line in lines_of(first, second):
        label, *cells = re.split("  +", line.strip())
        rows[label] = cells
    assert rows["seed"] == ["1", "2"]
    assert rows["training loss"] == ["0.5", "0.5"]
    note = "training loss: mean of the last steps; a curve ends with its last point"
    assert note in rows
    assert rows["exam acc"] == ["0.500 ± 0.25", "0.750 ± 0.25"]
    assert rows["base model"] == ["0.250"]
    assert rows["minus the base model"] == ["+0.25 ± 0.1"]
    assert rows["minus a"] == ["+0.25 ± 0.25"]
    assert "model.uri" not in rows


@pytest.mark.parametrize("width", [40, 80, 120])
def test_table_fits_the_terminal(width):
    long = {"model": {"uri": "hf://organisation/" + "x" * 70}}
    runs = [
        with_curve(a_run(f"run-{number}", spec=long if number else {}), 4.0, 3.0)
        for number in range(6)
    ]
    assert max(map(len, lines_of(*runs, width=width))) <= width


def test_pipe_has_long_values_in_full():
    uri = "hf://organisation/" + "x" * 70
    runs = [a_run("a"), a_run("b", spec={"model": {"uri": uri}})]
    assert any(uri in line for line in lines_of(*runs, width=None))


def test_line_break_in_a_value_does_not_break_the_table():
    prompt = {"deploy": {"smokeTest": {"prompt": "one\ntwo\x1b[31m"}}}
    lines = lines_of(a_run("a"), a_run("b", spec=prompt), width=None)
    assert all(line.isprintable() for line in lines)
    assert any('"one\\ntwo\\u001b[31m"' in line for line in lines)


def test_curves_have_one_scale_and_one_axis():
    long = with_curve(a_run("long"), *[8.0, 4.0, 2.0, 1.0])
    short = with_curve(a_run("short"), *[2.0, 1.0])
    lines = lines_of(long, short)
    heading = lines.index("training loss, on one scale:")
    assert lines[heading + 1 : heading + 3] == [
        "long       8 █▆▃▁ 1",
        "short      2 ▃▁   1",
    ]


def test_json_has_fields_differences_and_the_best():
    first = a_run("a", 0.5, {"seed": 1}, exam(1.0, 0.0, 1.0, 0.0))
    second = a_run("b", 0.75, {"seed": 2}, exam(1.0, 0.0, 1.0, 1.0, questions="other"))
    runs = (first, second)
    shown = comparison_json(runs, rank(runs, "acc"))
    assert json.loads(json.dumps(shown, allow_nan=False)) == shown
    assert shown["fields"] == [{"path": "seed", "values": [1, 2]}]
    assert [run["name"] for run in shown["runs"]] == ["a", "b"]
    (difference,) = shown["differences"]
    assert difference["name"] == "b"
    assert difference["from"] == "a"
    assert difference["paired"] is False
    assert difference["reason"] == OTHER_QUESTIONS
    assert shown["best"] == {"metric": "acc", "name": "b", "value": 0.75}
