"""Scoring of invented answers as lm-eval scores a model's: what cannot be scored is known before a model is loaded."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.metrics import mean
from lm_eval.api.registry import DEFAULT_METRIC_REGISTRY, aggregation_registry
from lm_eval.evaluator_utils import _compute_task_aggregations

from finetune_trainer.evaluation.task_errors import is_of_the_network
from finetune_trainer.evaluation.task_shapes import nearest_name
from finetune_trainer.runtime.errors import ConfigInvalid, StageError, short_reason

# A metric may take long for each answer.
SCORED = 8
"""Questions of each task whose invented answers are scored."""
SHOWN_CHARACTERS = 60
"""Characters of a response in a message."""
WRONG_ANSWER = "I do not know."
Results = dict[str, Any]
"""Numbers of one task by lm-eval's names, such as `acc,none`."""
Request = tuple[Any, list[Instance]]
"""A question, and what lm-eval asks the model about it."""


def score_invented_answers(task: Any, requests: Sequence[Request]) -> Results:
    """Return lm-eval's results for right and wrong answers to the questions.

    Raise ConfigInvalid if a filter, a metric or an aggregation of the task cannot process them.
    """
    for number, (question, instances) in enumerate(requests):
        for instance in instances:
            answer = _answer(task, question, instance, number)
            instance.resps = [answer] * instance.repeats
    _apply_filters(task, [part for _, instances in requests for part in instances])
    values = _values(task, requests)
    _check_measured(task, {metric for metric, _ in values})
    return _aggregate(task, values)


def _answer(task: Any, question: Any, instance: Instance, number: int) -> Any:
    """Return an answer in the form of a model's: the right answer to every second question, else a wrong answer."""
    if instance.request_type == "loglikelihood":
        return -1.0 - (instance.idx + number) % 7, bool(number % 2)
    if instance.request_type == "loglikelihood_rolling":
        return -1.0 - number
    if number % 2:
        return WRONG_ANSWER
    return _right_answer(task, question)


def _right_answer(task: Any, question: Any) -> str:
    target = task.doc_to_target(question)
    if isinstance(target, list):
        target = target[0] if target else ""
    if isinstance(target, int) and task.get_config("doc_to_choice") is not None:
        target = task.doc_to_choice(question)[target]
    return str(target)


def _apply_filters(task: Any, instances: list[Instance]) -> None:
    for ensemble in task._filters:  # noqa: SLF001  apply_filters does not say which filter fails
        with naming_part(
            f"filter_list: the filter {ensemble.name} cannot be applied",
            "correct its function and its arguments",
        ):
            ensemble.apply(instances)


def _values(task: Any, requests: Sequence[Request]) -> dict[tuple[str, str], list[Any]]:
    """Return the values of each metric, by metric and filter."""
    values: dict[tuple[str, str], list[Any]] = {}
    for ensemble in task._filters:  # noqa: SLF001  see above
        for question, instances in requests:
            responses = [part.filtered_resps[ensemble.name] for part in instances]
            with naming_part(
                f"metric_list: the response {_shown(responses)} cannot be scored",
                _fix_of_metrics(task),
            ):
                metrics = task.process_results(question, responses)
                pairs = list(metrics.items())
            for metric, value in pairs:
                values.setdefault((metric, ensemble.name), []).append(value)
    return values


def _shown(responses: list[Any]) -> str:
    text = repr(responses[0]) if responses else "nothing"
    if len(text) > SHOWN_CHARACTERS:
        text = f"{text[:SHOWN_CHARACTERS]}…"
    return text


def _fix_of_metrics(task: Any) -> str:
    if task.get_config("process_results") is not None:
        return "correct process_results"
    kind = task.OUTPUT_TYPE
    return f"correct filter_list or the metric's arguments, or use a metric for {kind}, such as {_usual(kind)}"


def _check_measured(task: Any, measured: set[str]) -> None:
    """Raise ConfigInvalid for a metric that lm-eval does not compute for the task's type of output."""
    kind = task.OUTPUT_TYPE
    # A metric of generated text may return values under other names, and so may a function of the task.
    if kind == "generate_until" or task.get_config("process_results") is not None:
        return
    for metric in getattr(task, "_metric_fn_list", {}):
        if metric not in measured:
            raise ConfigInvalid(
                f"metric_list: lm-eval does not compute {metric} for output_type {kind}; "
                f"remove it, or use {_usual(kind)}"
            )


def _usual(kind: str) -> str:
    """Return the names of the metrics that lm-eval computes for a type of output if a task names none."""
    return " or ".join(DEFAULT_METRIC_REGISTRY.get(kind, ()))


def _aggregate(task: Any, values: dict[tuple[str, str], list[Any]]) -> Results:
    results: Results = {}
    for (metric, filter_name), items in values.items():
        function = task.aggregation().get(metric, mean)
        if function is None:
            raise ConfigInvalid(_unknown_aggregation(task, metric))
        with naming_part(
            f"metric_list: the values of {metric} cannot be aggregated",
            "correct its aggregation, or use a metric for "
            f"{task.OUTPUT_TYPE}, such as {_usual(task.OUTPUT_TYPE)}",
        ):
            numbers, size = _compute_task_aggregations(
                task, {(metric, filter_name): items}, bootstrap_iters=0
            )
        results |= numbers | {"sample_len": size}
    return results


def _unknown_aggregation(task: Any, metric: str) -> str:
    for entry in task.get_config("metric_list") or ():
        name = entry.get("aggregation")
        if entry.get("metric") != metric or not name:
            continue
        nearest = nearest_name(str(name), aggregation_registry.keys())
        hint = nearest or f"; it has {', '.join(sorted(aggregation_registry.keys()))}"
        return f"metric_list: lm-eval has no aggregation {name}{hint}"
    return f"metric_list: {metric} has no aggregation; add aggregation: mean"


@contextlib.contextmanager
def naming_part(part: str, fix: str) -> Iterator[None]:
    """Raise every error of the block as ConfigInvalid with the part of the task and the fix.

    Errors that another attempt may not meet are raised as they are.
    """
    try:
        yield
    except (StageError, MemoryError, OSError):
        raise
    except Exception as error:
        if is_of_the_network(error):
            raise
        raise ConfigInvalid(f"{part}: {short_reason(_first(error))}; {fix}") from error


def _first(error: Exception) -> Exception:
    """Return the error that led to this error. lm-eval calls a metric again, in another way, after a TypeError."""
    if isinstance(error, TypeError) and isinstance(error.__context__, TypeError):
        return error.__context__
    return error
