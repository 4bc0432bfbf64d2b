"""The paired comparison with the base model."""

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.trainer.evaluation import (
    evaluate_config,
    evaluate_environment,
    read_samples,
    run_evaluate,
    with_recipe,
)
from support.trainer.stages import read_progress

from finetune_trainer.contract import Environment, EvaluateConfig, Task
from finetune_trainer.evaluation import language_model
from finetune_trainer.evaluation.tasks import load_tasks

pytestmark = pytest.mark.usefixtures("datasets_cache")

HEAD = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: questions/{data}.jsonl}}}}
test_split: test
"""
CHOICE = """\
output_type: multiple_choice
doc_to_text: "{{sentence}}\\nVerb:"
doc_to_choice: [opens, closes, returns, ignores]
doc_to_target: label
"""


@pytest.fixture
def environment(tmp_path: Path, tiny_model: Path) -> Environment:
    return evaluate_environment(tmp_path, tiny_model)


@pytest.fixture
def config(tiny_model: Path) -> EvaluateConfig:
    return evaluate_config(tiny_model, compare_with_base=True)


def write_task(
    environment: Environment, name: str, text: str, data: str = "verbs"
) -> Task:
    folder = Path(str(environment.manifest_dir)) / "tasks"
    (folder / f"{name}.yaml").write_text(HEAD.format(name=name, data=data) + text)
    return Task(name=name, file=f"tasks/{name}.yaml")


def values(
    config: EvaluateConfig,
    environment: Environment,
    metric: str,
    *,
    prefix: str = "",
    task: str = "verbs",
) -> Any:
    """Return the metric of each question, in the order of the questions."""
    samples = sorted(
        read_samples(config, environment, task, prefix),
        key=lambda sample: int(sample["doc_id"]),
    )
    return np.array([sample[metric] for sample in samples])


def test_difference_has_the_paired_standard_error(
    environment: Environment, config: EvaluateConfig
) -> None:
    score = run_evaluate(config, environment).scores["verbs"]["acc"]
    of_model, of_base = (
        values(config, environment, "acc", prefix=prefix) for prefix in ("", "base-")
    )
    differences = of_model - of_base
    assert score.value == pytest.approx(of_model.mean(), rel=1e-5)
    assert score.base == pytest.approx(of_base.mean(), rel=1e-5)
    assert score.difference_stderr == pytest.approx(
        differences.std(ddof=1) / np.sqrt(len(differences)), rel=1e-5
    )
    assert differences.std() > 0
    unpaired = np.hypot(of_model.std(ddof=1), of_base.std(ddof=1)) / np.sqrt(
        len(differences)
    )
    assert score.difference_stderr != pytest.approx(unpaired, rel=1e-3)


def test_output_of_the_base_is_kept_beside_the_other(
    environment: Environment, config: EvaluateConfig
) -> None:
    score = run_evaluate(config, environment).scores["verbs"]["acc"]
    output = environment.stage_dir("evaluate", "e1") / "output"
    of_base = json.loads((output / "base-results.json").read_text())["results"][
        "verbs"
    ]["acc,none"]
    assert score.base == of_base
    asked, asked_of_base = (
        read_samples(config, environment, prefix=prefix) for prefix in ("", "base-")
    )
    assert [sample["arguments"] for sample in asked] == [
        sample["arguments"] for sample in asked_of_base
    ]
    assert [sample["resps"] for sample in asked] != [
        sample["resps"] for sample in asked_of_base
    ]
    assert len(list(environment.stage_dir("evaluate", "e1").glob("answers-*"))) == 2


def test_base_sees_the_same_examples_and_questions(
    environment: Environment, config: EvaluateConfig
) -> None:
    tasks = (Task(name="verbs", file="tasks/verbs.yaml", limit=7, few_shot=3),)
    few = with_recipe(config, tasks=tasks, apply_chat_template=True)
    run_evaluate(few, environment)
    asked, asked_of_base = (
        read_samples(few, environment, prefix=prefix) for prefix in ("", "base-")
    )
    assert len(asked) == 7
    assert [sample["arguments"] for sample in asked] == [
        sample["arguments"] for sample in asked_of_base
    ]


def test_requests_to_both_models_count_as_one_total(
    environment: Environment, config: EvaluateConfig
) -> None:
    run_evaluate(config, environment)
    progress = read_progress(environment)
    assert progress["step"] == 320
    assert progress["total"] == 320
    assert progress["startStep"] == 0
    (environment.stage_dir("evaluate", "e1") / "result.json").unlink()
    run_evaluate(config, environment)
    progress = read_progress(environment)
    assert (progress["step"], progress["total"], progress["startStep"]) == (
        320,
        320,
        320,
    )


def test_models_are_in_memory_one_after_the_other(
    environment: Environment, config: EvaluateConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[weakref.ref[Any]] = []
    alive: list[int] = []
    load = language_model.EvaluatedModel.load

    def load_and_count(model: language_model.EvaluatedModel) -> Any:
        alive.append(sum(reference() is not None for reference in loaded))
        weights = load(model)
        loaded.append(weakref.ref(weights.get_input_embeddings().weight))
        return weights

    monkeypatch.setattr(language_model.EvaluatedModel, "load", load_and_count)
    gc.disable()  # a collection at the right moment would hide a missing one
    try:
        run_evaluate(config, environment)
    finally:
        gc.enable()
    assert alive == [0, 0]


def test_only_means_over_questions_have_a_difference_error(
    environment: Environment, config: EvaluateConfig
) -> None:
    mixed = write_task(
        environment,
        "mixed",
        CHOICE + "metric_list: [{metric: acc}, {metric: acc_norm}, {metric: mcc}]\n",
    )
    rolling = write_task(
        environment,
        "rolling",
        'output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{sentence}}"\n'
        "metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]\n",
    )
    median = write_task(
        environment,
        "median",
        CHOICE + "metric_list: [{metric: acc, aggregation: median}]\n",
    )
    both = with_recipe(config, tasks=(mixed, rolling, median))
    scores = run_evaluate(both, environment).scores
    has_error = {
        f"{task} {metric}": score.difference_stderr is not None
        for task, metrics in scores.items()
        for metric, score in metrics.items()
    }
    assert has_error == {
        "mixed acc": True,
        "mixed acc_norm": True,
        "mixed mcc": False,
        "rolling word_perplexity": False,
        "rolling bits_per_byte": False,
        "median acc": False,
    }
    assert all(
        score.base is not None
        for metrics in scores.values()
        for score in metrics.values()
    )


def add_group(
    monkeypatch: pytest.MonkeyPatch, *members: str, weight_by_size: bool
) -> None:
    """Make the task `both` a group of other tasks, as many of lm-eval's built-in names are."""
    from lm_eval.api.group import Group  # noqa: PLC0415  imports lm_eval
    from lm_eval.config.group import AggMetricConfig  # noqa: PLC0415

    def load_with_group(tasks: Any, environment: Environment, seed: int) -> Any:
        result = load_tasks(
            [task for task in tasks if task.name in members], environment, seed
        )
        group = Group(
            "both",
            aggregate_metric_list=[
                AggMetricConfig(metric="acc", weight_by_size=weight_by_size)
            ],
        )
        for name in members:
            group.add(result.tasks["tasks"][name])
        groups = {
            "groups": {"both": group},
            "group_map": {"both": list(members)},
        }
        return result._replace(tasks=result.tasks | groups)

    monkeypatch.setattr("finetune_trainer.stages.evaluate.load_tasks", load_with_group)


@pytest.mark.parametrize("weight_by_size", [True, False])
def test_group_has_the_error_of_its_own_weights(
    environment: Environment,
    config: EvaluateConfig,
    monkeypatch: pytest.MonkeyPatch,
    *,
    weight_by_size: bool,
) -> None:
    few = write_task(
        environment, "few", CHOICE + "metric_list: [{metric: acc}]\n"
    ).model_copy(update={"limit": 12})
    tasks = (Task(name="verbs", file="tasks/verbs.yaml"), few)
    grouped = with_recipe(config, tasks=(*tasks, Task(name="both")))
    add_group(
        monkeypatch, *(task.name for task in tasks), weight_by_size=weight_by_size
    )
    score = run_evaluate(grouped, environment).scores["both"]["acc"]
    differences = [
        values(grouped, environment, "acc", task=task.name)
        - values(grouped, environment, "acc", task=task.name, prefix="base-")
        for task in tasks
    ]
    sizes = np.array([len(of_task) for of_task in differences])
    assert list(sizes) == [40, 12]
    weights = sizes / sizes.sum() if weight_by_size else np.array([0.5, 0.5])
    assert score.base is not None
    means = np.array([of_task.mean() for of_task in differences])
    mean = (weights * means).sum()
    assert score.value - score.base == pytest.approx(mean, abs=1e-5)
    variances = np.array([of_task.var(ddof=1) for of_task in differences])
    # If all questions weigh the same, lm-eval pools the variances of the tasks by their n - 1.
    pooled = (variances * (sizes - 1)).sum() / (sizes - 1).sum() / sizes.sum()
    expected = pooled if weight_by_size else (variances / sizes).sum() / 4
    assert score.difference_stderr == pytest.approx(np.sqrt(expected), rel=1e-5)


def test_group_with_another_aggregation_has_no_error(
    environment: Environment, config: EvaluateConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    median = write_task(
        environment,
        "median",
        CHOICE + "metric_list: [{metric: acc, aggregation: median}]\n",
    )
    tasks = (Task(name="verbs", file="tasks/verbs.yaml"), median)
    add_group(monkeypatch, *(task.name for task in tasks), weight_by_size=True)
    scores = run_evaluate(
        with_recipe(config, tasks=(*tasks, Task(name="both"))), environment
    ).scores
    assert scores["verbs"]["acc"].difference_stderr is not None
    assert scores["both"]["acc"].base is not None
    assert scores["both"]["acc"].difference_stderr is None
