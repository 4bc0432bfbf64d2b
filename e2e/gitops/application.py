"""An Application of Argo CD whose source is a Git repository on this machine."""

import itertools
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import yaml

from e2e.gitops.argo_cd import EXAMPLES, ArgoCD
from e2e.gitops.git_repository import BRANCH, GitRepository
from e2e.pipelines import chart
from e2e.pipelines.driver import PipelineDriver, pipeline
from testcluster.errors import TimedOut
from testcluster.kube_namespace import KubeNamespace, until

Object = dict[str, Any]
REFRESH = "argocd.argoproj.io/refresh"
CRD = "finetunepipelines.finetune.dev"


def examples(name: str) -> list[Object]:
    """Return the manifests of a file in deploy/argocd/examples."""
    return list(
        yaml.safe_load_all((EXAMPLES / "examples" / f"{name}.yaml").read_text())
    )


def example(name: str) -> Object:
    """Return the only manifest of a file in deploy/argocd/examples."""
    [manifest] = examples(name)
    return manifest


def application_set(repository: GitRepository, namespace: KubeNamespace) -> Object:
    """Return the example's ApplicationSet of a repository, whose Applications deploy into the namespace."""
    manifest = example("application-set")
    spec = manifest["spec"]
    for source in (spec["generators"][0]["git"], spec["template"]["spec"]["source"]):
        source["repoURL"] = repository.url
    spec["template"]["spec"]["destination"]["namespace"] = namespace.name
    return manifest


def template_with_trigger(kubectl_image: str) -> dict[str, Object]:
    """Return the manifests of that example by kind, with scripted stages and runs that expire after 5 s."""
    manifests = {
        manifest["kind"]: manifest for manifest in examples("template-with-trigger")
    }
    data = manifests["ConfigMap"]["data"]
    template = yaml.safe_load(data["pipeline.yaml"])
    scripted = pipeline("unused", workspace=template["spec"]["workspace"])["spec"]
    template["spec"] = {
        **scripted,
        "ttlSecondsAfterFinished": 5,
        "whenExpired": template["spec"]["whenExpired"],
    }
    data["pipeline.yaml"] = yaml.safe_dump(template)
    pods = manifests["CronJob"]["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    pods["containers"][0]["image"] = kubectl_image
    return manifests


@dataclass(frozen=True)
class Application:
    """The Application of a repository. It has the name of the namespace into which it deploys."""

    argo_cd: ArgoCD
    namespace: KubeNamespace
    repository: GitRepository

    @property
    def name(self) -> str:
        """The name of the Application."""
        return self.namespace.name

    def create(
        self,
        options: tuple[str, ...] = (),
        annotations: Mapping[str, str] | None = None,
        retry: Object | None = None,
    ) -> None:
        """Apply the Application of deploy/argocd/examples for this repository; `options` are its syncOptions.

        `retry` replaces the example's, with which Argo CD retries a failed sync up to five times.
        """
        manifest = example("application")
        manifest["metadata"] |= {
            "name": self.name,
            "annotations": dict(annotations or {}),
        }
        spec = manifest["spec"]
        spec["source"] |= {
            "repoURL": self.repository.url,
            "targetRevision": BRANCH,
            "path": ".",
        }
        spec["destination"]["namespace"] = self.namespace.name
        spec["syncPolicy"]["syncOptions"] = list(options)
        if retry is not None:
            spec["syncPolicy"]["retry"] = retry
        self.argo_cd.kube.apply([manifest])

    def commit(self, files: Mapping[str, Any]) -> str:
        """Commit to the repository and ask for a refresh, as a webhook does; return the commit."""
        commit = self.repository.commit(files)
        if self.object:
            self.refresh()
        return commit

    def refresh(self, kind: str = "normal") -> None:
        """Compare with Git now; `hard` also renders the manifests anew."""
        self.argo_cd.objects.run(
            "annotate", "application", self.name, f"{REFRESH}={kind}", "--overwrite"
        )
        until(
            lambda: REFRESH not in self.object["metadata"].get("annotations", {}),
            90,
            self.describe,
        )

    @property
    def object(self) -> Object:
        """The Application; empty if there is none."""
        return self.argo_cd.objects.get("application", self.name)

    @property
    def status(self) -> Object:
        """Its status; empty before the first comparison."""
        status: Object = self.object.get("status", {})
        return status

    @property
    def state(self) -> tuple[str, str]:
        """Its sync and its health."""
        status = self.status
        return status.get("sync", {}).get("status", ""), status.get("health", {}).get(
            "status", ""
        )

    @property
    def states(self) -> list[tuple[str, str]]:
        """Every state that it had, in order."""
        return self.argo_cd.states(self.name)

    @property
    def states_since_sync(self) -> list[tuple[str, str]]:
        """Its states from the first one in which it was Synced."""
        return list(
            itertools.dropwhile(lambda state: state[0] != "Synced", self.states)
        )

    @property
    def syncs(self) -> set[str]:
        """Its syncs from the first time it was Synced."""
        return {sync for sync, _ in self.states_since_sync}

    @property
    def operation(self) -> Object:
        """The state of its last sync operation."""
        operation: Object = self.status.get("operationState", {})
        return operation

    def has_compared(self, commit: str) -> bool:
        """Return whether the cluster was last compared with a commit."""
        return bool(self.status.get("sync", {}).get("revision") == commit)

    def has_kind(self, kind: str) -> bool:
        """Return whether it has a resource of a kind."""
        return any(
            resource["kind"] == kind for resource in self.status.get("resources", ())
        )

    def health(self, pipeline: str) -> Object:
        """Return health and message of a pipeline; empty if the Application does not have it."""
        for resource in self.status.get("resources", ()):
            if (resource["kind"], resource["name"]) == ("FineTunePipeline", pipeline):
                return dict(resource.get("health", {}))
        return {}

    def wait(self, sync: str, health: str, seconds: float = 120) -> None:
        """Wait for a sync and a health; raises TimedOut with `describe`."""
        until(lambda: self.state == (sync, health), seconds, self.describe)

    def wait_recorded(self, sync: str, health: str) -> None:
        """Wait until the last of `states` is this pair: another process records them."""
        until(lambda: self.states[-1:] == [(sync, health)], 30, self.describe)

    def wait_health(self, pipeline: str, health: str, seconds: float = 120) -> str:
        """Wait for the health of a pipeline, and return its message; raises TimedOut with `describe`."""
        until(
            lambda: self.health(pipeline).get("status") == health,
            seconds,
            self.describe,
        )
        return str(self.health(pipeline).get("message", ""))

    def pipeline(self, name: str) -> PipelineDriver:
        """Return the driver of a pipeline in its namespace."""
        return PipelineDriver(self.namespace, name)

    @property
    def pipelines(self) -> list[Object]:
        """The metadata of the pipelines in its namespace, also of hooks."""
        pipelines = self.argo_cd.kube.json(
            "get", "ft", "--namespace", self.namespace.name
        )
        return [pipeline["metadata"] for pipeline in pipelines["items"]]

    @property
    def generations(self) -> dict[str, int]:
        """The generation of each of these pipelines, by name."""
        return {metadata["name"]: metadata["generation"] for metadata in self.pipelines}

    @property
    def installed(self) -> tuple[str, str, str]:
        """The CRD's uid and the summary of its first column, and the option of the operator's grace period."""
        crd = self.argo_cd.kube.json("get", "crd", CRD)
        summary = crd["spec"]["versions"][0]["additionalPrinterColumns"][0][
            "description"
        ]
        pods = self.namespace.get("deployment", chart.RELEASE)["spec"]["template"][
            "spec"
        ]
        [grace] = [
            argument
            for argument in pods["containers"][0]["args"]
            if "--grace-seconds" in argument
        ]
        return crd["metadata"]["uid"], summary, grace

    def actions(self, pipeline: str) -> set[str]:
        """Return the actions that Argo CD offers for a pipeline."""
        listed = self.argo_cd.command(
            "app", "actions", "list", self.name, *_selected(pipeline), "-o", "json"
        )
        return {
            action["Action"]
            for action in json.loads(listed) or ()
            if not action["Disabled"]
        }

    def act(self, action: str, name: str, kind: str = "FineTunePipeline") -> None:
        """Run an action of a pipeline, or of another resource, as its button does."""
        self.argo_cd.command(
            "app", "actions", "run", self.name, action, *_selected(name, kind)
        )

    def delete(self) -> None:
        """Delete the Application and its resources, and wait until they are gone.

        Argo CD deletes nothing while a sync operation runs or is retried.
        """
        if self.operation.get("phase") == "Running":
            with suppress(TimedOut):  # it may have ended since
                self.argo_cd.command("app", "terminate-op", self.name)
        self.argo_cd.objects.run(
            "delete", "application", self.name, "--ignore-not-found", timeout=120
        )

    def describe(self) -> str:
        """Return the states, the status, the objects of the namespace and Argo CD's log, for failure messages."""
        objects = self.namespace.run("get", "ft,pods,jobs,pvc,configmaps,events")
        status = json.dumps(self.status, indent=1)[:8000]
        return f"{self.states}\n{status}\n{objects}\n{self.argo_cd.logs()}"


def install(
    operator: Application,
    options: tuple[str, ...] = (),
    annotations: Mapping[str, str] | None = None,
    **values: Any,
) -> None:
    """Apply the example's Application of the chart with the cluster's images, more syncOptions and more values."""
    manifest = example("operator")
    spec = manifest["spec"]
    spec["source"]["repoURL"] = operator.repository.url
    spec["source"]["helm"]["releaseName"] = chart.RELEASE
    images: Object = {"image": {"tag": "dev"}, "trainer": {"image": {"tag": "dev"}}}
    spec["source"]["helm"]["valuesObject"] = {**images, **values}
    spec["syncPolicy"]["syncOptions"] += options
    manifest["metadata"] |= {
        "name": operator.name,
        "annotations": dict(annotations or {}),
    }
    operator.argo_cd.kube.apply([manifest])


def _selected(name: str, kind: str = "FineTunePipeline") -> tuple[str, ...]:
    return "--kind", kind, "--resource-name", name
