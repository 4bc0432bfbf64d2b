"""Where the numbers are computed, and what must be equal for them to come out equal again."""

import os
import platform
from pathlib import Path

import peft
import torch
import transformers

Tensors = dict[str, torch.Tensor]
"""Tensors by name."""


def prepare_device() -> torch.device:
    """Choose CUDA where there is one, else the CPU, and have every operation repeat its result bit for bit.

    On a GPU this asks torch for its deterministic kernels; an operation that has none warns in the log.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS when it is first used
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # finds bugs, costs a pass over every new tensor
    torch.backends.cudnn.benchmark = False  # would choose kernels by the clock
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def numeric_environment(device: torch.device) -> dict[str, str]:
    """Name everything outside the configuration that can change the last bits of a sum."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "peft": peft.__version__,
    }


def processor() -> str:
    """Name the CPU; libraries choose their kernels by it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def restore_thread_count(recorded: str | None) -> None:
    """Go on with the number of threads the run began with: another number adds in another order.

    OMP_NUM_THREADS, where it is set, is the user's word and wins.
    """
    if recorded and recorded.isdigit() and int(recorded) > 0 and not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(recorded))


def random_state() -> Tensors:
    """Copy the state of every generator that training draws from."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: Tensors) -> None:
    """Put back what `random_state` copied; raise RuntimeError or TypeError where it is no generator's state."""
    torch.set_rng_state(state["cpu"])
    if torch.cuda.is_initialized() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
