"""Reads from a task file of lm-eval which metrics the task measures."""

from pathlib import Path
from typing import Any

import yaml

DEFAULT_METRICS = {
    "loglikelihood": ["perplexity", "acc"],
    "loglikelihood_rolling": ["word_perplexity", "byte_perplexity", "bits_per_byte"],
    "multiple_choice": ["acc", "acc_norm"],
    "generate_until": ["exact_match"],
}
"""Type of output -> the metrics of a task without a metric_list: DEFAULT_METRIC_REGISTRY of lm_eval.api.registry."""
DEFAULT_AGGREGATIONS = {
    **dict.fromkeys(("acc", "acc_norm", "exact_match"), "mean"),
    **dict.fromkeys(("word_perplexity", "byte_perplexity"), "weighted_perplexity"),
    **{
        name: name
        for name in (
            "bits_per_byte",
            "perplexity",
            "f1",
            "bleu",
            "chrf",
            "ter",
            "brier_score",
        )
    },
    "mcc": "matthews_corrcoef",
}
"""Metric -> lm-eval's name for the function that makes its score, if the task names none."""
# A file may include itself, directly or through others.
MAX_INCLUDES = 8


class _TaskLoader(yaml.SafeLoader):
    """A loader that reads `!function module.name` as None instead of importing anything."""


_TaskLoader.add_multi_constructor("!", lambda *_: None)


def task_metrics(path: Path) -> list[str] | None:
    """Return the metrics that a task measures, or None if its file alone does not name them.

    This is so for metrics that are functions, and for a file that cannot be read. A group that aggregates no metrics
    measures none.
    """
    task = _with_includes(path, MAX_INCLUDES)
    if task is None or has_own_results(task):
        return None
    if _is_group(task):
        aggregates = task.get("aggregate_metric_list")
        return _names(aggregates) if aggregates else []
    if task.get("metric_list") is None:
        # generate_until is lm-eval's own default.
        return DEFAULT_METRICS.get(str(task.get("output_type", "generate_until")))
    return _names(task["metric_list"])


def named_function(path: Path, depth: int = MAX_INCLUDES) -> str | None:
    """Return the first `!function` of a task file or of a file that it includes; None if they have none."""
    try:
        text = path.read_text("utf-8")
        for event in yaml.parse(text, yaml.SafeLoader):
            if isinstance(event, yaml.ScalarEvent) and event.tag == "!function":
                return str(event.value)
        # The loader is a SafeLoader.
        task = yaml.load(text, _TaskLoader)  # noqa: S506
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return None
    included = task.get("include") if isinstance(task, dict) else None
    # A file may include itself.
    if not included or depth == 0:
        return None
    for name in included if isinstance(included, list) else [included]:
        function = named_function(path.parent / str(name), depth - 1)
        if function:
            return function
    return None


def aggregation_of(path: Path, metric: str) -> str | None:
    """Return the name of the function that makes a score of a metric's values; None if the file does not name it."""
    task = _with_includes(path, MAX_INCLUDES)
    if task is None or "class" in task or _is_group(task):
        return None
    entries = task.get("metric_list")
    if entries is None:
        return DEFAULT_AGGREGATIONS.get(metric)
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict) and entry.get("metric") == metric:
            # A function of the task is read as None.
            default = (
                None if "aggregation" in entry else DEFAULT_AGGREGATIONS.get(metric)
            )
            return entry.get("aggregation") or default
    return None


def task_filters(path: Path, metric: str) -> list[str] | None:
    """Return the filters of a task's responses: a score is named METRIC,FILTER if there are several.

    None if the file alone does not name them. This is so for a group that does not list them.
    """
    task = _with_includes(path, MAX_INCLUDES)
    if task is None or "class" in task:
        return None
    if _is_group(task):
        return _filters_of_group(task, metric)
    filters = task.get("filter_list")
    if filters is None:
        # lm-eval's own default.
        return ["none"]
    if not isinstance(filters, list):
        return None
    names = []
    for entry in filters:
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            return None
        names.append(entry["name"])
    return names


def _filters_of_group(group: dict[str, Any], metric: str) -> list[str] | None:
    names: list[str] = []
    for entry in group.get("aggregate_metric_list") or ():
        if not isinstance(entry, dict) or entry.get("metric") != metric:
            continue
        filters = entry.get("filter_list")
        if filters is None:
            return None
        names += [filters] if isinstance(filters, str) else filters
    return names or None


def data_set_of(path: Path) -> str | None:
    """Return the data set of a task; None for a group, and for a file that cannot be read."""
    task = _with_includes(path, MAX_INCLUDES)
    data_set = task and task.get("dataset_path")
    return str(data_set) if data_set else None


def _is_group(task: dict[str, Any]) -> bool:
    return "group" in task or isinstance(task.get("task"), list)


def _names(entries: Any) -> list[str] | None:
    """Return the names of metrics in a list; None if it has none, or if one of them has no name."""
    if not isinstance(entries, list) or not entries:
        return None
    names = []
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("metric"), str):
            return None
        names.append(entry["metric"])
    return names


def has_own_results(task: dict[str, Any]) -> bool:
    """Return whether functions of the task compute its scores: the functions then decide their names."""
    return "process_results" in task or "class" in task


def _with_includes(path: Path, depth: int) -> dict[str, Any] | None:
    try:
        # The loader is a SafeLoader.
        task = yaml.load(path.read_text("utf-8"), _TaskLoader)  # noqa: S506
    except (OSError, ValueError, yaml.YAMLError):
        return None
    if not isinstance(task, dict):
        return None
    include = task.get("include")
    if not include:
        return task
    # A file may include itself.
    if depth == 0:
        return None
    included = _with_includes(path.parent / str(include), depth - 1)
    if included is None:
        return None
    return included | task
