"""The programs a cluster is made of: built from Go modules, once, and kept outside the checkout.

modules/ holds one small module a project, with go.mod and go.sum, so that what is built is what is committed. The
versions stand in go.mod and nowhere else.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.problems import Refused
from e2e.cluster.state import cache

MODULES = Path(__file__).with_name("modules")
LEAST_DISK = 6 << 30
"""Bytes free before anything is built: the compiler's cache takes most of it."""
_STAMP = "k8s.io/component-base/version"


@dataclass(frozen=True)
class Binary:
    """One program: where it comes from, and how it tells its version."""

    module: str
    package: str
    ask: tuple[str, ...] = ("--version",)
    answer: str = "{version}"
    """What the answer must contain; {version} is that of the module in go.mod, without its v."""
    cgo: bool = False
    tags: str = ""


def _kubernetes(name: str, *ask: str) -> Binary:
    return Binary("kubernetes", f"k8s.io/kubernetes/cmd/{name}", ask or ("--version",))


def _containerd(name: str, ask: str) -> Binary:
    # A build from a module knows no version of its own; that it runs and says its name is all there is to see.
    return Binary("containerd", f"github.com/containerd/containerd/v2/cmd/{name}", (ask,), "containerd")


BINARIES: dict[str, Binary] = {
    "kube-apiserver": _kubernetes("kube-apiserver"),
    "kube-controller-manager": _kubernetes("kube-controller-manager"),
    "kube-scheduler": _kubernetes("kube-scheduler"),
    "kube-proxy": _kubernetes("kube-proxy"),
    "kubelet": _kubernetes("kubelet"),
    "kubectl": _kubernetes("kubectl", "version", "--client"),
    "etcd": Binary("etcd", "go.etcd.io/etcd/server/v3"),
    "containerd": _containerd("containerd", "--version"),
    "containerd-shim-runc-v2": _containerd("containerd-shim-runc-v2", "-v"),
    "ctr": _containerd("ctr", "--version"),
    "runc": Binary("runc", "github.com/opencontainers/runc", answer="libseccomp", cgo=True, tags="seccomp"),
    "kwok": Binary("kwok", "sigs.k8s.io/kwok/cmd/kwok", answer="kwok"),
    "registry": Binary("registry", "github.com/distribution/distribution/v3/cmd/registry", answer="registry"),
    "coredns": Binary("coredns", "github.com/coredns/coredns", ("-version",)),
    "kind": Binary("kind", "sigs.k8s.io/kind", ("version",)),
    "pause": Binary("pause", ".", answer="pause"),
}


def version(binary: Binary) -> str:
    """Read a program's version, without its v, from its module's go.mod; a program of our own is version 1."""
    required = re.findall(r"^(?:require )?\s*(\S+/\S+) v(\S+)", _go_mod(binary), re.MULTILINE)
    providing = {path: known for path, known in required if f"{binary.package}/".startswith(f"{path}/")}
    return providing[max(providing, key=len)] if providing else "1"


def _go_mod(binary: Binary) -> str:
    return (MODULES / binary.module / "go.mod").read_text()


def folder() -> Path:
    """Name the folder of the programs; another version of any of them is another folder."""
    known = hashlib.sha256(f"{platform.machine()} {sorted(BINARIES.items())}".encode())
    for file in sorted(MODULES.glob("*/*")):
        known.update(f"{file.relative_to(MODULES)}\0".encode() + file.read_bytes())
    return cache() / f"bin-{known.hexdigest()[:16]}"


def provide(names: Iterable[str], say: Callable[[str], None] = print) -> Path:
    """Build what is missing, and give the folder. Raises Refused when it cannot be built, and how to mend it."""
    target = folder()
    wanted = list(names)
    if not _missing(wanted, target):
        return target
    with _alone(target, say):
        # Somebody else may have built them while we waited.
        missing = _missing(wanted, target)
        if missing:
            _check_tools(missing)
            for leftover in target.glob(".building-*"):
                shutil.rmtree(leftover, ignore_errors=True)
        for name in missing:
            _build(name, target, say)
    return target


def _missing(names: list[str], target: Path) -> list[str]:
    return [name for name in names if not (target / name).exists()]


@contextmanager
def _alone(target: Path, say: Callable[[str], None]) -> Iterator[None]:
    target.mkdir(parents=True, exist_ok=True)
    handle = os.open(target, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another build is at work in {target}; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _check_tools(missing: list[str]) -> None:
    go = shutil.which("go")
    wanted = max(_go_version(BINARIES[name]) for name in missing)
    if not go:
        raise Refused(
            f"Go {_dotted(wanted)} or newer is needed to build {', '.join(missing)}, and there is no `go` on PATH"
        )
    said = subprocess.run([go, "env", "GOVERSION"], capture_output=True, text=True, check=False, cwd="/").stdout
    found = re.match(r"go(\d+)\.(\d+)", said)
    # A toolchain that is told to fetch a newer one does so by itself.
    may_fetch = os.environ.get("GOTOOLCHAIN", "auto") != "local"
    if found and (int(found[1]), int(found[2])) < wanted and not may_fetch:
        raise Refused(
            f"Go {_dotted(wanted)} or newer is needed, this is {said.strip()}; set GOTOOLCHAIN=auto or install it"
        )
    if any(BINARIES[name].cgo for name in missing) and not (shutil.which("gcc") and _has_libseccomp()):
        raise Refused(
            "runc needs a C compiler and libseccomp; `make cluster-deps` installs them (Debian: gcc libseccomp-dev)"
        )
    free = shutil.disk_usage(folder()).free
    if free < LEAST_DISK:
        raise Refused(
            f"{free / (1 << 30):.1f} GiB free at {cache()}, building needs {LEAST_DISK >> 30}; make room, or set FINETUNE_CACHE"
        )


def _go_version(binary: Binary) -> tuple[int, int]:
    found = re.search(r"^go (\d+)\.(\d+)", _go_mod(binary), re.MULTILINE)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _dotted(version_: tuple[int, int]) -> str:
    return f"{version_[0]}.{version_[1]}"


def _has_libseccomp() -> bool:
    told = subprocess.run(["pkg-config", "--exists", "libseccomp"], check=False) if shutil.which("pkg-config") else None
    return told is not None and told.returncode == 0


def _build(name: str, target: Path, say: Callable[[str], None]) -> None:
    binary = BINARIES[name]
    say(f"building {name} {version(binary)} …")
    begun = time.monotonic()
    scratch = target / f".building-{name}"
    scratch.mkdir()
    try:
        _compile(binary, scratch / name)
        _verify(name, binary, scratch / name)
        # Only what has run is given its name, in one step.
        (scratch / name).replace(target / name)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    say(f"{name} {version(binary)} built in {time.monotonic() - begun:.0f} s")


def _compile(binary: Binary, to: Path) -> None:
    major, minor = version(BINARIES["kubelet"]).split(".")[:2]
    stamps = {
        "gitVersion": f"v{version(BINARIES['kubelet'])}",
        "gitMajor": major,
        "gitMinor": minor,
        "gitTreeState": "clean",
        "gitCommit": "none",
    }
    flags = " ".join(["-s -w", *(f"-X {_STAMP}.{key}={value}" for key, value in stamps.items())])
    command = ["go", "build", "-trimpath", f"-tags={binary.tags}", f"-ldflags={flags}", "-o", str(to), binary.package]
    own = {"CGO_ENABLED": str(int(binary.cgo)), "GOWORK": "off"}
    done = subprocess.run(
        command, cwd=MODULES / binary.module, env=os.environ | own, capture_output=True, text=True, check=False
    )
    if done.returncode:
        last = "\n".join(done.stderr.strip().splitlines()[-20:])
        unreachable = re.search(r"dial tcp|no such host|i/o timeout|connection refused", done.stderr)
        why = "the Go module proxy cannot be reached (GOPROXY, network)" if unreachable else "the compiler said"
        raise Refused(f"{to.name} cannot be built; {why}:\n{last}")


def _verify(name: str, binary: Binary, program: Path) -> None:
    """Run what was built. Raises Refused when it does not run here, or says it is something else."""
    try:
        done = subprocess.run([str(program), *binary.ask], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise Refused(f"{name} was built but does not run: {problem}") from problem
    said = done.stdout + done.stderr
    wanted = binary.answer.format(version=version(binary))
    if wanted not in said:
        raise Refused(f"{name} was built but answers {said.strip()[:200]!r} where {wanted!r} is expected")
