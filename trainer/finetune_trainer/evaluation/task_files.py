"""Loading of a task file: a task, or a group with members in the file, in files below its folder, or in lm-eval."""

import contextlib
import difflib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lm_eval.tasks import TaskManager
from lm_eval.tasks._index import TaskIndex
from lm_eval.tasks._yaml_loader import load_yaml

from finetune_trainer.runtime.errors import ConfigInvalid

Loaded = dict[str, dict[str, Any]]
"""The argument of lm_eval.evaluate: tasks, groups and group_map, each by name."""
Config = Mapping[str, Any]
"""The content of a task file."""
DATA_KEYS = frozenset({"dataset_path", "custom_dataset", "class"})
"""A member of a group with any of these keys is a task of its own, and no reference to another task."""


def load_task_file(file: Path, name: str) -> Loaded:
    """Load the task or the group that a file defines.

    Raise ConfigInvalid if the file defines another name or nothing, or if a member of its group is nowhere. Errors of
    lm-eval and of `datasets` are raised as they are.
    """
    # Functions stay names here. They are imported when the task is built.
    config = load_yaml(file, resolve_func=False)
    _check_name(config, name)
    _check_repeated(config)
    # Paths in the task file are relative to its folder.
    with contextlib.chdir(file.parent):
        if "group" not in config:
            task: Loaded = TaskManager(include_defaults=False).load([str(file)])
            return task
        loaded: Loaded = _manager_of_group(file, config).load([name])
    if not loaded["tasks"]:
        raise ConfigInvalid(
            f"the group {name} has no members; write `task:` as a list of tasks, "
            "or `tag:` in place of `group:` for a label of one task"
        )
    return loaded


def _check_name(config: Config, name: str) -> None:
    key = "group" if "group" in config else "task"
    defined = config.get(key)
    if not isinstance(defined, str):
        raise ConfigInvalid(
            "the file defines no name; it must hold one task (`task: NAME`), "
            "or one group (`group: NAME`, and `task:` with the list of its members)"
        )
    if defined != name:
        raise ConfigInvalid(
            f"the file defines `{key}: {defined}`; set the name in evaluate.tasks to it"
        )


def _check_repeated(group: Config) -> None:
    """Raise ConfigInvalid if a group in a file, or a group inside it, names a member twice: lm-eval takes it once."""
    members = group.get("task")
    if "group" not in group or not isinstance(members, list):
        return
    names = [name for member in members for name in _names_of(member)]
    for name, count in Counter(names).items():
        if count > 1:
            raise ConfigInvalid(
                f"the group {group['group']} names {name} {count} times; name each member once"
            )
    for member in members:
        if isinstance(member, dict):
            _check_repeated(member)


def _names_of(member: Any) -> list[str]:
    """Return the name of a group's member; none if it has no name that lm-eval can use."""
    if isinstance(member, dict):
        member = member.get("group") or member.get("task")
    return [member] if isinstance(member, str) else []


def _manager_of_group(file: Path, config: Config) -> TaskManager:
    """Return a manager that knows the members of a group, as lm-eval's command line with `--include_path`."""
    missing = _missing_members(_manager_with(file, config), config)
    if not missing:
        return _manager_with(file, config)
    # Reading the index of lm-eval's own tasks takes seconds.
    manager = _manager_with(file, config, include_defaults=True)
    missing = _missing_members(manager, config)
    if missing:
        hint = ""
        matches = difflib.get_close_matches(missing[0], manager.all_tasks, 3)
        if matches:
            hint = f"; did you mean {' or '.join(matches)}?"
        raise ConfigInvalid(
            f"the group {config['group']} names {missing[0]}, which no file in {file.parent} defines "
            f"and lm-eval does not have{hint}"
        )
    return manager


def _manager_with(
    file: Path, config: Config, *, include_defaults: bool = False
) -> TaskManager:
    manager = TaskManager(include_path=file.parent, include_defaults=include_defaults)
    # Another file may define the same name. The manifest names this file.
    manager.task_index.pop(config["group"], None)
    TaskIndex.process_cfg(dict(config), file, manager.task_index)
    return manager


def _missing_members(manager: TaskManager, config: Config) -> list[str]:
    """Return the members of a group, and of the groups in it, that the manager does not know."""
    index = manager.task_index
    missing = []
    seen: set[str] = set()
    groups = [config]
    while groups:
        group = groups.pop()
        for reference in _references(group):
            entry = index.get(reference)
            if entry is None:
                missing.append(reference)
            elif reference not in seen and entry.cfg is not None:
                groups.append(entry.cfg)
            seen.add(reference)
    return missing


def _references(group: Config) -> Iterator[str]:
    """Yield the tasks and groups that a group names, and does not define itself."""
    members = group.get("task")
    if "group" not in group or not isinstance(members, list):
        return
    for member in members:
        if isinstance(member, str):
            yield member
        elif not isinstance(member, dict):
            continue
        elif "group" in member:
            if "task" in member:
                yield from _references(member)
            else:
                yield str(member["group"])
        elif "task" in member and not DATA_KEYS & {*member, *group}:
            yield str(member["task"])
