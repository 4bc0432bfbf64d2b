"""The scores that evaluate will report, known from invented answers."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from lm_eval.api.metrics import mean, stderr_for_metric
from lm_eval.evaluator_utils import EvalAcc
from lm_eval.evaluator_utils import aggregate_groups as aggregate_groups_of_lm_eval

from finetune_trainer.contract import GatedMetric
from finetune_trainer.evaluation.invented_answers import Results, naming_part
from finetune_trainer.evaluation.scores import extract_scores
from finetune_trainer.evaluation.task_files import Loaded
from finetune_trainer.runtime.errors import ConfigInvalid

WithoutError = dict[str, list[str]]
"""Metrics of a task without a standard error, of the score by `Value`, of its difference from the base's by `Base`."""


def aggregate_groups(loaded: Loaded, results: dict[str, Results | None]) -> None:
    """Add the results of the groups to the results of their members, as lm-eval aggregates them.

    Without the results of all members, the groups have none, either.
    """
    known = {name: result for name, result in results.items() if result is not None}
    groups = loaded["groups"]
    if len(known) < len(results):
        results |= dict.fromkeys(groups)
        return
    with naming_part("aggregate_metric_list cannot be aggregated", "correct it"):
        everything = EvalAcc(metrics=known, groups=groups)
        results |= aggregate_groups_of_lm_eval(everything).metrics


def check_aggregates(loaded: Loaded, results: Mapping[str, Results | None]) -> None:
    """Raise ConfigInvalid for a metric or a filter that a group aggregates, and that no member has."""
    for group in loaded["groups"].values():
        aggregated = results[group.name]
        if aggregated is None:
            continue
        members = [results[task.task_name] or {} for task in group.get_all_tasks()]
        measured = sorted({name for member in members for name in _measured(member)})
        for name in _wanted(group, measured):
            if name not in aggregated:
                raise ConfigInvalid(
                    f"the group {group.name} aggregates {name}, which none of its members measures; "
                    f"they measure {' and '.join(measured)}"
                )


def _wanted(group: Any, measured: Sequence[str]) -> Iterator[str]:
    """Yield the metrics that a group aggregates, with their filters if it names them."""
    for entry in group.aggregate_metric_list or ():
        if entry.filter_list is not None:
            for name in entry.filter_list:
                yield f"{entry.metric},{name}"
        # Without filters, lm-eval takes all that the members have.
        elif not any(name.startswith(f"{entry.metric},") for name in measured):
            yield entry.metric


def _measured(result: Results) -> list[str]:
    return [name for name in result if "," in name and "_stderr," not in name]


def measured_metrics(
    results: Mapping[str, Results | None], tasks: Mapping[str, Sequence[str]]
) -> dict[str, tuple[str, ...]]:
    """Return the names of the scores of tasks, groups and their members; none if a result is not known.

    Raise ConfigInvalid as `extract_scores`.
    """
    if None in results.values():
        return {}
    finite = {name: _finite(result or {}) for name, result in results.items()}
    try:
        scores = extract_scores({"results": finite}, tasks)
    except ConfigInvalid as error:
        # The caller names the task.
        raise ConfigInvalid(str(error).partition("]: ")[2]) from error
    return {task: tuple(metrics) for task, metrics in scores.items()}


def metrics_without_error(loaded: Loaded) -> dict[str, WithoutError]:
    """Return the metrics of each task and group that have no standard error, by what a gate compares."""
    tasks = {
        name: _without_error(task.aggregation())
        for name, task in loaded["tasks"].items()
    }
    groups: dict[str, WithoutError] = {}
    for name, group in loaded["groups"].items():
        members = [tasks[task.task_name] for task in group.get_all_tasks()]
        # lm-eval has an error of a group only if each member has its own.
        groups[name] = {
            against: sorted(
                {metric for member in members for metric in member[against]}
            )
            for against in ("Value", "Base")
        }
    return tasks | groups


def _without_error(aggregations: Mapping[str, Any]) -> WithoutError:
    return {
        # One resampling is enough to know whether the error of a function is estimated.
        "Value": [
            metric
            for metric, function in aggregations.items()
            if stderr_for_metric(function, 1) is None
        ],
        # The difference in each question is known of means only.
        "Base": [
            metric for metric, function in aggregations.items() if function is not mean
        ],
    }


def _finite(result: Results) -> Results:
    """Return the results with a number for each NaN: a few invented answers may have no correlation, or no score."""
    return {
        key: 0.0 if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in result.items()
    }


def check_gated(
    gated: Iterable[GatedMetric], metrics: Mapping[str, Sequence[str]]
) -> None:
    """Raise ConfigInvalid for a gate on a metric that its task does not measure."""
    for gate in gated:
        names = metrics.get(gate.task)
        if names is not None and not gate.is_measured(names):
            raise ConfigInvalid(
                f"evaluate.gates[{gate.task}].metric: {gate.metric} is not measured; "
                f"the task measures {' and '.join(names) or 'nothing'}"
            )
