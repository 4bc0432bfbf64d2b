"""Looks at the tasks of evaluate before anything starts: does lm-eval have them, and do they measure the metrics."""

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path

from finetune_cli.built_in_tasks import BuiltInTasks, read_built_in_tasks
from finetune_cli.diagnostics import Diagnostic, closest_match
from finetune_cli.fields import Location, built_in_tasks, gate_metrics, task_files
from finetune_cli.manifest.manifest import Manifest
from finetune_cli.task_file import task_metrics
from finetune_operator.api.spec import PipelineSpec
from finetune_trainer.contract import Environment
from finetune_trainer.contract.environment import InvalidLocation

MAX_NAMES = 3


def task_errors(manifest: Manifest, environment: Environment) -> Iterator[Diagnostic]:
    """Yield an error for each task that lm-eval does not have, and for each gate whose task measures another metric.

    Nothing is said of the tasks of lm-eval itself where it is not installed.
    """
    named = list(built_in_tasks(manifest.spec))
    built_in = read_built_in_tasks() if named else None
    if built_in:
        for location, name in named:
            if message := _unknown_task(name, built_in):
                yield manifest.diagnostic(location, message)
    files = (
        {name: built_in.files[name] for _, name in named if name in built_in.files}
        if built_in
        else {}
    )
    files |= _files_of_the_manifest(manifest.spec, environment)
    for location, message in _unknown_metrics(manifest.spec, files):
        yield manifest.diagnostic(location, message)


def _unknown_task(name: str, built_in: BuiltInTasks) -> str | None:
    """Return why evaluate refuses a task of lm-eval; None where it does not."""
    if name in built_in.files:
        return None
    if name in built_in.tags:
        return f"{name} is a tag for several lm-eval tasks and has no score; name the tasks instead"
    nearest = difflib.get_close_matches(name, built_in.files, MAX_NAMES)
    hint = (
        f"did you mean {' or '.join(nearest)}?"
        if nearest
        else "set file: to use a task of your own"
    )
    return f"lm-eval has no task {name}; {hint}"


def _files_of_the_manifest(spec: PipelineSpec, environment: Environment) -> dict[str, Path]:
    """Return task -> its file, without those that cannot be located: each is reported already."""
    found = {}
    for name, uri in task_files(spec).items():
        try:
            found[name] = environment.locate(uri)
        except InvalidLocation:
            continue
    return found


def _unknown_metrics(
    spec: PipelineSpec, files: Mapping[str, Path]
) -> Iterator[tuple[Location, str]]:
    """Yield location and message for each gate with a metric that its task's file does not list."""
    for gate in gate_metrics(spec):
        metrics = task_metrics(files[gate.task]) if gate.task in files else None
        wanted = gate.metric.partition(",")[0]
        if metrics and wanted not in metrics:
            match = closest_match(wanted, metrics)
            hint = f"; did you mean {match}?" if match else ""
            name = files[gate.task].name
            message = f"{wanted} is not measured by the task {gate.task}: {name} lists {', '.join(metrics)}{hint}"
            yield gate.location, message
