"""Looks at the tasks of evaluate before anything starts: does lm-eval have them, and do they measure the metrics."""

import contextlib
import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path

from finetune_cli.checks.built_in_tasks import BuiltInTasks, read_built_in_tasks
from finetune_cli.checks.standard_errors import errors_by_file
from finetune_cli.checks.task_file import (
    named_function,
    task_filters,
    task_metrics,
)
from finetune_cli.diagnostics import Diagnostic, closest_match
from finetune_cli.manifest.fields import (
    GateMetric,
    Location,
    built_in_tasks,
    gate_metrics,
    lm_eval_tasks,
    task_files,
)
from finetune_cli.manifest.manifest import Manifest
from finetune_operator.api.spec import PipelineSpec
from finetune_trainer.contract import Environment
from finetune_trainer.contract.environment import InvalidLocation

MAX_NAMES = 3


def task_errors(manifest: Manifest, environment: Environment) -> Iterator[Diagnostic]:
    """Yield an error for each task that lm-eval does not have, and for each gate whose task measures another metric.

    Tasks of lm-eval itself are not checked if it is not installed.
    """
    files: dict[str, Path] = {}
    tasks = list(built_in_tasks(manifest.spec))
    built_in = None
    if tasks:
        # Reading the files of lm-eval takes a second, so only for a manifest that needs them.
        built_in = read_built_in_tasks()
    if built_in:
        for location, name in tasks:
            message = _unknown_task(name, built_in)
            if message:
                yield manifest.diagnostic(location, message)
            else:
                files[name] = built_in.files[name]
    own_files = _files_of_the_manifest(manifest.spec, environment)
    for location, message in _refused_code(manifest.spec, own_files):
        yield manifest.diagnostic(location, message)
    files |= own_files
    for location, message in _unknown_metrics(manifest.spec, files):
        yield manifest.diagnostic(location, message)
    for location, message in errors_by_file(gate_metrics(manifest.spec), files):
        yield manifest.diagnostic(location, message)


def _refused_code(
    spec: PipelineSpec, files: Mapping[str, Path]
) -> Iterator[tuple[Location, str]]:
    """Yield location and message for each task whose file names code that evaluate refuses to run."""
    for task in lm_eval_tasks(spec):
        file = files.get(task.name)
        if task.file is None or task.allow_code or file is None:
            continue
        function = named_function(file)
        if function:
            message = f"it runs code (!function {function})"
            message += "; if you trust it, set allowCode: true for this task"
            yield (*task.location, "file"), message


def _unknown_task(name: str, built_in: BuiltInTasks) -> str | None:
    """Return why evaluate refuses a task of lm-eval; None if it accepts the task."""
    if name in built_in.files:
        return None
    if name in built_in.tags:
        return f"{name} is a tag for several lm-eval tasks and has no score; name the tasks instead"
    hint = "set file: to use a task of your own"
    nearest = difflib.get_close_matches(name, built_in.files, MAX_NAMES)
    if nearest:
        hint = f"did you mean {' or '.join(nearest)}?"
    return f"lm-eval has no task {name}; {hint}"


def _files_of_the_manifest(
    spec: PipelineSpec, environment: Environment
) -> dict[str, Path]:
    """Return task -> its file, without files that cannot be located: each is reported already."""
    files = {}
    for name, uri in task_files(spec).items():
        with contextlib.suppress(InvalidLocation):
            files[name] = environment.locate(uri)
    return files


def _wrong_filter(gate: GateMetric, file: Path) -> str:
    """Return why evaluate reports no score of this name, although it measures the metric; empty if it does."""
    metric, comma, chosen = gate.metric.partition(",")
    filters = task_filters(file, metric)
    if not filters:
        return ""
    names = [f"{metric},{name}" for name in filters]
    if comma and chosen not in filters:
        message = f"{gate.metric} is not measured by the task {gate.task}"
        return f"{message}: {file.name} has {' and '.join(names)}"
    if not comma and len(filters) > 1:
        message = f"the task {gate.task} measures {metric} once for each of its filters"
        return f"{message}; write {' or '.join(names)}"
    return ""


def _unknown_metrics(
    spec: PipelineSpec, files: Mapping[str, Path]
) -> Iterator[tuple[Location, str]]:
    """Yield location and message for each gate with a metric that its task's file does not list."""
    for gate in gate_metrics(spec):
        file = files.get(gate.task)
        if file is None:
            continue
        metrics = task_metrics(file)
        # lm-eval names a metric with its filter, as in exact_match,strict-match; the file lists it without.
        metric = gate.metric.partition(",")[0]
        if metrics == []:
            yield (
                gate.location,
                f"the group {gate.task} has no scores of its own; add aggregate_metric_list to {file.name}",
            )
            continue
        if metrics is None or metric in metrics:
            message = _wrong_filter(gate, file)
            if message:
                yield gate.location, message
            continue
        message = f"{metric} is not measured by the task {gate.task}"
        message += f": {file.name} lists {', '.join(metrics)}"
        match = closest_match(metric, metrics)
        if match:
            message += f"; did you mean {match}?"
        yield gate.location, message
