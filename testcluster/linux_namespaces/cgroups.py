"""Control groups of a machine: every process that it ever started can be frozen, thawed, killed and counted."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from testcluster.errors import TimedOut


def hierarchies() -> list[Path]:
    """Return the mount points of control groups on this host, of version 1 and of version 2."""
    lines = (
        line.partition(" - ")
        for line in Path("/proc/self/mountinfo").read_text().splitlines()
    )
    return [
        Path(left.split()[4])
        for left, _, right in lines
        if right.split()[0] in {"cgroup", "cgroup2"}
    ]


def groups(name: str) -> Iterator[Path]:
    """Yield the group of that name in every hierarchy."""
    for at in hierarchies():
        if (at / name).is_dir():
            yield at / name


def with_prefix(prefix: str) -> set[str]:
    """Return the names of the groups that start with the prefix."""
    return {
        group.name
        for at in hierarchies()
        for group in at.glob(f"{prefix}*")
        if group.is_dir()
    }


def freeze(name: str) -> None:
    """Freeze every process of the group and wait until all are frozen. Raises TimedOut."""
    for group in groups(name):
        if (group / "freezer.state").exists():
            (group / "freezer.state").write_text("FROZEN")
            _wait(
                partial(_contains, group / "freezer.state", "FROZEN"),
                f"cgroup {name} did not freeze",
            )
        elif (group / "cgroup.freeze").exists() and not _version_1_freezer(name):
            (group / "cgroup.freeze").write_text("1")
            _wait(
                partial(_contains, group / "cgroup.events", "frozen 1"),
                f"cgroup {name} did not freeze",
            )


def _contains(file: Path, word: str) -> bool:
    return word in file.read_text()


def thaw(name: str) -> None:
    """Thaw the processes of the group."""
    for group in groups(name):
        if (group / "freezer.state").exists():
            (group / "freezer.state").write_text("THAWED")
        elif (group / "cgroup.freeze").exists():
            (group / "cgroup.freeze").write_text("0")


def _version_1_freezer(name: str) -> bool:
    return any((group / "freezer.state").exists() for group in groups(name))


def members(name: str) -> set[int]:
    """Return the ids of the processes in the group and its descendants, in any hierarchy."""
    pids: set[int] = set()
    for group in groups(name):
        for folder in _inside(group):
            with suppress(OSError):
                pids.update(map(int, (folder / "cgroup.procs").read_text().split()))
    # The kernel lists a process outside our pid namespace as 0.
    return pids - {0}


def kill(name: str) -> None:
    """Kill processes until none is left: a process may fork while the others are killed. Raises TimedOut."""

    def all_dead() -> bool:
        living = members(name)
        for pid in living:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not living

    _wait(all_dead, f"processes of cgroup {name} did not exit after SIGKILL")


def remove(name: str) -> None:
    """Remove the empty groups, innermost first. Raises TimedOut."""

    def removed() -> bool:
        for group in list(groups(name)):
            for folder in _inside(group):
                with suppress(OSError):
                    folder.rmdir()
        return not list(groups(name))

    _wait(removed, f"cgroup {name} could not be removed; a process may still be in it")


def _inside(group: Path) -> list[Path]:
    """Return a group and its descendants, innermost first. Unlike rglob, os.walk tolerates a group that disappears."""
    return [Path(folder) for folder, _, _ in os.walk(group, topdown=False)]


def _wait(done: Callable[[], bool], otherwise: str, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            raise TimedOut(otherwise)
        time.sleep(0.01)
