"""A Docker engine of the tests' own, if none answers: Debian's docker.io in namespaces that end with this process.

Docker changes the firewall of its network namespace: it drops what the host forwards between other bridges. So this
process enters a new network namespace, and starts the engine there. The engine's processes are in a pid namespace and a
mount namespace of their own, so the kernel ends them all when this process ends, however it ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from testcluster.cluster_state import cache
from testcluster.commands import contained, run_command
from testcluster.errors import TimedOut, UsageError
from testcluster.images.image_builders import ENGINES
from testcluster.kind import oci_runtime
from testcluster.linux_namespaces import cgroups

PACKAGES = {"docker.io": "dockerd", "iptables": "iptables"}
"""Debian packages of the engine, and a program of each."""
INOTIFY_INSTANCES = 1024
"""The kernel's limit that systemd, containerd and kubelet of several nodes need; the usual 128 are too few."""
_INOTIFY = Path("/proc/sys/fs/inotify/max_user_instances")
_START_TIMEOUT = 30
"""Seconds until the engine must answer."""
_CLONE_NEWNET = 0x40000000
_SCRIPT = 'mount -t tmpfs run /run; exec "$@"'
"""/run is the engine's own, because containerd keeps the sockets of its containers there."""

libc = ctypes.CDLL(None, use_errno=True)


def engines() -> Path:
    """Return the folder that holds a folder for each engine."""
    return cache() / "docker"


@contextmanager
def running(report: Callable[[str], None]) -> Iterator[None]:
    """Use the Docker engine that answers, or run one until the end of the context.

    With an engine of its own, the calling thread and the processes that it starts have only the network of the
    engine. Raises UsageError when this machine cannot run an engine, and TimedOut when the engine does not answer.
    """
    remove_leftovers()
    check()
    if ENGINES["docker"].is_available():
        yield
        return
    folder = engines() / f"t{os.getpid()}"
    folder.mkdir(parents=True)
    _raise_inotify(report)
    try:
        with _environment(folder), _network(), _process(folder, report):
            yield
    finally:
        _remove(folder)


def check() -> None:
    """Raise UsageError when no Docker engine answers, with what this machine lacks to run one."""
    if ENGINES["docker"].is_available():
        return
    if sys.platform != "linux" or os.geteuid() != 0:
        raise UsageError(
            "no Docker engine answers, and starting one needs root on Linux; start Docker"
        )
    missing = [
        package for package, program in PACKAGES.items() if not shutil.which(program)
    ]
    if missing:
        raise UsageError(
            f"no Docker engine answers, and {' and '.join(missing)} are not installed; "
            f"start Docker, or on Debian run `apt install {' '.join(missing)}`"
        )


def remove_leftovers() -> None:
    """Delete what is left of engines whose process was killed: their folder, and control groups without processes."""
    for folder in engines().glob("t*"):
        owner = re.fullmatch(r"t(\d+)", folder.name)
        if owner and not Path(f"/proc/{owner[1]}").exists():
            _remove(folder)


def _remove(folder: Path) -> None:
    cgroups.kill(_cgroup(folder))
    cgroups.remove(_cgroup(folder))
    for _ in range(50):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            _restore_inotify()
            return
        # The kernel removes the mounts of the engine's namespace shortly after its last process.
        time.sleep(0.1)
    shutil.rmtree(folder)


def _cgroup(folder: Path) -> str:
    return f"finetune.docker.{folder.name}"


@contextmanager
def _environment(folder: Path) -> Iterator[None]:
    """Point docker and kind to the engine. Debian's docker comes first: a newer one may refuse an older engine."""
    programs = folder / "bin"
    programs.mkdir()
    with suppress(FileNotFoundError):
        (programs / "docker").symlink_to(_debian_docker())
    changed = {
        "DOCKER_HOST": f"unix://{folder / 'docker.sock'}",
        "PATH": f"{programs}:{os.environ['PATH']}",
    }
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _debian_docker() -> Path:
    """Return the client of Debian's package. Raises FileNotFoundError."""
    return Path("/usr/bin/docker").resolve(strict=True)


@contextmanager
def _network() -> Iterator[None]:
    """Move this thread to a new network namespace, and back. Raises UsageError if root lacks the right to that."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        try:
            _call(libc.unshare(ctypes.c_int(_CLONE_NEWNET)), "unshare")
        except OSError as error:
            raise UsageError(
                f"a Docker engine of the tests needs a network namespace: {error}; start Docker"
            ) from None
        try:
            run_command("ip", "link", "set", "lo", "up")
            yield
        finally:
            _call(libc.setns(ctypes.c_int(home), ctypes.c_int(_CLONE_NEWNET)), "setns")
    finally:
        os.close(home)


def _call(result: int, name: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _raise_inotify(report: Callable[[str], None]) -> None:
    """Raise the limit of inotify instances, which the whole host shares; `_remove` restores it."""
    before = int(_INOTIFY.read_text())
    if before < INOTIFY_INSTANCES:
        report(
            f"raising fs.inotify.max_user_instances from {before} to {INOTIFY_INSTANCES}"
        )
        (engines() / "inotify").write_text(str(before))
        _INOTIFY.write_text(str(INOTIFY_INSTANCES))


def _restore_inotify() -> None:
    """Restore the limit when the last engine is gone."""
    before = engines() / "inotify"
    if before.exists() and not any(engines().glob("t*")):
        _INOTIFY.write_text(before.read_text())
        before.unlink(missing_ok=True)


@contextmanager
def _process(folder: Path, report: Callable[[str], None]) -> Iterator[None]:
    """Run the engine until the end of the context."""
    started = time.monotonic()
    process = _start(folder)
    try:
        _wait(process, folder)
        report(f"a Docker engine answers after {time.monotonic() - started:.1f} s")
        yield
    finally:
        process.kill()
        process.wait()


def _start(folder: Path) -> subprocess.Popen[bytes]:
    (folder / "daemon.json").write_text(json.dumps(_settings(folder)))
    engine = ["dockerd", f"--config-file={folder / 'daemon.json'}"]
    with (folder / "dockerd.log").open("wb") as log:
        return subprocess.Popen(
            contained("sh", "-ec", _SCRIPT, "sh", *engine),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _settings(folder: Path) -> dict[str, object]:
    settings: dict[str, object] = {
        "data-root": str(folder / "data"),
        "hosts": [f"unix://{folder / 'docker.sock'}"],
        "cgroup-parent": f"/{_cgroup(folder)}",
        # systemd's driver needs the host's systemd, which a pid namespace does not reach.
        "exec-opts": ["native.cgroupdriver=cgroupfs"],
        "log-level": "warn",
    }
    if not oci_runtime.is_needed():
        return settings
    runtime = folder / "bin" / "runtime"
    program = [
        sys.executable,
        "-ISE",
        oci_runtime.__file__,
        shutil.which("runc") or "runc",
    ]
    runtime.write_text(f'#!/bin/sh\nexec {" ".join(program)} "$@"\n')
    runtime.chmod(0o755)
    return settings | {
        "runtimes": {"limited": {"path": str(runtime)}},
        "default-runtime": "limited",
    }


def _wait(process: subprocess.Popen[bytes], folder: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT
    while not ENGINES["docker"].is_available():
        if process.poll() is not None or time.monotonic() > deadline:
            raise _failure(
                process, (folder / "dockerd.log").read_text(errors="replace").strip()
            )
        time.sleep(0.1)


def _failure(process: subprocess.Popen[bytes], log: str) -> UsageError | TimedOut:
    """Return why the engine does not answer: it has refused this machine, or it takes too long."""
    if process.poll() is None:
        return TimedOut(
            f"dockerd did not answer within {_START_TIMEOUT} s; its log ends: {log[-1500:]}"
        )
    return UsageError(
        f"dockerd cannot run on this machine: {log.splitlines()[-1] if log else 'no log'}; start Docker"
    )
