"""The scores in lm-eval's output, and the paired comparison of two models' outputs."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from lm_eval.api.metrics import mean

from finetune_trainer.contract import Score
from finetune_trainer.contract.question_scores import (
    MetricFilter,
    paired_difference,
    score_names,
    significant,
    values_by_question,
)
from finetune_trainer.evaluation.task_files import Loaded
from finetune_trainer.runtime.errors import ConfigInvalid

Output = dict[str, Any]
"""The return value of lm_eval.evaluate."""
Members = Mapping[str, Sequence[str]]
"""Each configured task or group, with the members whose scores are reported beside its own."""
Numbers = Mapping[str, Any]
"""Numbers of one task by lm-eval's names: `acc,none` is metric and filter, `acc_stderr,none` its standard error."""


def extract_scores(output: Output, tasks: Members) -> dict[str, dict[str, Score]]:
    """Return the scores of the configured tasks, and of the members of groups.

    A group has a score only if its file aggregates the scores of its members. Raise ConfigInvalid if neither a task
    nor any of its members has a score.
    """
    results = output["results"]
    scores: dict[str, dict[str, Score]] = {}
    for task, members in tasks.items():
        measured = {}
        for name in (task, *members):
            metrics = _scores(results.get(name, {}), {}, {})
            if metrics:
                measured[name] = metrics
        if not measured:
            raise ConfigInvalid(
                f"evaluate.tasks[{task}]: lm-eval reports no score; choose a task with a score, "
                "or add aggregate_metric_list to the file of a group"
            )
        scores |= measured
    return scores


def compare_scores(
    output: Output, base: Output, loaded: Loaded, tasks: Members
) -> dict[str, dict[str, Score]]:
    """Return the scores of a model and of the base model on the same questions. Raise as `extract_scores`."""
    differences = paired_differences(output, base, loaded)
    compared = {}
    for task in extract_scores(output, tasks):
        results = output["results"][task]
        base_results = base["results"].get(task, {})
        compared[task] = _scores(results, base_results, differences.get(task, {}))
    return compared


def _scores(results: Numbers, base: Numbers, differences: Numbers) -> dict[str, Score]:
    # A gate names a metric; it needs the filter only if the task has several.
    names = score_names(_measured(results))
    scores = {}
    for (metric, filter_name), name in names.items():
        key = f"{metric},{filter_name}"
        stderr_key = f"{metric}_stderr,{filter_name}"
        scores[name] = Score(
            value=_number(results[key]),
            stderr=_number(results.get(stderr_key)),
            base=_number(base.get(key)),
            difference_stderr=_number(differences.get(stderr_key)),
        )
    return scores


def _measured(results: Numbers) -> Iterator[MetricFilter]:
    """Yield metric and filter of each number that is a score, and no standard error."""
    for key in results:
        metric, comma, filter_name = key.partition(",")
        if not comma or metric.endswith("_stderr"):
            continue
        if _number(results[key]) is not None:
            yield metric, filter_name


def numbers_of(scores: Mapping[str, Mapping[str, Score]]) -> dict[str, float]:
    """Return scores as numbers by name: task/metric, and the same with _stderr and _base."""
    numbers = {}
    for task, metrics in scores.items():
        for metric, score in metrics.items():
            # Some trackers refuse a comma in a name.
            name = f"{task}/{metric.replace(',', '.')}"
            fields = {"": score.value, "_stderr": score.stderr, "_base": score.base}
            for suffix, number in fields.items():
                if number is not None and math.isfinite(number):
                    numbers[f"{name}{suffix}"] = number
    return numbers


def _number(value: Any) -> float | None:
    """Return a finite float with six significant digits, or None for lm-eval's placeholders 'N/A' and nan.

    With six digits, the scores of sixteen tasks fit into a termination message; results.json has all digits.
    """
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    if not math.isfinite(number):
        return None
    return significant(number)


def paired_differences(
    output: Output, base: Output, loaded: Loaded
) -> dict[str, Numbers]:
    """Return mean and standard error of the differences output - base, by task or group, in lm-eval's names.

    Only metrics that lm-eval aggregates as a mean over questions are in it, and groups of such metrics.
    """
    differences = {
        name: _task_differences(task, output["samples"][name], base["samples"][name])
        for name, task in loaded["tasks"].items()
    }
    groups = {
        name: _group_differences(group, output["results"], differences)
        for name, group in loaded["groups"].items()
    }
    return {**differences, **groups}


def _task_differences(
    task: Any, samples: Iterable[Numbers], base_samples: Iterable[Numbers]
) -> dict[str, Any]:
    values = _means_by_question(task, samples)
    base_values = _means_by_question(task, base_samples)
    numbers: dict[str, Any] = {}
    for (metric, filter_name), by_question in values.items():
        of_base = base_values.get((metric, filter_name), {})
        if by_question.keys() != of_base.keys():
            # Without a value for some questions, the two means are not over the same questions.
            continue
        difference = paired_difference(
            list(by_question.values()),
            [of_base[question] for question in by_question],
            [1.0] * len(by_question),
        )
        numbers[f"{metric},{filter_name}"] = difference.mean
        # A single question has no standard error; this is lm-eval's own placeholder.
        numbers[f"{metric}_stderr,{filter_name}"] = "N/A"
        if difference.stderr is not None:
            numbers[f"{metric}_stderr,{filter_name}"] = difference.stderr
        numbers["sample_len"] = difference.questions
    return numbers


def _group_differences(
    group: Any, results: Mapping[str, Numbers], differences: Mapping[str, Numbers]
) -> Numbers:
    """Aggregate the differences of a group's tasks with the group's own weights, as lm-eval does with the scores."""
    members = [task.task_name for task in group.get_all_tasks()]
    # A metric without differences in some task has no group mean, either.
    partial = {
        key
        for name in members
        for key in results[name]
        if "," in key and key not in differences[name]
    }
    complete = {
        name: {
            key: value for key, value in differences[name].items() if key not in partial
        }
        for name in members
    }
    aggregated: Numbers = group.aggregate(complete)
    return aggregated


def _means_by_question(
    task: Any, samples: Iterable[Numbers]
) -> dict[MetricFilter, dict[int, float]]:
    """Return the values of each metric that is a mean over questions, by metric and filter, then by question."""
    aggregation = task.aggregation()
    # lm-eval, too, takes the mean of a metric that names no aggregation.
    return values_by_question(
        samples, lambda metric: aggregation.get(metric, mean) is mean
    )
