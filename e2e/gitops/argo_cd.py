"""Argo CD as processes beside a cluster: application controller, repo server, API server and a Redis in memory."""

import base64
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from support import programs
from support.stores import servers

from e2e.gitops.git_server import GitServer, running_git_server
from testcluster import binaries
from testcluster.commands import run_command
from testcluster.kube import Kube
from testcluster.kube_namespace import KubeNamespace, wait_until_established

Object = dict[str, Any]
NAMESPACE = "argocd"
EXAMPLES = Path(__file__).parents[2] / "deploy" / "argocd"
CUSTOMIZATIONS: dict[str, str] = yaml.safe_load(
    (EXAMPLES / "argocd-cm.yaml").read_text()
)["data"]
"""Health check and actions of a FineTunePipeline, as an administrator of Argo CD adds them."""
LABELS = {"app.kubernetes.io/part-of": "argocd"}
"""Argo CD watches no other ConfigMaps and Secrets."""
KINDS = ("application", "appproject", "applicationset")
RESYNC_SECONDS = 5
STATES = '{.metadata.name} {.status.sync.status} {.status.health.status}{"\\n"}'


@dataclass(frozen=True)
class ArgoCD:
    """A running Argo CD that manages the cluster beside it."""

    kube: Kube
    folder: Path
    git: GitServer
    server: str
    """host:port of its API server, which asks for no password."""

    @property
    def objects(self) -> KubeNamespace:
        """The namespace of its Applications, for kubectl."""
        return KubeNamespace(self.kube, NAMESPACE)

    def command(self, *arguments: str) -> str:
        """Run the command line of Argo CD and return its output; raises TimedOut with its error message."""
        program = [
            str(binaries.program("argocd")),
            *arguments,
            "--server",
            self.server,
            "--plaintext",
        ]
        home = f"HOME={self.folder}"
        return run_command(
            "env", home, *program, called=f"argocd {' '.join(arguments)}"
        )

    def configure(self, customizations: Mapping[str, str]) -> None:
        """Set the customizations of argocd-cm, which the processes watch."""
        data = {"timeout.reconciliation": f"{RESYNC_SECONDS}s", **customizations}
        self.kube.apply([_object("ConfigMap", "argocd-cm", data=data)])

    def states(self, name: str) -> list[tuple[str, str]]:
        """Return every pair of sync and health that the Application had, in order."""
        lines = (
            line.split(" ")
            for line in (self.folder / "states").read_text().splitlines()
        )
        recorded = [
            (sync, health)
            for application, sync, health in lines
            if application == name and sync
        ]
        return [
            state
            for state, before in zip(recorded, [None, *recorded], strict=False)
            if state != before
        ]

    def logs(self) -> str:
        """Return the warnings and errors of all processes, at most the last 100 lines of each."""
        logs = {
            file.stem: file.read_text().splitlines()[-100:]
            for file in sorted(self.folder.glob("*.log"))
        }
        return "\n".join(
            f"{name}: {line}" for name, lines in logs.items() for line in lines
        )


@contextmanager
def running_argo_cd(kube: Kube, folder: Path) -> Iterator[ArgoCD]:
    """Install Argo CD's CRDs and settings in a cluster, and run its processes until the end of the context."""
    redis, repositories, metrics, probe, server = (
        servers.free_port() for _ in range(5)
    )
    cache = ("--redis", f"127.0.0.1:{redis}")
    renderer = (f"127.0.0.1:{repositories}", "--repo-server-plaintext")
    with ExitStack() as stack:
        git = stack.enter_context(running_git_server(folder / "git"))
        created = ArgoCD(kube, folder, git, f"127.0.0.1:{server}")
        _install(created)
        stack.enter_context(
            servers.running(
                [programs.program("miniredis"), f"127.0.0.1:{redis}"], redis, {}
            )
        )

        def run(name: str, port: int, *arguments: str) -> None:
            command = [programs.program("argocd"), "--loglevel", "warn", *arguments]
            environment = _environment(kube, folder, name)
            stack.enter_context(
                servers.running(command, port, environment, log=folder / f"{name}.log")
            )

        run("argocd-repo-server", repositories, *cache, *_repo_server(repositories))
        run(
            "argocd-application-controller",
            metrics,
            *cache,
            "--repo-server",
            *renderer,
            *_controller(metrics),
        )
        run(
            "argocd-applicationset-controller",
            probe,
            "--argocd-repo-server",
            *renderer,
            *_application_sets(probe),
        )
        run(
            "argocd-server",
            server,
            *cache,
            "--repo-server",
            *renderer,
            *_api_server(server),
        )
        stack.enter_context(_recorded_states(created))
        yield created


def _repo_server(port: int) -> list[str]:
    local = (
        "--address",
        "127.0.0.1",
        "--metrics-address",
        "127.0.0.1",
        "--disable-tls",
    )
    return ["--port", str(port), "--metrics-port", str(servers.free_port()), *local]


def _controller(metrics: int) -> list[str]:
    quick = (
        "--app-resync",
        str(RESYNC_SECONDS),
        "--app-resync-jitter",
        "0",
        "--self-heal-timeout-seconds",
        "2",
    )
    # Without --persist-resource-health the health of single resources is in Redis only.
    return [
        "--namespace",
        NAMESPACE,
        "--metrics-port",
        str(metrics),
        "--persist-resource-health",
        *quick,
    ]


def _application_sets(probe: int) -> list[str]:
    ports = {
        "probe": probe,
        "metrics": servers.free_port(),
        "webhook": servers.free_port(),
    }
    return [
        "--namespace",
        NAMESPACE,
        *(f"--{name}-addr=127.0.0.1:{port}" for name, port in ports.items()),
    ]


def _api_server(port: int) -> list[str]:
    local = (
        "--address",
        "127.0.0.1",
        "--metrics-address",
        "127.0.0.1",
        "--metrics-port",
        str(servers.free_port()),
    )
    open_to_all = ("--disable-auth", "--insecure", "--dex-server", "")
    return ["--namespace", NAMESPACE, "--port", str(port), *local, *open_to_all]


def _environment(kube: Kube, folder: Path, name: str) -> dict[str, str]:
    own = {
        variable: str(folder / name / variable)
        for variable in ("HOME", "TMPDIR", *_FOLDERS)
    }
    for path in own.values():
        Path(path).mkdir(parents=True, exist_ok=True)
    switches = {
        "ARGOCD_BINARY_NAME": name,
        "ARGOCD_FAKE_IN_CLUSTER": "true",
        "ARGOCD_GPG_ENABLED": "false",
    }
    path = f"{binaries.program('helm').parent}{os.pathsep}{os.environ['PATH']}"
    return {**own, **switches, "KUBECONFIG": str(kube.kubeconfig), "PATH": path}


_FOLDERS = tuple(
    f"ARGOCD_{name}"
    for name in (
        "TLS_DATA_PATH",
        "SSH_DATA_PATH",
        "GNUPGHOME",
        "GPG_DATA_PATH",
        "PLUGINSOCKFILEPATH",
    )
)


def _install(argo_cd: ArgoCD) -> None:
    crds = programs.source("argocd") / "manifests" / "crds"
    for kind in KINDS:
        argo_cd.kube.apply((crds / f"{kind}-crd.yaml").read_text())
    wait_until_established(argo_cd.kube, *(f"{kind}s.argoproj.io" for kind in KINDS))
    argo_cd.kube.apply(
        [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}]
    )
    key = {"server.secretkey": base64.b64encode(b"secret").decode()}
    everywhere = {
        "sourceRepos": ["*"],
        "destinations": [{"server": "*", "namespace": "*"}],
    }
    everything = {"clusterResourceWhitelist": [{"group": "*", "kind": "*"}]}
    argo_cd.kube.apply(
        [
            _object("ConfigMap", "argocd-rbac-cm"),
            _object("Secret", "argocd-secret", data=key),
            _object(
                "AppProject",
                "default",
                "argoproj.io/v1alpha1",
                spec={**everywhere, **everything},
            ),
        ]
    )
    argo_cd.configure(CUSTOMIZATIONS)


def _object(kind: str, name: str, version: str = "v1", **fields: Any) -> Object:
    metadata = {"name": name, "namespace": NAMESPACE, "labels": LABELS}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **fields}


@contextmanager
def _recorded_states(argo_cd: ArgoCD) -> Iterator[None]:
    """Write sync and health of every Application to a file, at each change."""
    watch = ("get", "applications", "--watch", f"--output=jsonpath={STATES}")
    command: list[str | Path] = [
        argo_cd.kube.kubectl,
        "--kubeconfig",
        argo_cd.kube.kubeconfig,
        "--namespace",
        NAMESPACE,
        *watch,
    ]
    with (
        (argo_cd.folder / "states").open("wb") as file,
        subprocess.Popen(command, stdout=file) as process,
    ):
        try:
            yield
        finally:
            process.terminate()
