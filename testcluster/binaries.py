"""The programs of clusters and tests: built once from Go modules and cached outside the checkout.

The programs of a cluster have one folder. A program that only some tests use has a folder of its module, so that
another version of it rebuilds nothing else.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path

from testcluster import go_build, go_modules, toolchain
from testcluster.cluster_state import cache
from testcluster.errors import UsageError
from testcluster.go_modules import (
    BINARIES,
    module_folder,
    needed_go,
    providing_module,
    version,
)


def folder(name: str = "") -> Path:
    """Return the folder of a program for tests, or without a name the folder of a cluster's programs.

    The name of the folder is a hash of all versions, sources and build options.
    """
    test_module = _test_module(name)
    group = {
        key: binary
        for key, binary in BINARIES.items()
        if _test_module(key) == test_module
    }
    options = f"{go_build.architecture()} {go_build.FLAGS} {sorted(group.items())}"
    digest = hashlib.sha256(options.encode())
    for file in _sources({binary.module for binary in group.values()}):
        path = file.relative_to(go_modules.MODULES)
        digest.update(
            f"{path}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\0".encode()
        )
    parts = ("bin", test_module, digest.hexdigest()[:16])
    return cache() / "-".join(part for part in parts if part)


def _sources(modules: set[str]) -> list[Path]:
    """Return the files that determine the programs of these modules, sorted."""
    root = go_modules.MODULES
    files = [
        file for pattern in ("go.mod", "go.sum", "*.go") for file in root.rglob(pattern)
    ]
    return sorted(file for file in files if file.relative_to(root).parts[0] in modules)


def _test_module(name: str) -> str:
    return BINARIES[name].module if name and BINARIES[name].for_tests else ""


def report_progress(line: str) -> None:
    """Print a line to standard error without buffering; standard output is for a command's result."""
    print(line, file=sys.stderr, flush=True)


def program(name: str, report: Callable[[str], None] = report_progress) -> Path:
    """Return the path of a program; build it if it is missing. Raises what `build_missing` does."""
    build_missing([name], report)
    return folder(name) / name


def source(name: str) -> Path:
    """Return the folder with the source of a program, at the version that is built; download it if it is missing.

    Raises UsageError when Go or the network is missing.
    """
    go = _toolchain([name], only_downloads=True)
    module_path = providing_module(BINARIES[name])[0]
    done = subprocess.run(
        [go, "mod", "download", "-json", module_path],
        cwd=module_folder(BINARIES[name]),
        capture_output=True,
        text=True,
        check=False,
    )
    answer = json.loads(done.stdout or "{}")
    if done.returncode:
        reason = answer.get("Error") or done.stderr.strip()
        raise UsageError(f"{name}: cannot download its source: {reason}")
    return Path(answer["Dir"])


def build_missing(
    names: Iterable[str], report: Callable[[str], None] = report_progress
) -> Path:
    """Build the programs that are missing. Go is needed only when a program is missing.

    Return the folder of a cluster's programs. Of two processes that build at the same time, the second waits and uses
    the result of the first. A killed build leaves no file that looks like a program. Raises UsageError when Go, a C
    compiler, disk space or the network is missing, and TimedOut when the compiler fails.
    """
    wanted = sorted(set(names), key=list(BINARIES).index)  # in build order
    missing = _missing(wanted)
    if missing:
        go = _toolchain(missing)
        for target in dict.fromkeys(folder(name) for name in missing):
            _build_folder(
                go, [name for name in wanted if folder(name) == target], target, report
            )
    return folder()


def _build_folder(
    go: str, names: list[str], target: Path, report: Callable[[str], None]
) -> None:
    with _locked(target, report):
        for leftover in target.glob(".building-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        # Another process may have built them during the wait for the lock.
        _build_all(go, _missing(names), target, report)


def _build_all(
    go: str, names: list[str], target: Path, report: Callable[[str], None]
) -> None:
    """Build two modules in parallel: one compiles while the other is downloaded or linked, which uses one core."""

    def build(module: str) -> None:
        for name in names:
            if BINARIES[name].module == module:
                _build(go, name, target, report)

    modules = dict.fromkeys(BINARIES[name].module for name in names)
    with ThreadPoolExecutor(2) as pool:
        builds = [pool.submit(build, module) for module in modules]
        try:
            for finished in as_completed(builds):
                finished.result()
        finally:
            # After the first error, builds that have not begun must not begin.
            pool.shutdown(wait=False, cancel_futures=True)


def _missing(names: list[str]) -> list[str]:
    return [name for name in names if not (folder(name) / name).exists()]


def _toolchain(names: list[str], *, only_downloads: bool = False) -> str:
    """Return the Go to build with, and check the other requirements of a build. A download has none."""
    needed = needed_go(names)
    newest = next(name for name in names if needed_go([name]) == needed)
    only_tests = all(BINARIES[name].for_tests for name in names)
    required_bytes = toolchain.REQUIRED_BYTES
    if only_downloads:
        required_bytes = 0
    elif only_tests:
        required_bytes = toolchain.REQUIRED_BYTES_OF_TESTS
    go = toolchain.go(needed, module_folder(BINARIES[newest]), cache(), required_bytes)
    if not only_downloads and any(BINARIES[name].cgo for name in names):
        toolchain.check_libseccomp()
    return go


@contextmanager
def _locked(target: Path, report: Callable[[str], None]) -> Iterator[None]:
    try:
        target.mkdir(parents=True, exist_ok=True)
        lock = (target / ".lock").open("a+")
    except OSError as problem:
        raise UsageError(
            f"cannot write to {target}: {problem.strerror}; set FINETUNE_CACHE to another folder"
        ) from problem
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            builder = lock.read() or "(unknown)"
            report(f"waiting for process {builder} that builds into {target} …")
            fcntl.flock(lock, fcntl.LOCK_EX)
        # For the message of a process that waits for this build.
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def _build(go: str, name: str, target: Path, report: Callable[[str], None]) -> None:
    known = version(BINARIES[name])
    report(f"building {name} {known} …")
    started = time.monotonic()
    # A unique folder, because the compiler of a killed build may still be writing to the folder of that build.
    with tempfile.TemporaryDirectory(
        prefix=".building-", dir=target, ignore_cleanup_errors=True
    ) as scratch:
        built = Path(scratch) / name
        go_build.compile_program(go, name, built)
        go_build.verify(go, name, built)
        # Only a program that has run gets its final name, atomically. Its content must be on the disk before: after a
        # power loss, an empty file under that name would count as a program.
        with built.open("rb") as file:
            os.fsync(file.fileno())
        built.replace(target / name)
    report(f"{name} {known} built in {time.monotonic() - started:.0f} s")
