"""The values of single questions in the output of evaluate: compared by them, runs differ as a gate says."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.operator.scenario import Scenario
from support.trainer.evaluation import (
    evaluate_config,
    evaluate_environment,
    run_evaluate,
)

from finetune_cli.comparison.compare import Run, score_difference
from finetune_operator.api.gates import Gate, compare
from finetune_trainer.contract import EvaluateResult, Score
from finetune_trainer.contract.question_scores import (
    QuestionScores,
    from_json,
    mean_of,
    paired_difference,
    read_question_scores,
    stderr_of,
    to_json,
)


def a_run(name: str, output: Path, result: EvaluateResult) -> Run:
    """Return a run that has this result, with the values of single questions in an output of evaluate."""
    scores = result.model_dump(mode="json", by_alias=True)["scores"]
    status = Scenario().finish(evaluate={"scores": scores}).status
    return Run(name, {}, status, read_question_scores(output, "rows"))


def of_base(result: EvaluateResult) -> EvaluateResult:
    """Return what evaluate would report of the base model."""
    scores = {
        task: {
            metric: Score(value=score.base, stderr=score.stderr)
            for metric, score in metrics.items()
            if score.base is not None
        }
        for task, metrics in result.scores.items()
    }
    return result.model_copy(update={"scores": scores})


def base_output(output: Path, folder: Path) -> Path:
    """Return a folder with the output of the base model, as a run that evaluates that model has it."""
    folder.mkdir()
    for file in output.glob("base-*"):
        shutil.copy(file, folder / file.name.removeprefix("base-"))
    return folder


@pytest.mark.usefixtures("datasets_cache")
def test_difference_from_the_base_is_the_gates(
    tmp_path: Path, tiny_model: Path
) -> None:
    environment = evaluate_environment(tmp_path, tiny_model)
    config = evaluate_config(tiny_model, compare_with_base=True)
    result = run_evaluate(config, environment)
    output = environment.stage_dir("evaluate", config.identity) / "output"
    run = a_run("tuned", output, result)
    base = a_run("base", base_output(output, tmp_path / "base"), of_base(result))
    for metric in result.scores["verbs"]:
        gate = Gate(task="verbs", metric=metric, against="Base", value=0)
        of_gate = compare(gate, result)
        difference = score_difference(run, base, "verbs", metric)
        assert difference is not None
        assert difference.unpaired == ""
        assert of_gate.score is not None
        assert of_gate.base is not None
        assert difference.stderr == of_gate.difference_stderr
        assert f"difference {difference.value:.4g} ±" in of_gate.message
        assert math.isclose(difference.value, of_gate.score - of_gate.base)
        assert difference.stderr


def write_samples(folder: Path, *rows: dict[str, Any]) -> Path:
    """Write what lm-eval records of each question of the task quiz."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps(
            {
                "doc_id": number,
                "doc_hash": f"d{number}",
                "target_hash": "t",
                "filter": "none",
                "metrics": [name for name in row if name not in {"filter", "doc_hash"}],
                **row,
            }
        )
        for number, row in enumerate(rows)
    ]
    (folder / "samples-quiz.jsonl").write_text("\n".join(lines))
    return folder


def test_metric_that_is_no_number_is_left_out(tmp_path: Path) -> None:
    """F1 has pairs of answers in place of a number."""
    output = write_samples(
        tmp_path, {"acc": 1.0, "f1": [1, 0]}, {"acc": 0, "f1": [1, 1]}
    )
    scores = read_question_scores(output, "")["quiz"]
    assert list(scores) == ["acc"]
    assert scores["acc"].values == (1.0, 0.0)


def test_metric_of_several_filters_has_them_in_its_name(tmp_path: Path) -> None:
    output = write_samples(
        tmp_path,
        {"exact_match": 1.0, "filter": "strict"},
        {"exact_match": 0.0, "filter": "flexible"},
    )
    names = read_question_scores(output, "")["quiz"]
    assert list(names) == ["exact_match,strict", "exact_match,flexible"]


def test_other_question_is_not_paired(tmp_path: Path) -> None:
    first = write_samples(tmp_path / "a", {"acc": 1.0})
    second = write_samples(tmp_path / "b", {"acc": 1.0, "doc_hash": "edited"})
    scores = read_question_scores(first, "")["quiz"]["acc"]
    other = read_question_scores(second, "")["quiz"]["acc"]
    assert scores.minus(other) is None
    assert scores.minus(scores) is not None


def test_held_out_rows_are_paired_by_the_rows_of_prepare(tmp_path: Path) -> None:
    rows = [{"loss": 6.0, "weight": 3}, {"loss": 1.0, "weight": 1}]
    text = "\n".join(map(json.dumps, rows))
    (tmp_path / "held-out.jsonl").write_text(text)
    scores, same, other = (
        read_question_scores(tmp_path, rows)["held_out"]["validation_loss"]
        for rows in ("r", "r", "s")
    )
    assert scores.mean == 1.75
    assert scores.minus(same) is not None
    assert scores.minus(other) is None


@pytest.mark.parametrize("text", ["{", "[]", '{"metrics": ["acc"]}', "null"])
def test_damaged_output_has_no_values(tmp_path: Path, text: str) -> None:
    (tmp_path / "samples-quiz.jsonl").write_text(text)
    assert read_question_scores(tmp_path, "") == {}
    assert read_question_scores(tmp_path / "gone", "") == {}


def test_values_survive_json() -> None:
    scores = {"quiz": {"acc": QuestionScores("q", (1.0, 0.5), (1.0, 2.0))}}
    assert from_json(json.loads(json.dumps(to_json(scores)))) == scores


def test_error_of_a_mean_is_finite_or_not_known() -> None:
    equal = (1.0, 1.0)
    assert mean_of((1.0, 2.0), equal) == 1.5
    assert stderr_of((1.0, 2.0), equal) == 0.5
    assert stderr_of((1.0,), (1.0,)) is None
    for large in (math.inf, math.nan, 1e200):
        assert stderr_of((large, 1.0), equal) is None
    assert paired_difference((1.0,), (0.5,), (1.0,)).stderr is None
