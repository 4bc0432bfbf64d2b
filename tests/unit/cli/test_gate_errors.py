"""A gate with standardErrors on a score that has no standard error is refused before anything runs."""

import json
from pathlib import Path

import pytest
import yaml
from lm_eval.api.metrics import mean, stderr_for_metric
from lm_eval.api.registry import (
    AGGREGATION_REGISTRY,
    METRIC_AGGREGATION_REGISTRY,
)

from finetune_cli.checks import standard_errors
from finetune_cli.checks.built_in_tasks import BuiltInTasks, read_built_in_tasks
from finetune_cli.checks.task_file import DEFAULT_AGGREGATIONS, aggregation_of
from finetune_cli.checks.tasks import task_errors
from finetune_cli.manifest.fields import gate_metrics
from finetune_cli.manifest.manifest import Manifest, read_text
from finetune_trainer.contract import Environment, Task
from finetune_trainer.evaluation.check import check_task

HEAD = """\
apiVersion: finetune.dev/v1alpha1
kind: FineTunePipeline
metadata: {name: demo}
spec:
  model: {uri: base}
  datasets: [{uri: data.jsonl}]
"""


@pytest.fixture(scope="module")
def built_in() -> BuiltInTasks:
    """The tasks of lm-eval: thousands of files, which take seconds to read."""
    tasks = read_built_in_tasks()
    assert tasks
    return tasks


def manifest_of(tasks: str, gate: str) -> Manifest:
    body = f"  evaluate: {{tasks: [{tasks}], gates: [{{{gate}, value: 0.5}}]}}\n"
    result = read_text(Path("p.yaml"), HEAD + body)
    assert result.diagnostics == []
    [manifest] = result.manifests
    return manifest


@pytest.mark.parametrize(
    ("gate", "message"),
    [
        ("task: wikitext, metric: word_perplexity, operator: LessThan, standardErrors: 2",
         "word_perplexity has no standard error, so that the gate is never measured; set standardErrors to 0"),
        ("task: wikitext, metric: bits_per_byte, operator: LessThan, standardErrors: 2, against: Base",
         "the difference in bits_per_byte has no standard error"),
        ("task: lambada_openai, metric: perplexity, operator: LessThan, standardErrors: 2, against: Base",
         "the difference in perplexity has no standard error"),
        ("task: lambada_openai, metric: perplexity, operator: LessThan, standardErrors: 2", ""),
        ("task: lambada_openai, metric: acc, standardErrors: 2, against: Base", ""),
        ("task: wikitext, metric: word_perplexity, operator: LessThan", ""),
    ],
)  # fmt: skip
def test_score_of_lm_eval_without_an_error_is_named(
    built_in: BuiltInTasks, gate: str, message: str
) -> None:
    task = gate.partition(",")[0].removeprefix("task: ")
    gates = gate_metrics(manifest_of(f"{{name: {task}}}", gate).spec)
    errors = list(standard_errors.errors_by_file(gates, built_in.files))
    assert bool(errors) is bool(message)
    for location, text in errors:
        assert location == ("evaluate", "gates", 0, "standardErrors")
        assert text.startswith(message)


def test_gate_that_is_never_measured_is_an_error_at_its_line() -> None:
    gate = (
        "task: wikitext, metric: word_perplexity, operator: LessThan, standardErrors: 2"
    )
    manifest = manifest_of("{name: wikitext}", gate)
    [error] = task_errors(manifest, Environment(Path()))
    assert error.path == "spec.evaluate.gates[0].standardErrors"


def test_tables_of_aggregations_are_those_of_lm_eval() -> None:
    for name in AGGREGATION_REGISTRY:
        function = AGGREGATION_REGISTRY[name]
        if function is mean:
            assert name == "mean"
        elif stderr_for_metric(function, 1) is None:
            assert name in standard_errors.WITHOUT_ERROR
        else:
            assert name in standard_errors.BOOTSTRAPPED
    for metric, name in DEFAULT_AGGREGATIONS.items():
        assert AGGREGATION_REGISTRY[name] is METRIC_AGGREGATION_REGISTRY[metric]


@pytest.mark.parametrize(
    ("task", "aggregation"),
    [
        ({"metric_list": [{"metric": "f1"}]}, "f1"),
        ({"metric_list": [{"metric": "f1", "aggregation": "mean"}]}, "mean"),
        ({"metric_list": [{"metric": "acc"}]}, None),
        ({"group": "all", "task": ["a"], "aggregate_metric_list": [{"metric": "f1"}]}, None),
        ({"class": "a.B"}, None),
    ],
)  # fmt: skip
def test_aggregation_of_a_task_file(
    tmp_path: Path, task: dict, aggregation: str | None
) -> None:
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(task))
    assert aggregation_of(tmp_path / "a.yaml", "f1") == aggregation


def test_loaded_tasks_and_groups_name_scores_without_an_error(tmp_path: Path) -> None:
    questions = [json.dumps({"q": f"Is it {n}", "a": "yes"}) for n in range(4)]
    (tmp_path / "quiz.jsonl").write_text("\n".join(questions))
    quiz = {
        "task": "quiz",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": "quiz.jsonl"}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{q}}?",
        "doc_to_target": "a",
        "metric_list": [{"metric": "exact_match"}, {"metric": "bleu"}],
    }
    (tmp_path / "quiz.yaml").write_text(yaml.safe_dump(quiz))
    group = {
        "group": "all",
        "task": ["quiz"],
        "aggregate_metric_list": [{"metric": "exact_match"}],
    }
    (tmp_path / "all.yaml").write_text(yaml.safe_dump(group))
    environment = Environment(tmp_path, manifest_dir=tmp_path)
    for name in ("quiz", "all"):
        answer = check_task(Task(name=name, file=f"{name}.yaml"), environment)
        assert answer["exit_code"] is None
        assert answer["without_error"] == {"Value": [], "Base": ["bleu"]}
