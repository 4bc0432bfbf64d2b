"""Loading of lm-eval tasks by their names in the manifest: built-in tasks, and tasks from files."""

import difflib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import lm_eval.utils
from jinja2 import BaseLoader, StrictUndefined
from jinja2.sandbox import SandboxedEnvironment
from lm_eval.tasks import TaskManager
from typing_extensions import override

from finetune_trainer.contract import Environment, Task
from finetune_trainer.data.sampling import sample
from finetune_trainer.evaluation.first_questions import check_first_questions
from finetune_trainer.evaluation.invented_answers import Results
from finetune_trainer.evaluation.measured import (
    aggregate_groups,
    check_aggregates,
    measured_metrics,
)
from finetune_trainer.evaluation.task_code import allowing_code, guard_code
from finetune_trainer.evaluation.task_errors import naming, naming_member
from finetune_trainer.evaluation.task_files import Loaded, load_task_file
from finetune_trainer.runtime.errors import ConfigInvalid, DataInvalid
from finetune_trainer.runtime.sources import locate_existing

# As many as evaluate.tasks may have: their scores fit into a termination message.
MOST_REPORTED = 16
"""Tasks and members of groups whose scores are in the result; results.json has all."""


class Questions(list[int]):
    """The indices of the questions to ask. lm-eval looks for every question of the task in it, so that must be fast."""

    def __init__(self, indices: Iterable[int]) -> None:
        super().__init__(indices)
        self._members = frozenset(self)

    @override
    def __contains__(self, index: object) -> bool:
        return index in self._members


class LoadedTasks(NamedTuple):
    """Tasks with their data."""

    tasks: Loaded
    questions: dict[str, Questions]
    """The questions to ask, for each task with a limit."""
    metrics: dict[str, tuple[str, ...]]
    """The names of the scores of each task, group and reported member, as far as they are known."""


def load_tasks(
    tasks: Iterable[Task], environment: Environment, seed: int
) -> LoadedTasks:
    """Load the tasks and their data.

    The first questions are rendered and scored, so that a mistake in a task is known before a model is loaded.

    Raise ConfigInvalid, DataInvalid, SourceNotFound or ServiceUnavailable, naming the field of the manifest.
    """
    sandbox_templates()
    guard_code()
    # Reading the index of lm-eval's built-in tasks takes seconds, so skip it if all tasks are from files.
    manager = TaskManager(include_defaults=any(task.file is None for task in tasks))
    result: Loaded = {"tasks": {}, "groups": {}, "group_map": {}}
    questions: dict[str, Questions] = {}
    metrics: dict[str, tuple[str, ...]] = {}
    for recipe in tasks:
        name = recipe.name
        is_allowed = bool(recipe.allow_code)
        with naming(name, recipe.file), allowing_code(allowed=is_allowed):
            loaded = _load_task(manager, name, recipe.file, environment)
            results: dict[str, Results | None] = {}
            for member, task in loaded["tasks"].items():
                if member in result["tasks"]:
                    problem = (
                        f"{member} is already part of another task; name it only once"
                    )
                    raise ConfigInvalid(problem)
                with naming_member(task, name):
                    count = _set_up(task, recipe)
                    chosen: Sequence[int] = range(count)
                    if recipe.limit is not None:
                        chosen = Questions(sample(recipe.limit, count, seed, member))
                        questions[member] = chosen
                    results[member] = check_first_questions(task, chosen, seed)
            aggregate_groups(loaded, results)
            # lm-eval's own groups may aggregate what only some of its versions measure.
            if recipe.file is not None:
                check_aggregates(loaded, results)
            metrics |= measured_metrics(results, members_of([name], loaded))
        for kind, parts in loaded.items():
            result[kind].update(parts)
    return LoadedTasks(result, questions, metrics)


def sandbox_templates() -> None:
    """Make lm-eval render templates of tasks in a sandbox: a template is data, and must not run code."""
    present = lm_eval.utils.env
    if isinstance(present, SandboxedEnvironment):
        return
    sandbox = SandboxedEnvironment(
        loader=BaseLoader(), undefined=StrictUndefined, keep_trailing_newline=True
    )
    sandbox.filters |= present.filters
    # The base model and the trained model must get the same questions.
    del sandbox.filters["random"]
    lm_eval.utils.env = sandbox


def members_of(names: Sequence[str], loaded: Loaded) -> dict[str, list[str]]:
    """Return for each task or group the names of the groups and tasks in it; none if they are too many to report."""
    members: dict[str, list[str]] = {}
    room = MOST_REPORTED - len(names)
    for name in names:
        members[name] = []
        group = loaded["groups"].get(name)
        if group is None:
            continue
        inside = [member.name for member in group.get_all_groups()]
        inside += [task.task_name for task in group.get_all_tasks()]
        if len(inside) <= room:
            members[name] = inside
            room -= len(inside)
    return members


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
    return _from_file(name, uri, environment)


def _from_file(name: str, uri: str, environment: Environment) -> Loaded:
    file = locate_existing(uri, environment).resolve()
    if not file.is_file():
        raise ConfigInvalid(f"{uri} is not a file; name the task's YAML file")
    return load_task_file(file, name)


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


def _set_up(task: Any, recipe: Task) -> int:
    """Set what the recipe sets, and return the number of questions; raise if the task cannot be evaluated here."""
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
    count = len(task.eval_docs)
    if not count:
        raise DataInvalid("its data has no questions")
    return count
