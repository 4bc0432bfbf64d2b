"""Memory that a step of the training frees stays with the process, for the next step."""

import subprocess
import sys

import pytest

SIZE = 64 << 20
"""Bytes of a tensor: more than glibc keeps by itself, which is at most 32 MiB."""
MEMORY_KEPT = f"""
import torch

from finetune_trainer.runtime.allocator import keep_freed_memory
from finetune_trainer.runtime.processors import own_memory

if {{keep}}:
    keep_freed_memory()
before = own_memory()
torch.ones({SIZE}, dtype=torch.uint8)
print(own_memory() - before)
"""
"""A program that prints the bytes that it still holds of a freed tensor."""


@pytest.mark.parametrize(
    ("keep", "environment", "is_kept"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"MALLOC_MMAP_THRESHOLD_": "1048576"}, False),
        (True, {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=1048576"}, False),
    ],
    ids=["kept", "default", "user's environment variable", "user's tunable"],
)
def test_freed_memory_is_kept_unless_the_user_chose_otherwise(keep, environment, is_kept, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    program = MEMORY_KEPT.format(keep=keep)
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert (int(done.stdout) > SIZE // 2) == is_kept, f"{int(done.stdout):,} bytes are still held"
