"""lm-eval's tasks by the names of the manifest: its own, or read from files beside the manifest."""

import contextlib
import difflib
from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from datasets.exceptions import DatasetGenerationError
from lm_eval.tasks import TaskManager

from finetune_trainer.contract import Environment, Task
from finetune_trainer.runtime.errors import ConfigInvalid, DataInvalid, ServiceUnavailable, SourceNotFound
from finetune_trainer.runtime.sources import locate_existing

Loaded = dict[str, dict[str, Any]]
"""What lm_eval.evaluate takes: tasks, groups and group_map, each by name."""


def load_tasks(tasks: Mapping[str, Task], environment: Environment, seed: int) -> tuple[Loaded, dict[str, range]]:
    """Give the tasks with their data, and for those with a limit the indices of the questions to ask.

    Raises ConfigInvalid, DataInvalid, SourceNotFound or ServiceUnavailable, naming the field of the manifest.
    """
    # The index of lm-eval's own tasks takes seconds to read; task files need none of it.
    manager = TaskManager(include_defaults=any(task.file is None for task in tasks.values()))
    everything: Loaded = {"tasks": {}, "groups": {}, "group_map": {}}
    questions: dict[str, range] = {}
    for name, task in tasks.items():
        with _with_field(f"evaluate.tasks.{name}"):
            found = _from_file(manager, name, task.file, environment) if task.file else _built_in(manager, name)
            for member, each in found["tasks"].items():
                if member in everything["tasks"]:
                    raise ConfigInvalid(f"{member} is already part of another task; ask for it once")
                _set_up(each, task, seed)
                if task.limit is not None:
                    questions[member] = range(min(task.limit, len(each.eval_docs)))
        for kind, members in found.items():
            everything[kind].update(members)
    return everything, questions


def _from_file(manager: Any, name: str, uri: str, environment: Environment) -> Loaded:
    file = locate_existing(uri, environment).resolve()
    if not file.is_file():
        raise ConfigInvalid(f"file {uri} is no file; name the task's YAML file")
    with contextlib.chdir(file.parent):  # where the paths inside the file start from
        found: Loaded = manager.load([str(file)])
    if name not in found["tasks"] and name not in found.get("groups", {}):
        inside = ", ".join([*found.get("groups", {}), *found["tasks"]])
        raise ConfigInvalid(f"file {uri} says `task: {inside}`; the name under evaluate.tasks must be the same")
    return found


def _built_in(manager: Any, name: str) -> Loaded:
    if name in manager.all_tags:
        raise ConfigInvalid("is lm-eval's word for several tasks and has no score of its own; name the tasks")
    if name not in manager.all_tasks:
        near = difflib.get_close_matches(name, manager.all_tasks, 3)
        hint = f"did you mean {' or '.join(near)}?" if near else "give `file:` for a task of your own"
        raise ConfigInvalid(f"lm-eval has no task of this name; {hint}")
    found: Loaded = manager.load([name])
    return found


def _set_up(task: Any, chosen: Task, seed: int) -> None:
    if chosen.few_shot is not None:
        task.set_config(key="num_fewshot", value=chosen.few_shot)
    elif task.get_config("num_fewshot") is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=seed)
    if getattr(task, "UNSAFE_CODE", False):
        raise ConfigInvalid("this task runs code that the model wrote, which is not allowed here; choose another one")
    if getattr(task, "MULTIMODAL", False):
        raise ConfigInvalid("this task shows pictures, and the model reads text; choose another one")
    if not len(task.eval_docs):
        raise DataInvalid("there is no question in its data")


@contextlib.contextmanager
def _with_field(where: str) -> Iterator[None]:
    """Name the field in whatever goes wrong while a task and its data are read."""
    try:
        yield
    except (ConfigInvalid, DataInvalid, SourceNotFound) as error:
        raise type(error)(f"{where}: {error}") from error
    except StopIteration as error:  # what reading an empty file ends in
        raise DataInvalid(f"{where}: its data is empty") from error
    except DatasetGenerationError as error:
        raise DataInvalid(f"{where}: its data cannot be read: {error.__cause__ or error}") from error
    except FileNotFoundError as error:
        raise SourceNotFound(f"{where}: its data is not there: {error}") from error
    except OSError as error:
        raise ServiceUnavailable(
            f"{where}: its data cannot be fetched: {error}; a task with `file:` and data beside it needs no network"
        ) from error
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, ImportError, AssertionError) as error:
        raise ConfigInvalid(f"{where}: lm-eval cannot make a task of it: {type(error).__name__}: {error}") from error
