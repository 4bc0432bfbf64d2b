"""How many processors and how much memory this process may use: its affinity, and the limits of its control groups."""

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


def usable_processors() -> int:
    """Return the number of processors, at least 1: a limit of 1.5 allows two to be busy for three quarters."""
    limits = [-(-quota // period) for quota, period in _cpu_limits() if quota > 0 and period > 0]
    return max(1, min([len(os.sched_getaffinity(0)), *limits]))


def memory_limit() -> int | None:
    """Return the limit of this process's memory in bytes, or None if there is none."""
    limits = [
        int(found[0])
        for folder in _folders("memory")
        for name in ("memory.max", "memory.limit_in_bytes")
        if (found := _numbers(folder / name))
    ]
    return min(limits, default=None)


def own_memory() -> int:
    """Return the bytes of memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _cpu_limits() -> Iterator[tuple[int, int]]:
    """Yield quota and period of each limit."""
    for folder in _folders("cpu"):
        numbers = _numbers(folder / "cpu.max")
        if len(numbers) == 2:  # noqa: PLR2004  "max 100000" is no limit
            yield numbers[0], numbers[1]
        quota, period = (
            _numbers(folder / "cpu.cfs_quota_us"),
            _numbers(folder / "cpu.cfs_period_us"),
        )
        if quota and period:
            yield quota[0], period[0]


def _folders(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control groups, and of those around them; of version 1 and of version 2.

    A container sees its own group as the outermost one. Version 1 then names a path that is not there.
    """
    try:
        lines = OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = CGROUPS / controller if controllers else CGROUPS
        inner = PurePosixPath(path.lstrip("/"))
        yield from (root / folder for folder in (inner, *inner.parents))


def _numbers(file: Path) -> list[int]:
    """Return the numbers in a file, none if it is missing."""
    try:
        return [int(number) for number in re.findall(r"-?\d+", file.read_text())]
    except OSError:
        return []
