"""Loading of lm-eval tasks by their names in the manifest: built-in tasks, and tasks from files."""

import contextlib
import difflib
from collections.abc import Iterable, Iterator
from typing import Any

import yaml
from datasets.exceptions import DatasetGenerationError
from lm_eval.tasks import TaskManager
from typing_extensions import override

from finetune_trainer.contract import Environment, Task
from finetune_trainer.data.sampling import sample
from finetune_trainer.runtime.errors import (
    ConfigInvalid,
    DataInvalid,
    ServiceUnavailable,
    SourceNotFound,
)
from finetune_trainer.runtime.sources import locate_existing

Loaded = dict[str, dict[str, Any]]
"""The argument of lm_eval.evaluate: tasks, groups and group_map, each by name."""


class Questions(list[int]):
    """The indices of the questions to ask. lm-eval looks for every question of the task in it, so that must be fast."""

    def __init__(self, indices: Iterable[int]) -> None:
        super().__init__(indices)
        self._members = frozenset(self)

    @override
    def __contains__(self, index: object) -> bool:
        return index in self._members


def load_tasks(
    tasks: Iterable[Task], environment: Environment, seed: int
) -> tuple[Loaded, dict[str, Questions]]:
    """Load the tasks and their data; return them, and the questions to ask for each task with a limit.

    Raise ConfigInvalid, DataInvalid, SourceNotFound or ServiceUnavailable, naming the field of the manifest.
    """
    # Reading the index of lm-eval's built-in tasks takes seconds, so skip it if all tasks are from files.
    manager = TaskManager(include_defaults=any(task.file is None for task in tasks))
    result: Loaded = {"tasks": {}, "groups": {}, "group_map": {}}
    questions: dict[str, Questions] = {}
    for recipe in tasks:
        name = recipe.name
        with _with_field(f"evaluate.tasks[{name}]"):
            loaded = _load_task(manager, name, recipe.file, environment)
            for member, task in loaded["tasks"].items():
                if member in result["tasks"]:
                    problem = (
                        f"{member} is already part of another task; name it only once"
                    )
                    raise ConfigInvalid(problem)
                _set_up(task, recipe)
                if recipe.limit is not None:
                    chosen = sample(recipe.limit, len(task.eval_docs), seed, member)
                    questions[member] = Questions(chosen)
        for kind, members in loaded.items():
            result[kind].update(members)
    return result, questions


def prepare_tasks(loaded: Loaded, seed: int, end_texts: list[str]) -> None:
    """Make the tasks ready for the next model: the same few-shot examples again, and answers end at these texts.

    Drawing examples advances a task's generator, so without this the next model would see other examples.
    """
    for task in loaded["tasks"].values():
        task.set_fewshot_seed(seed=seed)
        if end_texts and task.get_config("output_type") == "generate_until":
            until = (task.get_config("generation_kwargs") or {}).get("until") or []
            # lm-eval takes a single text, too.
            if isinstance(until, str):
                until = [until]
            all_ends = list(dict.fromkeys([*until, *end_texts]))
            task.set_config("generation_kwargs", {"until": all_ends}, update=True)


def _load_task(
    manager: Any, name: str, uri: str | None, environment: Environment
) -> Loaded:
    if uri is None:
        return _built_in(manager, name)
    return _from_file(manager, name, uri, environment)


def _from_file(manager: Any, name: str, uri: str, environment: Environment) -> Loaded:
    file = locate_existing(uri, environment).resolve()
    if not file.is_file():
        raise ConfigInvalid(f"{uri} is not a file; name the task's YAML file")
    # Paths in the task file are relative to its folder.
    with contextlib.chdir(file.parent):
        loaded: Loaded = manager.load([str(file)])
    if name not in loaded["tasks"] and name not in loaded.get("groups", {}):
        names = ", ".join([*loaded.get("groups", {}), *loaded["tasks"]])
        raise ConfigInvalid(
            f"{uri} defines `task: {names}`; set the name in evaluate.tasks to it"
        )
    return loaded


def _built_in(manager: Any, name: str) -> Loaded:
    if name in manager.all_tags:
        raise ConfigInvalid(
            "this is a tag for several lm-eval tasks and has no score; name the tasks instead"
        )
    if name not in manager.all_tasks:
        matches = difflib.get_close_matches(name, manager.all_tasks, 3)
        hint = "set `file:` to use a custom task"
        if matches:
            hint = f"did you mean {' or '.join(matches)}?"
        raise ConfigInvalid(f"lm-eval has no task of this name; {hint}")
    loaded: Loaded = manager.load([name])
    return loaded


def _set_up(task: Any, recipe: Task) -> None:
    if recipe.few_shot is not None:
        task.set_config(key="num_fewshot", value=recipe.few_shot)
    elif task.get_config("num_fewshot") is None:
        task.set_config(key="num_fewshot", value=0)
    if getattr(task, "UNSAFE_CODE", False):
        raise ConfigInvalid(
            "this task runs code written by the model, which is not allowed; choose another task"
        )
    if getattr(task, "MULTIMODAL", False):
        raise ConfigInvalid(
            "this task contains images, but the model reads text only; choose another task"
        )
    if not len(task.eval_docs):
        raise DataInvalid("its data has no questions")


@contextlib.contextmanager
def _with_field(field: str) -> Iterator[None]:
    """Add the manifest's field to every error in the block, and turn errors of libraries into stage errors."""
    try:
        yield
    except (ConfigInvalid, DataInvalid, SourceNotFound) as error:
        raise type(error)(f"{field}: {error}") from error
    # `datasets` raises it for an empty file.
    except StopIteration as error:
        raise DataInvalid(f"{field}: its data is empty") from error
    except DatasetGenerationError as error:
        raise DataInvalid(
            f"{field}: its data cannot be read: {error.__cause__ or error}"
        ) from error
    except FileNotFoundError as error:
        raise SourceNotFound(f"{field}: its data does not exist: {error}") from error
    except OSError as error:
        raise ServiceUnavailable(
            f"{field}: its data cannot be downloaded: {error}; a task with `file:` and local data needs no network"
        ) from error
    except (
        yaml.YAMLError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        ImportError,
        AssertionError,
    ) as error:
        raise ConfigInvalid(
            f"{field}: lm-eval cannot load the task: {type(error).__name__}: {error}"
        ) from error
