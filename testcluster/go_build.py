"""A build of one program: compile it, then run it and compare its version."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from pathlib import Path

from testcluster.errors import TimedOut, UsageError
from testcluster.go_modules import (
    BINARIES,
    Binary,
    module_folder,
    providing_module,
    version,
)

FLAGS = ("-mod=readonly", "-trimpath", "-buildvcs=false", "-gcflags=all=-dwarf=false")
"""go.mod and go.sum are not changed; programs contain no paths of this machine and no version control data.

The linker removes the debug data (-s -w). The compiler does not write it either: 8 % less processor time for registry.
"""
_COMPILER_MEMORY = {"GOGC": "off", "GOMEMLIMIT": "1GiB"}
"""A process of the compiler collects garbage only above 1 GiB: 16 % less processor time for registry."""
_LOG_LINES = 20
"""Number of lines of compiler output in an error."""
_UNREACHABLE = re.compile(
    r'dial tcp|(Get|read) "?http|reading http\S+: 5\d\d|module lookup disabled'
)


def compile_program(go: str, name: str, to: Path) -> None:
    """Compile a program into this file.

    Raises UsageError when the module proxy cannot be reached, and TimedOut when the compiler fails.
    """
    binary = BINARIES[name]
    command = [
        go,
        "build",
        *FLAGS,
        f"-tags={binary.tags}",
        f"-ldflags={_link(binary)}",
        "-o",
        str(to),
        binary.package,
    ]
    settings = {
        "CGO_ENABLED": str(int(binary.cgo)),
        "GOOS": "linux",
        "GOARCH": architecture(),
        # A go.work of a folder above this checkout would replace the modules that go.mod pins.
        "GOWORK": "off",
        # The scratch folder: the next build deletes it after a kill, and /tmp may be small.
        "GOTMPDIR": str(to.parent),
    }
    settings |= _COMPILER_MEMORY
    done = subprocess.run(
        command,
        cwd=module_folder(binary),
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode and _UNREACHABLE.search(done.stderr):
        raise UsageError(
            f"{name}: cannot reach the Go module proxy; check the network and `go env GOPROXY`"
        )
    if done.returncode:
        last = "\n".join(done.stderr.strip().splitlines()[-_LOG_LINES:])
        raise TimedOut(
            f"{name} {version(binary)} could not be built; the compiler output ends with:\n{last}"
        )


def _link(binary: Binary) -> str:
    """Return the linker flags: strip symbols, and set the version.

    A program that is built as a dependency does not know its version.
    """
    stamps = (f"-X {variable}={value}" for variable, value in _stamps(binary).items())
    return " ".join(["-s -w", *stamps])


def _stamps(binary: Binary) -> dict[str, str]:
    known = version(binary)
    match binary.module.partition("-")[0]:
        case "kubernetes":
            major, minor = known.split(".")[:2]
            stamps = {
                "Version": f"v{known}",
                "Major": major,
                "Minor": minor,
                "TreeState": "clean",
                "Commit": "none",
            }
            return {
                f"k8s.io/component-base/version.git{key}": value
                for key, value in stamps.items()
            }
        case "helm":
            return {"helm.sh/helm/v4/internal/version.version": f"v{known}"}
        case "prometheus":
            return {"github.com/prometheus/common/version.Version": known}
        case "argocd":
            return {"github.com/argoproj/argo-cd/v3/common.version": known}
        case "versitygw":
            return {"main.Version": f"v{known}"}
        case _:
            return {}


def verify(go: str, name: str, program: Path) -> None:
    """Run a built program. Raises UsageError when it does not run on this machine or has another version."""
    binary = BINARIES[name]
    done = _run(name, str(program), *binary.version_arguments)
    output = done.stdout + done.stderr
    if not binary.names_its_version:
        output = _build_information(go, name, program)
    expected = version(binary)
    if done.returncode or not re.search(
        rf"(?<![\d.]){re.escape(expected)}(?![\d.])", output
    ):
        raise UsageError(
            f"{name} {expected} was built but reports the version {output.strip()[:200]!r}; it is not used"
        )


def _build_information(go: str, name: str, program: Path) -> str:
    """Return the line of the program's Go build information with its module and version; empty if absent."""
    module = providing_module(BINARIES[name])[0]
    for line in _run(name, go, "version", "-m", str(program)).stdout.splitlines():
        # The line `path` names the package, which may be the module's root, without a version.
        if line.split()[:2] in (["mod", module], ["dep", module]):
            return line
    return ""


def _run(name: str, *command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise UsageError(
            f"{name} was built but does not run on this machine: {problem}"
        ) from problem


def architecture() -> str:
    """Return this machine's architecture by Go's name."""
    machine = platform.machine()
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine)
