"""Control groups of a machine: everything that ever ran on it, to be frozen, thawed, killed and counted."""

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
    """List where control groups are mounted on this host."""
    lines = (line.partition(" - ") for line in Path("/proc/self/mountinfo").read_text().splitlines())
    return [Path(left.split()[4]) for left, _, right in lines if right.split()[0] in {"cgroup", "cgroup2"}]


def groups(name: str) -> Iterator[Path]:
    """Give the group of that name in every hierarchy."""
    for at in hierarchies():
        if (at / name).is_dir():
            yield at / name


def like(prefix: str) -> set[str]:
    """Name the groups that begin so."""
    return {found.name for at in hierarchies() for found in at.glob(f"{prefix}*") if found.is_dir()}


def freeze(name: str) -> None:
    """Stop every process of the group between two instructions; returns when all stand."""
    for group in groups(name):
        if (group / "freezer.state").exists():
            (group / "freezer.state").write_text("FROZEN")
            _wait(partial(_says, group / "freezer.state", "FROZEN"), f"{name} does not freeze")
        elif (group / "cgroup.freeze").exists() and not _version_1_freezer(name):
            (group / "cgroup.freeze").write_text("1")
            _wait(partial(_says, group / "cgroup.events", "frozen 1"), f"{name} does not freeze")


def _says(file: Path, word: str) -> bool:
    return word in file.read_text()


def thaw(name: str) -> None:
    """Let them go on."""
    for group in groups(name):
        if (group / "freezer.state").exists():
            (group / "freezer.state").write_text("THAWED")
        elif (group / "cgroup.freeze").exists():
            (group / "cgroup.freeze").write_text("0")


def _version_1_freezer(name: str) -> bool:
    return any((group / "freezer.state").exists() for group in groups(name))


def members(name: str) -> set[int]:
    """Give the processes in the group and in all below it, in any hierarchy."""
    found: set[int] = set()
    for group in groups(name):
        for folder in _inside(group):
            with suppress(OSError):
                found.update(map(int, (folder / "cgroup.procs").read_text().split()))
    # Zero stands for a process of another process namespace than ours.
    return found - {0}


def kill(name: str) -> None:
    """Kill until nobody is left."""

    def gone() -> bool:
        living = members(name)
        for pid in living:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not living

    _wait(gone, f"processes of {name} do not die")


def remove(name: str) -> None:
    """Remove the empty groups, innermost first."""

    def removed() -> bool:
        for group in list(groups(name)):
            for folder in _inside(group):
                with suppress(OSError):
                    folder.rmdir()
        return not list(groups(name))

    _wait(removed, f"control groups of {name} cannot be removed")


def _inside(group: Path) -> list[Path]:
    """List a group and all below it, innermost first; unlike rglob, walk takes it calmly that one goes meanwhile."""
    return [Path(found) for found, _, _ in os.walk(group, topdown=False)]


def _wait(done: Callable[[], bool], otherwise: str, seconds: float = 20) -> None:
    until = time.monotonic() + seconds
    while not done():
        if time.monotonic() > until:
            raise TimedOut(otherwise)
        time.sleep(0.01)
