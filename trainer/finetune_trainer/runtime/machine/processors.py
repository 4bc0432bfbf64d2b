"""The processors and the memory that this process may use, by its affinity and the limits of its control groups."""

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


def usable_processors() -> int:
    """Return the number of processors, at least 1."""
    processors = len(os.sched_getaffinity(0))
    for quota, period in _cpu_limits():
        if quota > 0 and period > 0:
            # Rounded up: a limit of 1.5 allows two processors to be busy for three quarters of the time.
            processors = min(processors, math.ceil(quota / period))
    return max(1, processors)


def memory_limit() -> int | None:
    """Return the limit of this process's memory in bytes, or None if there is none."""
    limits: list[int] = []
    for folder in _folders("memory"):
        # The names of version 2 and of version 1.
        for name in ("memory.max", "memory.limit_in_bytes"):
            limits += _numbers(folder / name)[:1]
    return min(limits, default=None)


def own_memory() -> int:
    """Return the bytes of memory that this process holds."""
    _, resident_pages, *_ = Path("/proc/self/statm").read_text().split()
    return int(resident_pages) * os.sysconf("SC_PAGE_SIZE")


def _cpu_limits() -> Iterator[tuple[int, int]]:
    """Yield quota and period of each limit."""
    for folder in _folders("cpu"):
        numbers = _numbers(folder / "cpu.max")
        if len(numbers) == 2:  # noqa: PLR2004  "max 100000" is no limit
            yield numbers[0], numbers[1]
        quotas = _numbers(folder / "cpu.cfs_quota_us")
        periods = _numbers(folder / "cpu.cfs_period_us")
        if quotas and periods:
            yield quotas[0], periods[0]


def _folders(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control groups and of the groups around them, of version 1 and version 2.

    A container sees its own group as the outermost group. Version 1 then names a path that is not there.
    """
    try:
        lines = OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        # Version 2 has a single hierarchy, whose line names no controllers.
        root = CGROUPS / controller if controllers else CGROUPS
        inner = PurePosixPath(path.lstrip("/"))
        for folder in (inner, *inner.parents):
            yield root / folder


def _numbers(file: Path) -> list[int]:
    """Return the numbers in a file, none if it is missing."""
    try:
        return [int(number) for number in re.findall(r"-?\d+", file.read_text())]
    except OSError:
        return []
