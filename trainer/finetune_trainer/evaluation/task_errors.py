"""Errors of lm-eval, `datasets` and the code of a task, as errors of the stage that name task, file and data."""

import contextlib
import re
import traceback
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from datasets.exceptions import DatasetGenerationError
from lm_eval.api.registry import metric_registry
from lm_eval.api.task import ConfigurableTask, Task
from lm_eval.config.task import TaskConfig

from finetune_trainer.evaluation.task_shapes import nearest_name, wrong_shape
from finetune_trainer.runtime.errors import (
    ConfigInvalid,
    DataInvalid,
    MachineUnable,
    ServiceUnavailable,
    SourceNotFound,
    StageError,
    short_reason,
)

NETWORK_LIBRARIES = frozenset({"aiohttp", "httpx", "httpx2", "requests", "urllib3"})
"""Packages whose exceptions are failures of the network, also if they are no OSError."""
UNREADABLE = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
"""Failures of a path that another attempt would meet again."""
PARTS = (
    "doc_to_text",
    "doc_to_choice",
    "doc_to_target",
    "doc_to_prefix",
    "process_docs",
)
"""Functions of lm-eval, each with the name of the key in the task file that it renders."""
KEYS = frozenset({"doc_to_text", "doc_to_choice", "doc_to_target"})
"""Keys that a task may need."""
SPLITS = ("test_split", "validation_split", "training_split", "fewshot_split")


@contextlib.contextmanager
def naming(name: str, file: str | None) -> Iterator[None]:
    """Add a task's field and file to every error in the block, and turn errors of libraries into stage errors."""
    place = f"evaluate.tasks[{name}]: "
    if file is not None:
        place += f"{file}: "
    try:
        yield
    except StageError as error:
        if isinstance(error, ConfigInvalid | DataInvalid | SourceNotFound):
            raise type(error)(f"{place}{error}") from error
        raise
    except MemoryError:
        # The node has too little memory. The task may be right.
        raise
    except Exception as error:
        raise translated(error, name, place) from error


@contextlib.contextmanager
def naming_member(task: Any, group: str) -> Iterator[None]:
    """Add the name and the file of a group's member to the permanent errors of the block."""
    try:
        yield
    except (ConfigInvalid, DataInvalid) as error:
        raise type(error)(f"{_member(task, group)}{error}") from error


def translated(error: Exception, name: str, place: str) -> StageError:
    """Return the stage error for an error that lm-eval raised while it built or rendered a task.

    `place` precedes the message; a member of the group `name` is named after it.
    """
    task = failed_task(error)
    where = place + _member(task, name)
    # `datasets` raises it for an empty file.
    if isinstance(error, StopIteration):
        return DataInvalid(f"{where}its data is empty")
    cause = error
    if isinstance(error, DatasetGenerationError) and error.__cause__:
        cause = error.__cause__
    if isinstance(cause, UNREADABLE):
        return SourceNotFound(f"{where}its data does not exist: {cause}")
    if isinstance(cause, OSError) or is_of_the_network(cause):
        # `datasets` raises it if the hub cannot be reached, after its own retries.
        kind = MachineUnable if _is_without_network(cause) else ServiceUnavailable
        return kind(
            f"{where}its data cannot be downloaded: {cause}; a task with `file:` and local data needs no network"
        )
    if isinstance(error, DatasetGenerationError):
        return DataInvalid(f"{where}its data cannot be read: {cause}")
    return ConfigInvalid(f"{where}{_problem(error, task)}")


def _is_without_network(error: BaseException) -> bool:
    """Return whether a connection could not be made at all, rather than broke."""
    broken = (ConnectionResetError, ConnectionAbortedError, BrokenPipeError)
    names = {kind.__name__ for kind in type(error).__mro__}
    made_none = bool(names & {"ConnectionError", "ConnectError"})
    return made_none and not isinstance(error, broken)


def failed_task(error: BaseException) -> Any | None:
    """Return the task of lm-eval whose method raised an error; None if there is none."""
    # lm-eval renders a question in the constructor, so the caller has no task yet.
    task = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        candidate = frame.f_locals.get("self")
        if isinstance(candidate, Task):
            task = candidate
    return task


def _config_of(error: BaseException) -> TaskConfig | None:
    """Return the configuration of the task that raised an error, perhaps unfinished; None if there is none."""
    config = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        candidate = frame.f_locals.get("self")
        candidate = getattr(candidate, "_config", candidate)
        if isinstance(candidate, TaskConfig):
            config = candidate
    return config


def _member(task: Any | None, group: str) -> str:
    """Return the name and the file of a member of a group, as a prefix of a message; empty for any other task."""
    config = getattr(task, "_config", None)
    name = getattr(config, "task", None)
    if config is None or not name or name == group:
        return ""
    source = str((config.metadata or {}).get("config_source", ""))
    # An inline member of a group has no file of its own.
    file = f", file {Path(source).name}" if source.endswith(".yaml") else ""
    return f"its member {name}{file}: "


def is_of_the_network(error: BaseException) -> bool:
    """Return whether a library for the network raised an error."""
    packages = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
    return bool(packages & NETWORK_LIBRARIES)


def _problem(error: Exception, task: Any | None) -> str:
    """Return what is wrong with a task, with the fix if it is known."""
    if isinstance(error, RecursionError):
        return "a group or a template contains itself; remove the member that leads back to it"
    if isinstance(error, yaml.YAMLError):
        return _yaml_problem(error)
    if "Dataset scripts are no longer supported" in str(error):
        return (
            "its dataset_path is a Python script, which is not run; "
            "convert the data to JSON Lines or Parquet"
        )
    unknown_key = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    if unknown_key and "TaskConfig" in str(error):
        known = [field.name for field in fields(TaskConfig)]
        return (
            f"lm-eval has no key {unknown_key[1]}{nearest_name(unknown_key[1], known)}"
        )
    problem = wrong_shape(_config_of(error))
    if not problem and task is not None:
        problem = _problem_of_task(error, task)
    if problem:
        return problem
    return f"lm-eval cannot load the task: {short_reason(error)}"


def _yaml_problem(error: yaml.YAMLError) -> str:
    tag = re.search(r"constructor for the tag '(!\w+)'", str(error))
    if tag is None:
        return f"the file is not YAML: {' '.join(str(error).split())}"
    fix = "remove it"
    if tag[1] == "!include":
        fix = "write `include: FILE` for the keys of another file"
    return f"lm-eval does not know the tag {tag[1]}; {fix}"


def _problem_of_task(error: Exception, task: Any) -> str:
    """Return what is wrong with a task that lm-eval could not build or render; empty if nothing more is known."""
    for problem in (unknown_metric(task), _missing_split(task)):
        if problem:
            return problem
    columns = data_fields(task)
    if not columns:
        return ""
    with contextlib.suppress(Exception):
        # The error may be in this part itself.
        problem = wrong_target(task, task.eval_docs[0])
        if problem:
            return problem
    part = _failed_part(error) or "a question"
    if part in KEYS and task.get_config(part) is None:
        return f"{part} is missing; the data has the fields {', '.join(columns)}"
    names = ", ".join(columns)
    return f"{part} cannot be written: {short_reason(error)}; the data has the fields {names}"


def unknown_metric(task: Any) -> str:
    """Return the problem of a task with a metric that lm-eval does not have; empty if it has all of them."""
    if task.get_config("process_results") is not None:
        return ""
    for name, function in getattr(task, "_metric_fn_list", {}).items():
        if function is None:
            hint = nearest_name(name, [*metric_registry.keys()])
            if not hint:
                hint = "; a script of the package evaluate needs allowCode: true"
            return f"lm-eval has no metric {name}{hint}"
    return ""


def _missing_split(task: Any) -> str:
    dataset = getattr(task, "dataset", None)
    if not isinstance(dataset, dict):
        return ""
    for key in SPLITS:
        split = task.get_config(key)
        if split is not None and split not in dataset:
            return f"{key} is {split}, but the data has the splits {', '.join(dataset)}"
    return ""


def data_fields(task: Any) -> list[str]:
    """Return the names of the fields of a task's data; none if they are not known."""
    dataset = getattr(task, "dataset", None)
    if not isinstance(dataset, dict):
        return []
    for key in SPLITS:
        columns = getattr(dataset.get(task.get_config(key)), "column_names", None)
        if columns:
            return list(columns)
    return []


def _failed_part(error: Exception) -> str:
    """Return the key of the task file that could not be rendered; empty if the error is elsewhere."""
    part = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name in PARTS:
            part = frame.f_code.co_name
    return part


def wrong_target(task: Any, question: Any) -> str:
    """Return the problem of a question whose answer is none of its choices; empty if it has none.

    lm-eval itself counts every response to such a question as wrong.
    """
    if not isinstance(task, ConfigurableTask) or task.OUTPUT_TYPE != "multiple_choice":
        return ""
    # With several inputs, the choices are texts before the answer.
    if task.multiple_input:
        return ""
    choices = task.doc_to_choice(question)
    target = task.doc_to_target(question)
    targets = target if isinstance(target, list) else [target]
    for answer in targets:
        if answer is None:
            return "doc_to_target is empty"
        if isinstance(answer, int) and not 0 <= answer < len(choices):
            return (
                f"doc_to_target is {answer}, but the question has {len(choices)} choices, "
                f"which are numbered from 0"
            )
        if isinstance(answer, str) and answer not in choices:
            return (
                f"doc_to_target is {answer!r}, which is none of the choices {choices!r}"
            )
    return ""
