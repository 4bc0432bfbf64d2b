"""Determinism: the device, the random number generators, and the numeric environment that results depend on."""

import hashlib
import json
import os
import platform
from pathlib import Path

import peft
import torch
import transformers

from finetune_trainer.runtime.machine.processors import usable_processors

Tensors = dict[str, torch.Tensor]
"""Tensors by name."""


def prepare_device(*, strict: bool = False, number: int = 0) -> torch.device:
    """Enable deterministic algorithms and return the CUDA device with this number, or the CPU without a GPU.

    An operation without a deterministic GPU kernel logs a warning and runs anyway; with `strict` it is an error.
    """
    # Makes cuBLAS deterministic, which reads this at its first use.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Strict for training: PyTorch takes the deterministic backward of flash and memory-efficient attention only with
    # warn_only=False (pytorch#182551). Not for evaluation: it has no backward and must run any architecture.
    torch.use_deterministic_algorithms(True, warn_only=not strict)
    # This is a debugging aid, which writes to every new tensor. Deterministic mode enables it by default.
    torch.utils.deterministic.fill_uninitialized_memory = False
    # Benchmarking chooses kernels by measured time, which varies between processes.
    torch.backends.cudnn.benchmark = False
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def numeric_environment(device: torch.device) -> dict[str, str]:
    """Return everything outside the config that can change the last bits of a floating-point result."""
    return {
        "device": _device_name(device),
        # Kernels with wider vectors add in another order.
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "peft": peft.__version__,
    }


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        name: str = torch.cuda.get_device_name(device)
        return name
    return processor()


def numeric_fingerprint(device: torch.device) -> int:
    """Return a number of 48 bits that differs if the numeric environment differs."""
    text = json.dumps(numeric_environment(device), sort_keys=True)
    # `Ranks.gather` is exact only for numbers below 2^53.
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6])


def processor() -> str:
    """Return the CPU's model name, by which libraries choose their kernels."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    # /proc/cpuinfo exists on Linux only, and has no model name on ARM.
    return platform.machine()


def share_processors(processes: int) -> None:
    """Set the thread count of each of several processes of this machine."""
    # By default each process takes a thread for every processor, and the processes would slow each other down.
    if processes > 1:
        set_thread_count(max(1, usable_processors() // processes))


def restore_thread_count(recorded: str | None) -> None:
    """Set the thread count that the run began with: another count changes the order of summation."""
    if recorded and recorded.isdigit() and int(recorded) > 0:
        set_thread_count(int(recorded))


def set_thread_count(count: int) -> None:
    """Set the thread count, unless the user has chosen it with OMP_NUM_THREADS."""
    if not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(count)


def seed_generators(seed: int, step: int, rank: int = 0) -> None:
    """Seed every generator that training draws from, at the beginning of a step.

    What a step draws is therefore a function of the seed, the step and the rank. No checkpoint holds a generator.
    """
    digest = hashlib.sha256(f"{seed} {step} {rank}".encode()).digest()
    # PyTorch takes seeds of at most 64 bits.
    torch.manual_seed(int.from_bytes(digest[:8]))
