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
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from testcluster import toolchain
from testcluster.errors import TimedOut, UsageError
from testcluster.state import cache

MODULES = Path(__file__).with_name("modules")
_LOG_LINES = 20
"""Lines of the compiler that are shown when it fails."""
_FLAGS = ("-mod=readonly", "-trimpath", "-buildvcs=false")
"""go.sum decides; no path of this machine gets in; no version control is asked."""
_UNREACHABLE = re.compile(r'dial tcp|(Get|read) "?http|reading http\S+: 5\d\d|module lookup disabled')


@dataclass(frozen=True)
class Binary:
    """One program: where it comes from, how it is built, and how it is asked for its version."""

    module: str
    package: str
    ask: tuple[str, ...] = ("--version",)
    cgo: bool = False
    tags: str = ""
    of: str = ""
    """For a main of our own: the module whose version it bears."""


def _kubernetes(name: str, *ask: str) -> Binary:
    return Binary("kubernetes", f"k8s.io/kubernetes/cmd/{name}", ask or ("--version",))


def _containerd(name: str) -> Binary:
    return Binary("containerd", f"github.com/containerd/containerd/v2/cmd/{name}")


# In the order in which they are begun: first the quick ones, of which one needs more than Go.
BINARIES: dict[str, Binary] = {
    "pause": Binary("pause", "."),
    "runc": Binary("runc", "github.com/opencontainers/runc", cgo=True, tags="seccomp"),
    "kube-apiserver": _kubernetes("kube-apiserver"),
    "kube-controller-manager": _kubernetes("kube-controller-manager"),
    "kube-scheduler": _kubernetes("kube-scheduler"),
    "kube-proxy": _kubernetes("kube-proxy"),
    "kubelet": _kubernetes("kubelet"),
    "kubectl": _kubernetes("kubectl", "version", "--client"),
    "etcd": Binary("etcd", "go.etcd.io/etcd/server/v3"),
    "containerd": _containerd("containerd"),
    "containerd-shim-runc-v2": _containerd("containerd-shim-runc-v2"),
    "ctr": _containerd("ctr"),
    "registry": Binary("registry", ".", of="github.com/distribution/distribution/v3"),
    "coredns": Binary("coredns", ".", of="github.com/coredns/coredns"),
    "kwok": Binary("kwok", "sigs.k8s.io/kwok/cmd/kwok"),
    "kind": Binary("kind", "sigs.k8s.io/kind"),
    "helm": Binary("helm", "helm.sh/helm/v4/cmd/helm", ("version", "--short")),
}


def version(binary: Binary) -> str:
    """Read a program's version, without its v, from its module's go.mod; a program of our own is version 1."""
    required = re.findall(r"^(?:require )?\s*(\S+/\S+) v(\S+)", _go_mod(binary), re.MULTILINE)
    whole = f"{binary.of or binary.package}/"
    providing = {path: known for path, known in required if whole.startswith(f"{path}/")}
    return providing[max(providing, key=len)] if providing else "1"


def needed_go(names: Iterable[str] = BINARIES) -> str:
    """Name the oldest Go that builds them all, as go.mod has it."""
    lines = (re.search(r"^go (\S+)", _go_mod(BINARIES[name]), re.MULTILINE) for name in names)
    return max((line[1] for line in lines if line), key=toolchain.parts)


def folder() -> Path:
    """Name the folder of the programs; another version of any of them, or another way to build, is another folder."""
    known = hashlib.sha256(f"{_architecture()} {_FLAGS} {sorted(BINARIES.items())}".encode())
    for file in sorted(file for kind in ("go.mod", "go.sum", "*.go") for file in MODULES.glob(f"*/{kind}")):
        known.update(f"{file.relative_to(MODULES)}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\0".encode())
    return cache() / f"bin-{known.hexdigest()[:16]}"


def report_progress(line: str) -> None:
    """Say it at once, and not where the output of a command is expected."""
    print(line, file=sys.stderr, flush=True)


def build_missing(names: Iterable[str], say: Callable[[str], None] = report_progress) -> Path:
    """Build what is missing, and give the folder; when nothing is missing no Go is needed.

    Two that build at once do the work once; one that is killed leaves nothing that is taken for a program.
    Raises Refused where Go, a compiler, room or the network is missing, NotReady where the compiler fails.
    """
    wanted = sorted(set(names), key=list(BINARIES).index)
    target = folder()
    missing = _missing(wanted, target)
    if not missing:
        return target
    go = _toolchain(missing)
    with _alone(target, say):
        for leftover in target.glob(".building-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        # Somebody else may have built them while we waited.
        _build_all(go, _missing(wanted, target), target, say)
    return target


def _build_all(go: str, names: list[str], target: Path, say: Callable[[str], None]) -> None:
    """Build two modules at once: while one is fetched or linked, which keeps one core busy, another compiles."""

    def build(module: str) -> None:
        for name in names:
            if BINARIES[name].module == module:
                _build(go, name, target, say)

    with ThreadPoolExecutor(2) as pool:
        work = [pool.submit(build, module) for module in dict.fromkeys(BINARIES[name].module for name in names)]
        try:
            for done in as_completed(work):
                done.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _missing(names: list[str], target: Path) -> list[str]:
    return [name for name in names if not (target / name).exists()]


def _toolchain(names: list[str]) -> str:
    """Find the Go to build with, and see that nothing else is lacking."""
    needed = needed_go(names)
    asking = next(BINARIES[name].module for name in names if needed_go([name]) == needed)
    go = toolchain.go(needed, MODULES / asking, cache())
    if any(BINARIES[name].cgo for name in names):
        toolchain.check_libseccomp()
    return go


@contextmanager
def _alone(target: Path, say: Callable[[str], None]) -> Iterator[None]:
    try:
        target.mkdir(parents=True, exist_ok=True)
        lock = (target / ".lock").open("a+")
    except OSError as problem:
        raise UsageError(f"{target} cannot be written: {problem.strerror}; set FINETUNE_CACHE") from problem
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            say(f"waiting for process {lock.read() or 'that just began and'} that builds into {target} …")
            fcntl.flock(lock, fcntl.LOCK_EX)
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def _build(go: str, name: str, target: Path, say: Callable[[str], None]) -> None:
    known = version(BINARIES[name])
    say(f"building {name} {known} …")
    begun = time.monotonic()
    # A name of its own: the compiler of a build that was killed may still be writing where that one had been.
    with tempfile.TemporaryDirectory(prefix=".building-", dir=target, ignore_cleanup_errors=True) as scratch:
        built = Path(scratch) / name
        _compile(go, name, built)
        _verify(name, built)
        with built.open("rb") as whole:
            os.fsync(whole.fileno())
        # Only what has run is given its name, in one step.
        built.replace(target / name)
    say(f"{name} {known} built in {time.monotonic() - begun:.0f} s")


def _compile(go: str, name: str, to: Path) -> None:
    binary = BINARIES[name]
    command = [go, "build", *_FLAGS, f"-tags={binary.tags}", f"-ldflags={_link(binary)}", "-o", str(to), binary.package]
    own = {"CGO_ENABLED": str(int(binary.cgo)), "GOOS": "linux", "GOARCH": _architecture(), "GOWORK": "off"}
    # Go's scratch where the next build clears up after one that was killed, and not in a small /tmp.
    own["GOTMPDIR"] = str(to.parent)
    there = MODULES / binary.module
    done = subprocess.run(command, cwd=there, env=os.environ | own, capture_output=True, text=True, check=False)
    if done.returncode and _UNREACHABLE.search(done.stderr):
        raise UsageError(
            f"{name}: the Go module proxy could not be reached; look at the network and at `go env GOPROXY`"
        )
    if done.returncode:
        last = "\n".join(done.stderr.strip().splitlines()[-_LOG_LINES:])
        raise TimedOut(f"{name} {version(binary)} could not be built; the compiler's last words:\n{last}")


def _link(binary: Binary) -> str:
    """Strip; and tell a program its version, which it does not know when built as somebody's dependency."""
    return " ".join(["-s -w", *(f"-X {where}={value}" for where, value in _stamps(binary).items())])


def _stamps(binary: Binary) -> dict[str, str]:
    known = version(binary)
    match binary.module:
        case "kubernetes":
            major, minor = known.split(".")[:2]
            stamps = {"Version": f"v{known}", "Major": major, "Minor": minor, "TreeState": "clean", "Commit": "none"}
            return {f"k8s.io/component-base/version.git{key}": value for key, value in stamps.items()}
        case "helm":
            return {"helm.sh/helm/v4/internal/version.version": f"v{known}"}
        case _:
            return {}


def _verify(name: str, program: Path) -> None:
    """Run what was built. Raises Refused when it does not run here, or says that it is another version."""
    wanted = version(BINARIES[name])
    command = [str(program), *BINARIES[name].ask]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise UsageError(f"{name} was built but does not run here: {problem}") from problem
    said = done.stdout + done.stderr
    if done.returncode or not re.search(rf"(?<![\d.]){re.escape(wanted)}(?![\d.])", said):
        raise UsageError(f"{name} {wanted} was built but answers {said.strip()[:200]!r}; it is not used")


def _architecture() -> str:
    machine = platform.machine()
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine)


def _go_mod(binary: Binary) -> str:
    return (MODULES / binary.module / "go.mod").read_text()
