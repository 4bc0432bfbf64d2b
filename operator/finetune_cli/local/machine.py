"""Looks at this machine as far as it decides whether a run can work: packages, GPU, memory, disk, hub."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from finetune_cli.checks.extras import PACKAGES, is_installed
from finetune_trainer.contract.environment import shared_downloads
from finetune_trainer.sizes import format_size

OLDEST_PYTHON = (3, 11)
TRAINER = ("torch", "transformers", "peft", "lm_eval")
"""Packages without which no stage runs, by their names for import."""
DISTRIBUTIONS = {"lm_eval": "lm-eval", "google.cloud.storage": "google-cloud-storage"}
"""Name for import -> name for pip, if they differ."""
ENOUGH_DISK = 20 * 1024**3
"""Bytes for the packages of the trainer, a base model of 1B parameters, its checkpoints and the published model."""
ENOUGH_MEMORY = 4 * 1024**3
"""Bytes in which the processes of a small run fit; `finetune plan` has the forecast for a manifest."""
TORCH_PROGRAM = """\
import torch
print(torch.__version__)
for index in range(torch.cuda.device_count()):
    print(torch.cuda.get_device_name(index))
"""
# The first import of PyTorch on a slow disk.
TORCH_SECONDS = 120.0


class Verdict(StrEnum):
    """What a check says."""

    OK = "ok"
    NOTE = "note"
    """A run may work without it."""
    ERROR = "error"
    """No run works without it."""


@dataclass(frozen=True)
class MachineCheck:
    """What a check has observed."""

    verdict: Verdict
    subject: str
    message: str
    """The observed value and, unless all is well, the fix."""


def machine_findings(
    folder: Path, environment: Mapping[str, str]
) -> Iterator[MachineCheck]:
    """Yield what this machine has for runs in a folder."""
    yield _python()
    yield from _trainer()
    yield _extras()
    yield _gpu()
    yield _memory()
    yield _disk(folder)
    yield _hub(environment)


def _python() -> MachineCheck:
    text = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info < OLDEST_PYTHON:
        return MachineCheck(Verdict.ERROR, "python", f"{text}: install 3.11 or newer")
    return MachineCheck(Verdict.OK, "python", text)


def _trainer() -> Iterator[MachineCheck]:
    missing = [name for name in TRAINER if not is_installed(name)]
    if missing:
        text = f"{', '.join(missing)} not installed: pip install 'finetune-operator[trainer]'"
        yield MachineCheck(Verdict.ERROR, "trainer", text)
        return
    versions = [f"{name} {_version(name)}" for name in TRAINER]
    yield MachineCheck(Verdict.OK, "trainer", ", ".join(versions))


def _version(package: str) -> str:
    return importlib.metadata.version(DISTRIBUTIONS.get(package, package))


def _extras() -> MachineCheck:
    installed = [name for name, package in PACKAGES.items() if is_installed(package)]
    missing = [name for name in PACKAGES if name not in installed]
    text = f"installed: {', '.join(installed) or 'none'}"
    if not missing:
        return MachineCheck(Verdict.OK, "extras", text)
    fix = f"pip install 'finetune-operator[{missing[0]}]'"
    text += f"; for manifests that name them, {', '.join(missing)}: {fix}"
    return MachineCheck(Verdict.NOTE, "extras", text)


def _gpu() -> MachineCheck:
    """Return what PyTorch sees, beside what the driver sees: a driver that is too old hides the GPUs from PyTorch."""
    if not is_installed("torch"):
        return MachineCheck(
            Verdict.NOTE, "gpu", "not looked at: PyTorch is not installed"
        )
    # In a process: the import takes seconds, and a broken installation may kill it.
    answer = _output((sys.executable, "-P", "-c", TORCH_PROGRAM))
    if answer is None:
        text = "PyTorch cannot be imported: pip install --force-reinstall torch"
        return MachineCheck(Verdict.ERROR, "gpu", text)
    _, *devices = answer
    query = "--query-gpu=name,driver_version,memory.total"
    drivers = _output(("nvidia-smi", query, "--format=csv,noheader")) or []
    if devices:
        return MachineCheck(Verdict.OK, "gpu", "; ".join(drivers or devices))
    if drivers:
        text = f"{'; '.join(drivers)}; PyTorch sees none: install a driver for CUDA {_cuda()} or newer"
        return MachineCheck(Verdict.ERROR, "gpu", text)
    text = "none: training runs on the CPU, which is right for small models only"
    return MachineCheck(Verdict.NOTE, "gpu", text)


def _cuda() -> str:
    program = "import torch; print(torch.version.cuda)"
    answer = _output((sys.executable, "-P", "-c", program))
    return answer[0] if answer else "of PyTorch"


def _output(command: tuple[str, ...]) -> list[str] | None:
    """Return the lines that a program prints; None if it is not there or fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TORCH_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.splitlines()


def _memory() -> MachineCheck:
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    text = f"{format_size(size)}, {os.cpu_count()} CPUs"
    if size < ENOUGH_MEMORY:
        text += "; a run of more than a tiny model needs 4 GiB: `finetune plan FILE` has the forecast"
        return MachineCheck(Verdict.NOTE, "memory", text)
    return MachineCheck(Verdict.OK, "memory", text)


def _disk(folder: Path) -> MachineCheck:
    free = shutil.disk_usage(folder).free
    text = f"{format_size(free)} free in {folder.absolute()}"
    if not os.access(folder, os.W_OK):
        text += ", which cannot be written: choose another folder"
        return MachineCheck(Verdict.ERROR, "disk", text)
    if free < ENOUGH_DISK:
        text += "; a base model of 1B parameters with its checkpoints needs 20 GiB"
        return MachineCheck(Verdict.NOTE, "disk", text)
    return MachineCheck(Verdict.OK, "disk", text)


def _hub(environment: Mapping[str, str]) -> MachineCheck:
    # The rules of huggingface_hub for its folder.
    home = environment.get("HF_HOME") or "~/.cache/huggingface"
    folder = environment.get("HF_HUB_CACHE") or f"{home}/hub"
    token = "with" if environment.get("HF_TOKEN") else "without"
    downloads = shared_downloads(environment) or "the workspace of each run"
    text = f"downloads are kept in {downloads}, {token} HF_TOKEN; files in {folder} are copied"
    if environment.get("HF_HUB_OFFLINE", "0").lower() in {"1", "true", "yes", "on"}:
        text += "; HF_HUB_OFFLINE is set, so nothing is downloaded"
    return MachineCheck(Verdict.OK, "hub", text)
