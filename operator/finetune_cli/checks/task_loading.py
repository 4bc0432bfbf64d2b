"""Loads task files as evaluate does, in a process of the trainer, which runs no code of them and uses no network."""

import importlib.util
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from finetune_cli.checks.built_in_tasks import read_built_in_tasks
from finetune_cli.checks.standard_errors import errors_by_answer
from finetune_cli.checks.task_file import data_set_of
from finetune_cli.checks.trainer_process import run_module
from finetune_cli.diagnostics import Diagnostic
from finetune_cli.manifest.fields import (
    Location,
    TaskField,
    gate_metrics,
    lm_eval_tasks,
)
from finetune_cli.manifest.manifest import Manifest
from finetune_trainer.contract import Environment, GatedMetric
from finetune_trainer.contract.environment import InvalidLocation
from finetune_trainer.exit_codes import PERMANENT_EXIT_CODES

MODULE = "finetune_trainer.evaluation.check"
# lm-eval takes seconds to load. `datasets` converts a file before its first record can be read.
LONGEST_SECONDS = 240.0
"""Longest time for all tasks of a manifest."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
NOT_INSTALLED = "lm-eval is not installed here"
NO_ANSWER = f"it could not be loaded here within {LONGEST_SECONDS:g} s"


def loading_problems(
    manifest: Manifest, environment: Environment
) -> tuple[list[Diagnostic], list[str]]:
    """Return an error for each task that evaluate cannot load, and a line for each that was not looked at."""
    tasks = list(lm_eval_tasks(manifest.spec))
    not_looked_at = [
        f"{task.name}: not looked at: {reason}" for task, reason in _not_in_files(tasks)
    ]
    files = dict(_files(tasks, environment))
    if not files:
        return [], not_looked_at
    if importlib.util.find_spec("lm_eval") is None:
        not_looked_at += [
            f"{task.file}: not looked at: {NOT_INSTALLED}" for task in files
        ]
        return [], not_looked_at
    answers = load_in_trainer(files)
    problems = [
        *_unmeasured(manifest, answers),
        *errors_by_answer(gate_metrics(manifest.spec), answers),
    ]
    errors = [manifest.diagnostic(*problem) for problem in problems]
    for task, file in files.items():
        answer = answers.get(task.name)
        code = answer and answer["exit_code"]
        if answer is not None and code is None:
            continue
        if answer is not None and code in PERMANENT_EXIT_CODES:
            location: Location = (*task.location, "file")
            message = str(answer["message"]).removeprefix(
                f"evaluate.tasks[{task.name}]: file://{file}: "
            )
            errors.append(manifest.diagnostic(location, message))
            continue
        reason = answer["message"] if answer else NO_ANSWER
        not_looked_at.append(f"{task.file}: not looked at: {reason}")
    return errors, not_looked_at


def _unmeasured(
    manifest: Manifest, answers: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[Location, str]]:
    """Yield location and message for each gate on a score that its task does not have."""
    for gate in gate_metrics(manifest.spec):
        names = answers.get(gate.task, {}).get("metrics")
        score = GatedMetric(task=gate.task, metric=gate.metric)
        if names is None or score.is_measured(names):
            continue
        message = f"{gate.metric} is not measured by the task {gate.task}"
        message += f"; it measures {' and '.join(names) or 'nothing'}"
        yield gate.location, message


def _not_in_files(tasks: Iterable[TaskField]) -> Iterator[tuple[TaskField, str]]:
    """Yield lm-eval's own tasks, each with the reason for which its data are not looked at."""
    own = [task for task in tasks if task.file is None]
    if not own:
        return
    known = read_built_in_tasks()
    for task in own:
        if known is None:
            yield task, NOT_INSTALLED
        # A task that lm-eval does not have is an error already.
        elif task.name in known.files:
            data_set = data_set_of(known.files[task.name]) or "of its tasks"
            yield (
                task,
                f"evaluate downloads the data set {data_set} from the Hugging Face hub",
            )


def _files(
    tasks: Iterable[TaskField], environment: Environment
) -> Iterator[tuple[TaskField, Path]]:
    """Yield the tasks whose files are on this machine; all others are reported as sources."""
    for task in tasks:
        if task.file is None:
            continue
        try:
            path = environment.locate(task.file)
        except InvalidLocation:
            continue
        # An empty file is an error already.
        if path.is_file() and path.stat().st_size:
            yield task, path.absolute()


def load_in_trainer(files: dict[TaskField, Path]) -> dict[str, dict[str, Any]]:
    """Return the answer of `finetune_trainer.evaluation.check` for each task that has an answer."""
    items = [
        {
            "name": task.name,
            "file": f"file://{file}",
            "fewShot": task.few_shot,
            "allowCode": task.allow_code,
        }
        for task, file in files.items()
    ]
    # datasets writes each file that it converts into its cache, and a check leaves nothing behind.
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, **OFFLINE, "HF_DATASETS_CACHE": cache}
        process = run_module(MODULE, json.dumps(items), environment, LONGEST_SECONDS)
    if process is None:
        # No answer is no error: evaluate itself reports what is wrong.
        return {}
    answers = [json.loads(line) for line in process.stdout.splitlines()]
    return {answer["name"]: answer for answer in answers}
