"""The Go modules of the programs: the table of all programs, and their versions from go.mod.

modules/ has one small module for each project. Its committed go.mod and go.sum pin what is built, and go.mod is the
only place with a version.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from testcluster import toolchain

MODULES = Path(__file__).with_name("modules")


@dataclass(frozen=True)
class Binary:
    """A program: its source, its build options, and the arguments that make it print its version."""

    # `binaries.folder` hashes the repr of this class: a renamed or moved field would rebuild all programs.
    module: str
    package: str
    version_arguments: tuple[str, ...] = ("--version",)
    cgo: bool = False
    tags: str = ""
    version_module: str = ""
    """For a main package of this repository: the module that determines the program's version."""
    for_tests: bool = field(default=False, repr=False)
    """Only some tests or the node image of kind need the program: it is built when it is first used."""
    names_its_version: bool = field(default=True, repr=False)
    """Whether the program prints its version. If not, the version is read from its Go build information."""


def _kubernetes(name: str, *version_arguments: str) -> Binary:
    return Binary(
        "kubernetes",
        f"k8s.io/kubernetes/cmd/{name}",
        version_arguments or ("--version",),
    )


def _older_kubernetes(name: str, minor: str) -> Binary:
    return Binary(
        f"kubernetes-{minor}", f"k8s.io/kubernetes/cmd/{name}", for_tests=True
    )


def _containerd(name: str) -> Binary:
    return Binary("containerd", f"github.com/containerd/containerd/v2/cmd/{name}")


def _prometheus(name: str) -> Binary:
    # The tests use two service discoveries: Kubernetes and files. All others would compile the clouds' libraries.
    tags = "remove_all_sd,enable_kubernetes_sd"
    return Binary(
        "prometheus",
        f"github.com/prometheus/prometheus/cmd/{name}",
        tags=tags,
        for_tests=True,
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
"""Minor versions of Kubernetes for control planes of tests, besides the version of a cluster."""
# In build order: the quick builds first. Only runc also needs a C compiler and libseccomp.
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
    "registry": Binary(
        "registry", ".", version_module="github.com/distribution/distribution/v3"
    ),
    "coredns": Binary("coredns", ".", version_module="github.com/coredns/coredns"),
    "kwok": Binary("kwok", "sigs.k8s.io/kwok/cmd/kwok"),
    "kind": Binary("kind", "sigs.k8s.io/kind"),
    "kubeadm": Binary(
        "kubernetes",
        "k8s.io/kubernetes/cmd/kubeadm",
        ("version", "--output=short"),
        for_tests=True,
    ),
    "helm": Binary("helm", "helm.sh/helm/v4/cmd/helm", ("version", "--short")),
    "versitygw": Binary("versitygw", "github.com/versity/versitygw/cmd/versitygw"),
    "fake-gcs-server": Binary(
        "fake-gcs-server",
        ".",
        version_module="github.com/fsouza/fake-gcs-server",
        for_tests=True,
    ),
    "kstatus": Binary(
        "kstatus", ".", version_module="github.com/fluxcd/cli-utils", for_tests=True
    ),
    "flux-health": Binary(
        "flux-kustomize-controller",
        "./health",
        version_module="github.com/fluxcd/pkg/runtime",
        for_tests=True,
    ),
    "luavm": Binary(
        "argocd",
        "./luavm",
        version_module="github.com/argoproj/argo-cd/v3",
        for_tests=True,
    ),
    "miniredis": Binary(
        "argocd",
        "./miniredis",
        version_module="github.com/alicebob/miniredis/v2",
        for_tests=True,
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
        "argocd",
        "github.com/argoproj/argo-cd/v3/cmd",
        ("version", "--client"),
        for_tests=True,
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
    return providing_module(binary)[1]


def providing_module(binary: Binary) -> tuple[str, str]:
    """Return path and version of the Go module that a program comes from; no path for our own `pause`."""
    package = f"{binary.version_module or binary.package}/"
    required = re.findall(
        r"^(?:require )?\s*(\S+/\S+) v(\S+)", _go_mod(binary), re.MULTILINE
    )
    providing = [module for module in required if package.startswith(f"{module[0]}/")]
    if not providing:
        return "", "1"
    # Of several modules whose path is a prefix of the package, the longest path is the module with the package.
    longest: tuple[str, str] = max(providing, key=lambda module: len(module[0]))
    return longest


def needed_go(names: Iterable[str] = BINARIES) -> str:
    """Return the oldest Go version that builds all of these programs, from the `go` lines of go.mod."""
    lines = (
        re.search(r"^go (\S+)", _go_mod(BINARIES[name]), re.MULTILINE) for name in names
    )
    return max((line[1] for line in lines if line), key=toolchain.parts)


def module_folder(binary: Binary) -> Path:
    """Return the folder of a program's module in this repository."""
    return MODULES / binary.module


def _go_mod(binary: Binary) -> str:
    return (module_folder(binary) / "go.mod").read_text()
