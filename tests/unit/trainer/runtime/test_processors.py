"""The processors and the memory that a process may use, of both versions of control groups."""

import os
from pathlib import Path

import pytest

from finetune_trainer.data.tokenizing import batch_tokenizer
from finetune_trainer.runtime.machine import processors
from finetune_trainer.runtime.machine.processors import (
    memory_limit,
    own_memory,
    usable_processors,
)

PROCESSORS = len(os.sched_getaffinity(0))


def write(root: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)


V1 = "4:memory:/kubepods/pod7\n1:cpu,cpuacct:/kubepods/pod7\n"
CASES: dict[str, tuple[dict[str, str], int, int | None]] = {
    "no control groups": ({}, PROCESSORS, None),
    "no limits": (
        {"own": "0::/\n", "cpu.max": "max 100000", "memory.max": "max"},
        PROCESSORS,
        None,
    ),
    "version 2": (
        {"own": "0::/\n", "cpu.max": "100000 100000", "memory.max": "1073741824"},
        1,
        2**30,
    ),
    "a part of a processor": ({"own": "0::/\n", "cpu.max": "30000 100000"}, 1, None),
    "a group around it": (
        {"own": "0::/pod/one\n", "pod/cpu.max": "100000 100000", "memory.max": "5"},
        1,
        5,
    ),
    "version 1": (
        {"own": V1, "cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"},
        1,
        None,
    ),
    "version 1, memory": (
        {"own": V1, "memory/kubepods/memory.limit_in_bytes": "1000"},
        PROCESSORS,
        1000,
    ),
    "version 1, none": (
        {"own": V1, "cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "1"},
        PROCESSORS,
        None,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_limits_are_read_from_control_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    files, processor_count, memory = CASES[case]
    write(tmp_path, files)
    monkeypatch.setattr(processors, "CGROUPS", tmp_path)
    monkeypatch.setattr(processors, "OWN_CGROUPS", tmp_path / "own")
    assert usable_processors() == processor_count
    assert memory_limit() == memory


def test_quota_above_one_processor_is_rounded_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {"own": "0::/\n", "cpu.max": "150000 100000"})
    monkeypatch.setattr(processors, "CGROUPS", tmp_path)
    monkeypatch.setattr(processors, "OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    assert usable_processors() == 2


@pytest.mark.parametrize(
    ("usable", "spare", "expected"),
    [(1, None, 1), (4, None, 4), (64, None, 8), (4, 900, 2), (4, 100, 1)],
)
def test_processes_fit_into_processors_and_memory(
    monkeypatch: pytest.MonkeyPatch, usable: int, spare: int | None, expected: int
) -> None:
    """`spare` is in MiB, beside what this process has."""
    limit = None if spare is None else own_memory() + spare * 2**20
    monkeypatch.setattr(batch_tokenizer, "usable_processors", lambda: usable)
    monkeypatch.setattr(batch_tokenizer, "memory_limit", lambda: limit)
    assert batch_tokenizer.process_count() == expected
