"""Check that the GPU that a pod asked for can be used, and find the cause if it cannot."""

import re
from pathlib import Path

import torch

from finetune_trainer.contract import Environment
from finetune_trainer.runtime.errors import (
    ConfigInvalid,
    DeviceUnavailable,
    ServiceUnavailable,
)

DEVICES = Path("/dev")
DEVICE_PATTERNS = ("nvidia*", "kfd", "dxg")
"""Device files of NVIDIA, of AMD, and of Windows."""

DRIVER_VERSION = Path("/proc/driver/nvidia/version")
DRIVER_PATTERN = re.compile(r"NVRM version:.*?\s(\d+(?:\.\d+)+)\s")

OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}
"""Major version of CUDA -> the oldest driver for it, by NVIDIA's table of minor version compatibility."""


def check_gpu(environment: Environment, processes: int = 1) -> None:
    """Raise ServiceUnavailable with the cause if the pod asked for a GPU that PyTorch cannot use.

    The error is temporary: another node may have a newer driver. Raise ConfigInvalid if there are GPUs, but fewer than
    processes.
    """
    # Without this check, the stage would run on the CPU.
    if torch.cuda.is_available() and torch.cuda.device_count() < processes:
        raise ConfigInvalid(
            f"{processes} processes train in this place, but it has {torch.cuda.device_count()} GPUs: lower "
            "train.processesPerNode, or raise train.pod.resources"
        )
    if environment.gpus and not torch.cuda.is_available():
        if torch.version.cuda is None and torch.version.hip is None:
            raise ServiceUnavailable(
                f"pod.resources asks for a GPU, but this PyTorch ({torch.__version__}) is built without CUDA: "
                "use an image whose PyTorch has it"
            )
        raise DeviceUnavailable(f"pod.resources asks for a GPU, but {_cause()}")


def _cause() -> str:
    wheel = torch.version.cuda
    if not any(any(DEVICES.glob(pattern)) for pattern in DEVICE_PATTERNS):
        return (
            f"the container has no GPU device (no {DEVICES}/nvidia*, no {DEVICES}/kfd): check the device plugin and "
            "the container runtime of this node"
        )
    error = _cuda_error()
    driver = _driver_version()
    needed = OLDEST_DRIVERS.get(_major(wheel)) if wheel else None
    is_too_old = needed is not None and driver is not None and _major(driver) < needed
    if is_too_old or "driver on your system is too old" in error:
        return (
            f"the driver {driver or 'of this node'} is too old for this PyTorch, which has CUDA {wheel} and needs "
            f"{needed or 'a newer one'}: update the driver, or use an image with an older CUDA: {error}"
        )
    return f"PyTorch cannot use it: {error}"


def _major(version: str) -> int:
    major, _, _ = version.partition(".")
    return int(major)


def _driver_version() -> str | None:
    """Return the version of the NVIDIA driver, such as 535.129.03, or None if there is none to be read."""
    try:
        match = DRIVER_PATTERN.search(DRIVER_VERSION.read_text())
    except OSError:
        return None
    return match[1] if match else None


def _cuda_error() -> str:
    """Return the text of PyTorch's error when it initialises CUDA."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error)
    return "it initialises CUDA, but finds no device; check CUDA_VISIBLE_DEVICES"
