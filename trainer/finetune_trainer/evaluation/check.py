"""Looks at task files before a pipeline starts: `python -m finetune_trainer.evaluation.check`.

Reads a JSON list of tasks from stdin, each as in evaluate.tasks. Writes one JSON object a line to stdout: the task's
`name`, the `exit_code` with which evaluate would fail, and a `message`. Without an exit code evaluate can load and
score the task; `metrics` then has the names of its scores, or null if they are not known, and `without_error` those
without a standard error. BUG says that the task was not looked at.

The manifest may be another user's, so nothing in a task runs code here, and no data of other machines are read.
"""

import json
import sys
from pathlib import Path
from typing import Any

import datasets
import lm_eval.api.task
import lm_eval.tasks._yaml_loader
from lm_eval.api.registry import metric_registry
from pydantic import ValidationError

from finetune_trainer.contract import Environment, Task
from finetune_trainer.evaluation.measured import metrics_without_error
from finetune_trainer.evaluation.tasks import load_tasks
from finetune_trainer.exit_codes import ExitCode
from finetune_trainer.runtime.errors import StageError

READERS = frozenset({"arrow", "csv", "json", "parquet", "text"})
"""Values of dataset_path that read files, and neither run code nor unpickle."""
# A user waits for the answer in a terminal. `datasets` converts a whole file before its first record can be read.
MOST_BYTES = 64 << 20
"""Size of the data that are read."""


class NotLookedAt(Exception):
    """The task needs something that only evaluate may do."""


def _refuse_function(name: str, _folder: Path) -> Any:
    raise NotLookedAt(f"it runs code (!function {name}), which only evaluate does")


def _refuse_prompt(name: str, *_: Any) -> Any:
    raise NotLookedAt(f"it takes its prompt from elsewhere (use_prompt: {name})")


def _known_metric(name: str, *is_script: bool) -> Any:
    # lm-eval would look for any other name in the package `evaluate`, which runs scripts.
    if any(is_script) or name not in metric_registry:
        raise NotLookedAt(f"its metric {name} is a script, which only evaluate runs")
    return metric_registry.get(name)


def _load_local_dataset(path: Any = None, name: Any = None, **options: Any) -> Any:
    files = _strings(options.get("data_files"))
    remote = [file for file in files if "://" in file or "::" in file]
    # A folder could hold files for any reader.
    if path not in READERS or remote or options.get("data_dir"):
        source = remote[0] if remote else path
        raise NotLookedAt(f"its data set {source} is read by evaluate only")
    if sum(Path(file).stat().st_size for file in files if Path(file).is_file()) > (
        MOST_BYTES
    ):
        raise NotLookedAt("its data have more than 64 MiB, which evaluate reads")
    return LOAD_DATASET(path, name, **options)


def _strings(value: Any) -> list[str]:
    """Return the texts in a value and in the lists and mappings in it."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list | tuple):
        return []
    return [text for part in value for text in _strings(part)]


LOAD_DATASET = datasets.load_dataset


def run_no_code() -> None:
    """Replace the functions with which lm-eval runs code of a task or reads data from other machines."""
    lm_eval.tasks._yaml_loader._import_func_in_yml = _refuse_function  # noqa: SLF001  there is no setting for it
    lm_eval.api.task.get_prompt = _refuse_prompt
    lm_eval.api.task.get_metric = _known_metric
    datasets.load_dataset = _load_local_dataset


def check_task(task: Task, environment: Environment) -> dict[str, Any]:
    """Return the answer about a task."""
    answer: dict[str, Any] = {"name": task.name, "exit_code": None, "message": ""}
    try:
        loaded = load_tasks([task], environment, seed=0)
    except StageError as error:
        reason = _reason(error)
        if reason:
            return answer | {"exit_code": ExitCode.BUG, "message": reason}
        return answer | {"exit_code": error.exit_code, "message": str(error)}
    metrics = loaded.metrics
    names = metrics.get(task.name, ())
    without_error = metrics_without_error(loaded.tasks).get(task.name, {})
    return answer | {
        "metrics": names if metrics else None,
        "without_error": without_error,
    }


def _reason(error: BaseException | None) -> str:
    """Return the message of NotLookedAt if it is among the causes of an error."""
    while error is not None:
        if isinstance(error, NotLookedAt):
            return str(error)
        error = error.__cause__
    return ""


def main() -> None:
    """Check the tasks of stdin."""
    run_no_code()
    for fields in json.load(sys.stdin):
        print(json.dumps(_answer(fields)), flush=True)


def _answer(fields: Any) -> dict[str, Any]:
    try:
        task = Task.model_validate(fields)
    except ValidationError as error:
        name = fields.get("name") if isinstance(fields, dict) else None
        problems = [
            ": ".join((".".join(map(str, problem["loc"])), problem["msg"]))
            for problem in error.errors(include_url=False, include_input=False)
        ]
        message = f"the task is invalid: {'; '.join(problems)}"
        return {"name": name, "exit_code": ExitCode.CONFIG, "message": message}
    return check_task(task, Environment(Path()))


if __name__ == "__main__":
    main()
