"""Flux as processes beside a cluster: source controller, kustomize controller and helm controller."""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from support import programs
from support.stores import servers

from e2e.gitops.git_repository import BRANCH, GitRepository
from e2e.gitops.git_server import GitServer, running_git_server
from e2e.pipelines.driver import PipelineDriver
from testcluster.kube import Kube
from testcluster.kube_namespace import KubeNamespace, until, wait_until_established

Object = dict[str, Any]
NAMESPACE = "flux-system"
CONTROLLERS = ("source-controller", "kustomize-controller", "helm-controller")
RECOMMENDED = "--feature-gates=CancelHealthCheckOnNewRevision=true"
"""The option of kustomize-controller with which a commit does not wait for a pipeline that runs (deploy/flux)."""
REQUESTED = "reconcile.fluxcd.io/requestedAt"


@dataclass(frozen=True)
class Flux:
    """A running Flux that manages the cluster beside it."""

    kube: Kube
    folder: Path
    git: GitServer

    def source(self, repository: GitRepository) -> Object:
        """Return the GitRepository of Flux for a repository."""
        name = repository.folder.name
        spec = {"url": repository.url, "ref": {"branch": BRANCH}, "interval": "1h"}
        return self.manifest("source", "v1", "GitRepository", name, spec)

    def commit(self, repository: GitRepository, files: Mapping[str, Any]) -> str:
        """Commit to a repository and ask for a fetch, as a webhook does; return the commit."""
        commit = repository.commit(files)
        name = repository.folder.name
        if self.objects.get("gitrepository", name):
            self.objects.run(
                "annotate",
                "gitrepository",
                name,
                f"{REQUESTED}={commit}",
                "--overwrite",
            )
        return commit

    def manifest(
        self, group: str, version: str, kind: str, name: str, spec: Object
    ) -> Object:
        """Return an object of an API group of Flux."""
        metadata = {"name": name, "namespace": NAMESPACE}
        api_version = f"{group}.toolkit.fluxcd.io/{version}"
        return {
            "apiVersion": api_version,
            "kind": kind,
            "metadata": metadata,
            "spec": spec,
        }

    @property
    def objects(self) -> KubeNamespace:
        """The namespace of its own objects, for kubectl."""
        return KubeNamespace(self.kube, NAMESPACE)

    def ready(self, kind: str, name: str) -> Object:
        """Return the condition Ready of an object, if it is about the current generation; else empty."""
        current = self.objects.get(kind, name)
        for condition in current.get("status", {}).get("conditions", ()):
            if (
                condition["type"] == "Ready"
                and condition["observedGeneration"] == current["metadata"]["generation"]
            ):
                return dict(condition)
        return {}

    def logs(self) -> str:
        """Return the last 40 lines of each process."""
        logs = {
            file.stem: file.read_text().splitlines()[-40:]
            for file in sorted(self.folder.glob("*.log"))
        }
        return "\n".join(
            f"{name}: {line}" for name, lines in logs.items() for line in lines
        )


@dataclass(frozen=True)
class Kustomization:
    """The Kustomization of a repository. It has the name of the namespace into which it deploys."""

    flux: Flux
    namespace: KubeNamespace
    repository: GitRepository

    @property
    def name(self) -> str:
        """The name of the Kustomization and of its GitRepository."""
        return self.namespace.name

    def create(self, **spec: Any) -> None:
        """Apply GitRepository and Kustomization, which waits for the objects that it has applied."""
        usual = {
            "sourceRef": {"kind": "GitRepository", "name": self.name},
            "path": ".",
            "prune": True,
            "wait": True,
        }
        times = {"interval": "10s", "retryInterval": "5s", "timeout": "2m"}
        more = {"targetNamespace": self.namespace.name, **times, **usual, **spec}
        kustomization = self.flux.manifest(
            "kustomize", "v1", "Kustomization", self.name, more
        )
        self.flux.kube.apply([self.flux.source(self.repository), kustomization])

    def commit(self, files: Object) -> str:
        """Commit to its repository and ask for a fetch; return the commit."""
        return self.flux.commit(self.repository, files)

    @property
    def status(self) -> Object:
        """Its status; empty if there is none."""
        status: Object = self.flux.objects.get("kustomization", self.name).get(
            "status", {}
        )
        return status

    def failures(self, commit: str) -> int:
        """Return how often the health check of a commit has failed, by its own history."""
        failed = [
            snapshot
            for snapshot in self.status.get("history", ())
            if snapshot["lastReconciledStatus"] == "HealthCheckFailed"
        ]
        return sum(
            snapshot["totalReconciliations"]
            for snapshot in failed
            if snapshot["metadata"]["revision"].endswith(commit)
        )

    @property
    def ready(self) -> Object:
        """Its condition Ready."""
        return self.flux.ready("kustomization", self.name)

    def wait_ready(self, status: str, reason: str, seconds: float = 120) -> str:
        """Wait for status and reason of Ready, and return its message; raises TimedOut with `describe`."""

        def reached() -> bool:
            return (self.ready.get("status"), self.ready.get("reason")) == (
                status,
                reason,
            )

        until(reached, seconds, self.describe)
        return str(self.ready["message"])

    def wait_failed(self, message: str, seconds: float = 100) -> str:
        """Wait until a health check has failed with a message that contains the text; return the message.

        The limit is shorter than the usual timeout of a Kustomization here, so a failure by timeout is none in time.
        """

        def failed() -> bool:
            return (
                self.ready.get("reason") == "HealthCheckFailed"
                and message in self.ready["message"]
            )

        until(failed, seconds, self.describe)
        return str(self.ready["message"])

    def pipeline(self, name: str) -> PipelineDriver:
        """Return the driver of a pipeline in its namespace."""
        return PipelineDriver(self.namespace, name)

    def delete(self) -> None:
        """Delete the Kustomization and what it has applied."""
        self.flux.objects.run(
            "delete",
            "kustomization,gitrepository",
            self.name,
            "--ignore-not-found",
            timeout=120,
        )

    def describe(self) -> str:
        """Return the status, the objects of the namespace and Flux' logs, for failure messages."""
        objects = self.namespace.run("get", "ft,pods,jobs,pvc,events")
        return f"{json.dumps(self.status, indent=1)}\n{objects}\n{self.flux.logs()}"


@contextmanager
def running_flux(kube: Kube, folder: Path) -> Iterator[Flux]:
    """Install Flux' CRDs in a cluster, and run its controllers until the end of the context."""
    _install(kube)
    artifacts = f"127.0.0.1:{servers.free_port()}"
    storage = [
        "--storage-path",
        str(folder / "storage"),
        "--storage-addr",
        artifacts,
        "--storage-adv-addr",
        artifacts,
    ]
    more = {"source-controller": storage, "kustomize-controller": [RECOMMENDED]}
    (folder / "storage").mkdir()
    with ExitStack() as stack:
        git = stack.enter_context(running_git_server(folder / "git"))
        for name in CONTROLLERS:
            health = servers.free_port()
            addresses = (
                f"--health-addr=127.0.0.1:{health}",
                f"--metrics-addr=127.0.0.1:{servers.free_port()}",
            )
            usual = (*addresses, "--events-addr=", "--requeue-dependency=2s")
            command = [programs.program(name), *usual, *more.get(name, ())]
            environment = _environment(kube, folder, name)
            stack.enter_context(
                servers.running(
                    command, health, environment, log=folder / f"{name}.log"
                )
            )
        yield Flux(kube, folder, git)


def _environment(kube: Kube, folder: Path, name: str) -> dict[str, str]:
    own = {variable: str(folder / name / variable) for variable in ("HOME", "TMPDIR")}
    for path in own.values():
        Path(path).mkdir(parents=True)
    return {**own, "KUBECONFIG": str(kube.kubeconfig), "RUNTIME_NAMESPACE": NAMESPACE}


def _install(kube: Kube) -> None:
    files = [
        file
        for name in CONTROLLERS
        for file in (programs.source(name) / "config/crd/bases").glob("*.yaml")
    ]
    for file in files:
        kube.apply(file.read_text())
    wait_until_established(
        kube, *(yaml.safe_load(file.read_text())["metadata"]["name"] for file in files)
    )
    kube.apply(
        [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}]
    )
