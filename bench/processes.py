"""CPU seconds and memory of processes, from /proc; and the facts of this machine."""

import os
import platform
import re
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

STARTED = time.monotonic()
TICKS = os.sysconf("SC_CLK_TCK")
FOREIGN_SHARE = 0.15
"""A run beside more load of other processes than this share of the machine is marked."""


def report_progress(text: str) -> None:
    """Print a line with the time since the start of the program to standard error."""
    print(f"  {time.monotonic() - STARTED:6.1f} s: {text}", file=sys.stderr, flush=True)


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process, in user and kernel mode, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def memory_mib(pid: int, field_name: str) -> float:
    """Return VmRSS, VmHWM or another field of /proc/PID/status in MiB."""
    match = re.search(
        rf"^{field_name}:\s+(\d+) kB",
        Path(f"/proc/{pid}/status").read_text(),
        re.MULTILINE,
    )
    assert match, f"/proc/{pid}/status has no {field_name}"
    return int(match[1]) / 1024


def cluster_programs(folder: Path) -> dict[int, str]:
    """Return pid and name of each program that runs with a path of the cluster's folder among its arguments."""
    programs = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            arguments = (entry / "cmdline").read_bytes()
            if (
                os.fsencode(f"{folder}/") in arguments
                and int(entry.name) != os.getpid()
            ):
                programs[int(entry.name)] = Path(
                    os.fsdecode(arguments.split(b"\0")[0])
                ).name
    return programs


def busy_seconds() -> float:
    """Return the CPU seconds that all processors of the machine have been busy."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / TICKS


@dataclass
class CpuAccount:
    """CPU seconds by program between two points of time, and the seconds of all other processes of the machine."""

    programs: dict[int, str]
    before: dict[int, float] = field(default_factory=dict)
    busy_before: float = 0.0

    def start(self) -> None:
        """Remember the CPU seconds of this moment."""
        self.before = {pid: cpu_seconds(pid) for pid in self.programs}
        self.busy_before = busy_seconds()

    def read(self, wall_seconds: float) -> tuple[dict[str, float], float]:
        """Return the CPU seconds by program since `start`, and the share of the machine that others used."""
        busy = busy_seconds() - self.busy_before
        used: dict[str, float] = {}
        for pid, name in self.programs.items():
            with suppress(OSError):
                used[name] = used.get(name, 0.0) + cpu_seconds(pid) - self.before[pid]
        capacity = wall_seconds * (os.cpu_count() or 1)
        # The kernel counts a machine and its processes by different clocks, so the rest may be a little below 0.
        foreign = max(0.0, busy - sum(used.values())) / capacity
        rounded = {name: round(seconds, 2) for name, seconds in used.items()}
        return rounded, round(foreign, 3)


def machine_facts() -> dict[str, str]:
    """Return processors, memory, kernel and Python of this machine."""
    info = Path("/proc/cpuinfo").read_text()
    model = re.search(r"model name\s*:\s*(.+)", info)
    total = re.search(r"MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text())
    return {
        "processors": f"{os.cpu_count()} x {model[1].strip() if model else platform.machine()}",
        "memory": f"{int(total[1]) / 1024**2:.0f} GiB" if total else "",
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
