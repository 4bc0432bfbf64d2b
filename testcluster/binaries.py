"""The programs of clusters and tests: built once from Go modules and cached outside the checkout.

modules/ has one small module for each project. Its committed go.mod and go.sum pin what is built, and go.mod is the
only place with a version. The programs of a cluster have one folder. A program that only some tests use has a folder of
its module, so that another version of it rebuilds nothing else.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
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
from dataclasses import dataclass, field
from pathlib import Path

from testcluster import toolchain
from testcluster.cluster_state import cache
from testcluster.errors import TimedOut, UsageError

MODULES = Path(__file__).with_name("modules")
_LOG_LINES = 20
"""Number of lines of compiler output in an error."""
_FLAGS = ("-mod=readonly", "-trimpath", "-buildvcs=false", "-gcflags=all=-dwarf=false")
"""go.mod and go.sum are not changed; programs contain no paths of this machine and no version control data.

The linker removes the debug data (-s -w). The compiler does not write it either: 8 % less processor time for registry.
"""
_COMPILER_MEMORY = {"GOGC": "off", "GOMEMLIMIT": "1GiB"}
"""A process of the compiler collects garbage only above 1 GiB: 16 % less processor time for registry."""
_UNREACHABLE = re.compile(
    r'dial tcp|(Get|read) "?http|reading http\S+: 5\d\d|module lookup disabled'
)


@dataclass(frozen=True)
class Binary:
    """A program: its source, its build options, and the arguments that make it print its version."""

    module: str
    package: str
    version_arguments: tuple[str, ...] = ("--version",)
    cgo: bool = False
    tags: str = ""
    version_module: str = ""
    """For a main package of this repository: the module whose version the program has."""
    for_tests: bool = field(default=False, repr=False)
    """Only some tests need it, or the node image of kind: built when it is first used."""
    names_its_version: bool = field(default=True, repr=False)
    """Whether it prints its version. The version of a program that cannot is read from its Go build information."""


def _kubernetes(name: str, *version_arguments: str) -> Binary:
    return Binary(
        "kubernetes", f"k8s.io/kubernetes/cmd/{name}", version_arguments or ("--version",)
    )


def _older_kubernetes(name: str, minor: str) -> Binary:
    return Binary(f"kubernetes-{minor}", f"k8s.io/kubernetes/cmd/{name}", for_tests=True)


def _containerd(name: str) -> Binary:
    return Binary("containerd", f"github.com/containerd/containerd/v2/cmd/{name}")


def _prometheus(name: str) -> Binary:
    # Of its service discoveries, the tests use Kubernetes and files. The others are the clouds' libraries.
    tags = "remove_all_sd,enable_kubernetes_sd"
    return Binary(
        "prometheus", f"github.com/prometheus/prometheus/cmd/{name}", tags=tags, for_tests=True
    )


def _flux(name: str) -> Binary:
    return Binary(
        f"flux-{name}",
        f"github.com/fluxcd/{name}",
        ("--help",),
        for_tests=True,
        names_its_version=False,
    )


CONTROL_PLANE = ("kube-apiserver", "kube-controller-manager", "kube-scheduler")
OLDER_KUBERNETES = ("1.34", "1.35")
"""Minor versions of Kubernetes, besides that of a cluster, whose control planes tests can start."""
# In build order: the quick ones first. Of these, runc also needs a C compiler and libseccomp.
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
    "registry": Binary("registry", ".", version_module="github.com/distribution/distribution/v3"),
    "coredns": Binary("coredns", ".", version_module="github.com/coredns/coredns"),
    "kwok": Binary("kwok", "sigs.k8s.io/kwok/cmd/kwok"),
    "kind": Binary("kind", "sigs.k8s.io/kind"),
    "kubeadm": Binary(
        "kubernetes", "k8s.io/kubernetes/cmd/kubeadm", ("version", "--output=short"), for_tests=True
    ),
    "helm": Binary("helm", "helm.sh/helm/v4/cmd/helm", ("version", "--short")),
    "versitygw": Binary("versitygw", "github.com/versity/versitygw/cmd/versitygw"),
    "fake-gcs-server": Binary(
        "fake-gcs-server", ".", version_module="github.com/fsouza/fake-gcs-server", for_tests=True
    ),
    "kstatus": Binary("kstatus", ".", version_module="github.com/fluxcd/cli-utils", for_tests=True),
    "flux-health": Binary(
        "flux-kustomize-controller",
        "./health",
        version_module="github.com/fluxcd/pkg/runtime",
        for_tests=True,
    ),
    "luavm": Binary(
        "argocd", "./luavm", version_module="github.com/argoproj/argo-cd/v3", for_tests=True
    ),
    "miniredis": Binary(
        "argocd", "./miniredis", version_module="github.com/alicebob/miniredis/v2", for_tests=True
    ),
    "promql": Binary(
        "prometheus",
        "./expressions",
        version_module="github.com/prometheus/prometheus",
        for_tests=True,
    ),
    "promtool": _prometheus("promtool"),
    "prometheus": _prometheus("prometheus"),
    "prometheus-operator": Binary(
        "prometheus-operator",
        "github.com/prometheus-operator/prometheus-operator/cmd/operator",
        for_tests=True,
    ),
    "argocd": Binary(
        "argocd", "github.com/argoproj/argo-cd/v3/cmd", ("version", "--client"), for_tests=True
    ),
    **{
        f"{name}-{minor}": _older_kubernetes(name, minor)
        for minor in OLDER_KUBERNETES
        for name in CONTROL_PLANE
    },
    "source-controller": _flux("source-controller"),
    "kustomize-controller": _flux("kustomize-controller"),
    "helm-controller": _flux("helm-controller"),
}


def version(binary: Binary) -> str:
    """Return the version of a program, without `v`, from its module's go.mod; `1` for `pause`, which is our own."""
    return _providing(binary)[1]


def _providing(binary: Binary) -> tuple[str, str]:
    """Return path and version of the Go module that a program comes from; no path for our own `pause`."""
    required = re.findall(r"^(?:require )?\s*(\S+/\S+) v(\S+)", _go_mod(binary), re.MULTILINE)
    package = f"{binary.version_module or binary.package}/"
    # Of several modules whose path is a prefix of the package, the longest one contains it.
    providing = [(path, known) for path, known in required if package.startswith(f"{path}/")]
    return max(providing, key=lambda found: len(found[0]), default=("", "1"))


def needed_go(names: Iterable[str] = BINARIES) -> str:
    """Return the oldest Go version that builds all of them, from the `go` lines of go.mod."""
    lines = (re.search(r"^go (\S+)", _go_mod(BINARIES[name]), re.MULTILINE) for name in names)
    return max((line[1] for line in lines if line), key=toolchain.parts)


def folder(name: str = "") -> Path:
    """Return the folder of a program for tests, or that of a cluster's programs.

    The name of the folder is a hash of all versions, sources and build options.
    """
    module = _test_module(name)
    group = {key: binary for key, binary in BINARIES.items() if _test_module(key) == module}
    digest = hashlib.sha256(f"{_architecture()} {_FLAGS} {sorted(group.items())}".encode())
    modules = {binary.module for binary in group.values()}
    for file in sorted(
        file for kind in ("go.mod", "go.sum", "*.go") for file in MODULES.rglob(kind)
    ):
        path = file.relative_to(MODULES)
        if path.parts[0] in modules:
            digest.update(f"{path}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\0".encode())
    return cache() / "-".join(part for part in ("bin", module, digest.hexdigest()[:16]) if part)


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
    module = MODULES / BINARIES[name].module
    command = [
        _toolchain([name], only_downloads=True),
        "mod",
        "download",
        "-json",
        _providing(BINARIES[name])[0],
    ]
    done = subprocess.run(command, cwd=module, capture_output=True, text=True, check=False)
    answer = json.loads(done.stdout or "{}")
    if done.returncode:
        raise UsageError(
            f"{name}: cannot download its source: {answer.get('Error') or done.stderr.strip()}"
        )
    return Path(answer["Dir"])


def build_missing(names: Iterable[str], report: Callable[[str], None] = report_progress) -> Path:
    """Build the programs that are missing. Go is needed only when a program is missing.

    Return the folder of a cluster's programs. Of two processes that build at the same time, the second waits and uses
    the result of the first. A killed build leaves no file that looks like a program. Raises UsageError when Go, a C
    compiler, disk space or the network is missing, and TimedOut when the compiler fails.
    """
    wanted = sorted(set(names), key=list(BINARIES).index)
    missing = _missing(wanted)
    if missing:
        go = _toolchain(missing)
        for target in dict.fromkeys(folder(name) for name in missing):
            _build_folder(go, [name for name in wanted if folder(name) == target], target, report)
    return folder()


def _build_folder(go: str, names: list[str], target: Path, report: Callable[[str], None]) -> None:
    with _locked(target, report):
        for leftover in target.glob(".building-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        # Another process may have built them during the wait for the lock.
        _build_all(go, _missing(names), target, report)


def _build_all(go: str, names: list[str], target: Path, report: Callable[[str], None]) -> None:
    """Build two modules in parallel: one compiles while the other is downloaded or linked, which uses one core."""

    def build(module: str) -> None:
        for name in names:
            if BINARIES[name].module == module:
                _build(go, name, target, report)

    with ThreadPoolExecutor(2) as pool:
        work = [
            pool.submit(build, module)
            for module in dict.fromkeys(BINARIES[name].module for name in names)
        ]
        try:
            for done in as_completed(work):
                done.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _missing(names: list[str]) -> list[str]:
    return [name for name in names if not (folder(name) / name).exists()]


def _toolchain(names: list[str], *, only_downloads: bool = False) -> str:
    """Return the Go to build with, and check the other build requirements, of which a download has none."""
    needed = needed_go(names)
    newest = next(BINARIES[name].module for name in names if needed_go([name]) == needed)
    of_cluster = not all(BINARIES[name].for_tests for name in names)
    required_bytes = toolchain.REQUIRED_BYTES if of_cluster else toolchain.REQUIRED_BYTES_OF_TESTS
    go = toolchain.go(needed, MODULES / newest, cache(), 0 if only_downloads else required_bytes)
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
            report(f"waiting for process {lock.read() or '(unknown)'} that builds into {target} …")
            fcntl.flock(lock, fcntl.LOCK_EX)
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
        _compile(go, name, built)
        _verify(go, name, built)
        with built.open("rb") as file:
            os.fsync(file.fileno())
        # Only a program that has run gets its final name, atomically.
        built.replace(target / name)
    report(f"{name} {known} built in {time.monotonic() - started:.0f} s")


def _compile(go: str, name: str, to: Path) -> None:
    binary = BINARIES[name]
    command = [
        go,
        "build",
        *_FLAGS,
        f"-tags={binary.tags}",
        f"-ldflags={_link(binary)}",
        "-o",
        str(to),
        binary.package,
    ]
    settings = {
        "CGO_ENABLED": str(int(binary.cgo)),
        "GOOS": "linux",
        "GOARCH": _architecture(),
        "GOWORK": "off",
    }
    # Go's temporary files go to the scratch folder: the next build deletes it after a kill, and /tmp may be small.
    settings["GOTMPDIR"] = str(to.parent)
    settings |= _COMPILER_MEMORY
    module = MODULES / binary.module
    done = subprocess.run(
        command, cwd=module, env=os.environ | settings, capture_output=True, text=True, check=False
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
    return " ".join(
        ["-s -w", *(f"-X {variable}={value}" for variable, value in _stamps(binary).items())]
    )


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
                f"k8s.io/component-base/version.git{key}": value for key, value in stamps.items()
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


def _verify(go: str, name: str, program: Path) -> None:
    """Run a built program. Raises UsageError when it does not run on this machine or has another version."""
    binary = BINARIES[name]
    done = _run(name, str(program), *binary.version_arguments)
    output = (
        done.stdout + done.stderr
        if binary.names_its_version
        else _build_information(go, name, program)
    )
    expected = version(binary)
    if done.returncode or not re.search(rf"(?<![\d.]){re.escape(expected)}(?![\d.])", output):
        raise UsageError(
            f"{name} {expected} was built but reports the version {output.strip()[:200]!r}; it is not used"
        )


def _build_information(go: str, name: str, program: Path) -> str:
    """Return the line of the program's Go build information with the module that it comes from; empty if absent."""
    lines = _run(name, go, "version", "-m", str(program)).stdout.splitlines()
    module = _providing(BINARIES[name])[0]
    # The line `path` names the package, which may be the module's root, without a version.
    return next(
        (line for line in lines if line.split()[:2] in (["mod", module], ["dep", module])), ""
    )


def _run(name: str, *command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise UsageError(
            f"{name} was built but does not run on this machine: {problem}"
        ) from problem


def _architecture() -> str:
    machine = platform.machine()
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine)


def _go_mod(binary: Binary) -> str:
    return (MODULES / binary.module / "go.mod").read_text()
