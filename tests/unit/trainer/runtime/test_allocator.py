"""Memory that a step of the training frees stays with the process, for the next step."""

import os
import subprocess
import sys

import pytest
from support.trainer.training import documents, train_config, write_rows

from finetune_trainer.runtime.machine.allocator import CHOSEN_BY_USER

SIZE = 256 << 20
"""Bytes of a tensor. glibc maps each block of more than 32 MiB, and unmaps it when it is freed."""
MEMORY_KEPT = f"""
import torch

from finetune_trainer.runtime.machine.processors import own_memory

before = own_memory()
torch.ones({SIZE}, dtype=torch.uint8)
print(own_memory() - before)
"""
"""A program that prints the bytes that it still holds of a freed tensor."""
KEEP = "from finetune_trainer.runtime.machine.allocator import keep_freed_memory; keep_freed_memory()\n"


def keeps_memory(program, **environment):
    """Return whether a Python program would keep the memory of a tensor that it frees."""
    others = CHOSEN_BY_USER | {"GLIBC_TUNABLES", "LD_PRELOAD"}
    inherited = {
        name: value for name, value in os.environ.items() if name not in others
    }
    # One thread: the kernel may give each thread's stack a huge page.
    fixed = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", program + MEMORY_KEPT],
        env=inherited | fixed | environment,
        check=True,
        capture_output=True,
        text=True,
    )
    return int(done.stdout.splitlines()[-1]) > SIZE // 2


def test_freed_memory_is_kept():
    assert keeps_memory(KEEP)
    assert not keeps_memory("")


@pytest.mark.parametrize(
    ("name", "value", "is_kept"),
    [
        ("MALLOC_MMAP_THRESHOLD_", "1048576", False),
        ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=1048576", False),
        ("GLIBC_TUNABLES", "glibc.pthread.rseq=0", True),
    ],
)
def test_users_setting_of_malloc_stays(name, value, is_kept):
    assert keeps_memory(KEEP, **{name: value}) == is_kept


def test_training_keeps_freed_memory(tiny_model, tmp_path):
    write_rows(tmp_path, documents(8))
    config = train_config(tiny_model, max_steps=1).model_dump_json(by_alias=True)
    train = f"""
from pathlib import Path
from support.trainer.training import run_train
from finetune_trainer.contract import TrainConfig

run_train(TrainConfig.model_validate_json({config!r}), Path({str(tmp_path)!r}))
"""
    assert keeps_memory(train)
