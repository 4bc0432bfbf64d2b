"""A cache of the objects that watches deliver, which may be lost at any time.

Only deleted pods are more than a cache: no API returns their exit code and termination message any more.
The informers relist to find what a watch missed. A relist takes a while, so events received meanwhile are newer.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from finetune_operator.api.group import GROUP
from finetune_operator.core.metadata import SERVER
from finetune_operator.core.pipeline import Key
from finetune_operator.kubernetes.resources.job import PIPELINE_NAME
from finetune_operator.kubernetes.translate.pod import Pod
from finetune_trainer.contract.environment import METRICS_PORT

Object = dict[str, Any]
NamespacedName = tuple[str, str]
"""Namespace and name of an object."""
PIPELINES = "finetunepipelines"
JOB_NAME = "batch.kubernetes.io/job-name"
_UNREAD_FIELDS = frozenset({"template", "initContainers", "ephemeralContainers", "volumes", "affinity", "tolerations"})
"""Long fields in the spec of a Job, a Deployment or a pod that the operator does not read."""
_CONTAINER_FIELDS = ("name", "image", "ports")


@dataclass
class ResourceCache:
    """Pipelines and their Jobs, Deployments, Services and pods."""

    jobs: dict[NamespacedName, Object] = field(default_factory=dict)
    deployments: dict[NamespacedName, Object] = field(default_factory=dict)
    services: dict[NamespacedName, Object] = field(default_factory=dict)
    pods: dict[NamespacedName, Pod] = field(default_factory=dict)
    """By Job: one pod each."""
    server_pods: dict[NamespacedName, dict[str, Pod]] = field(default_factory=dict)
    """By attempt, then by uid: the pods of servers that exist."""
    pipelines: dict[Key, Object] = field(default_factory=dict)
    _updated_during_relist: set[tuple[str, NamespacedName]] | None = None
    """Kind and name of the objects updated since the relist began; None: no relist is running."""

    @property
    def handlers(self) -> dict[str, Callable[..., Key | None]]:
        """The update method of each kind."""
        return {
            PIPELINES: self.update_pipeline,
            "jobs": self.update_job,
            "pods": self.update_pod,
            "deployments": self.update_deployment,
            "services": self.update_service,
        }

    def update_job(self, job: Object, *, gone: bool = False) -> Key | None:
        """Store a Job, or drop it if it is gone; return its pipeline."""
        return self._update("jobs", self.jobs, job, gone=gone)

    def update_deployment(self, deployment: Object, *, gone: bool = False) -> Key | None:
        """Store a server's Deployment, or drop it if it is gone; return its pipeline."""
        return self._update("deployments", self.deployments, deployment, gone=gone)

    def update_service(self, service: Object, *, gone: bool = False) -> Key | None:
        """Store a Service, or drop it if it is gone; return its pipeline."""
        return self._update("services", self.services, service, gone=gone)

    def _update(self, kind: str, stored: dict[NamespacedName, Object], found: Object, *, gone: bool) -> Key | None:
        self._mark_updated(kind, found)
        if gone:
            stored.pop(_namespaced_name(found), None)
        else:
            stored[_namespaced_name(found)] = _strip_spec(found)
        return owner_key(found)

    def _mark_updated(self, kind: str, found: Object) -> None:
        if self._updated_during_relist is not None:
            self._updated_during_relist.add((kind, _namespaced_name(found)))

    def update_pod(self, pod: Object, *, gone: bool = False) -> Key | None:
        """Store a pod and return its pipeline; of two pods of one Job the younger counts.

        A pod that was not created by the attempt's Job or ReplicaSet is ignored, whatever its labels. The operator
        sends requests to pods and believes their responses.
        """
        self._mark_updated("pods", pod)
        labels, namespace = pod["metadata"].get("labels", {}), pod["metadata"]["namespace"]
        if (server := labels.get(SERVER)) and _controller_name(pod, "ReplicaSet").startswith(f"{server}-"):
            self._update_server_pod((namespace, server), pod, gone=gone)
            return owner_key(pod)
        job = labels.get(JOB_NAME)
        if not job or _controller_name(pod, "Job") != job:
            return None
        name = (namespace, job)
        known = self.pods.get(name)
        if known is None or _created_at(known.raw) <= _created_at(pod):
            self.pods[name] = _keep_terminal_state(known, Pod(_strip_spec(pod), gone))
        return owner_key(pod)

    def _update_server_pod(self, server: NamespacedName, pod: Object, *, gone: bool) -> None:
        pods = {uid: one for uid, one in self.server_pods.get(server, {}).items() if uid != pod["metadata"]["uid"]}
        if not gone:
            pods[pod["metadata"]["uid"]] = Pod(_strip_spec(pod))
        self.server_pods[server] = pods
        if not pods:
            del self.server_pods[server]

    def update_pipeline(self, pipeline: Object, *, gone: bool = False) -> Key:
        """Store a pipeline, or drop it with all its children if it is gone; return its key.

        The deletion of an earlier pipeline of the same name, with another uid, is ignored.
        """
        self._mark_updated(PIPELINES, pipeline)
        key = Key(*_namespaced_name(pipeline))
        known = self.pipelines.get(key, pipeline)
        if gone and known["metadata"].get("uid") == pipeline["metadata"].get("uid"):
            self.forget(key)
        elif not gone:
            self.pipelines[key] = _strip_metadata(pipeline)
        return key

    def phases(self) -> Counter[str]:
        """Return the number of pipelines in each phase."""
        return Counter(str((one.get("status") or {}).get("phase") or "Pending") for one in self.pipelines.values())

    def forget(self, key: Key) -> None:
        """Drop a pipeline and its children."""
        self.pipelines.pop(key, None)
        for stored in (self.jobs, self.deployments, self.services):
            for name in [name for name, child in stored.items() if owner_key(child) == key]:
                del stored[name]
        self.pods = {name: pod for name, pod in self.pods.items() if owner_key(pod.raw) != key}
        for name in [name for name, pods in self.server_pods.items() if _owner_key_of_any(pods) == key]:
            del self.server_pods[name]

    def all_pods(self) -> Iterator[Pod]:
        """Yield the pods of Jobs and of servers."""
        yield from self.pods.values()
        for pods in self.server_pods.values():
            yield from pods.values()

    def begin_relist(self) -> None:
        """Record which objects are updated from now until `replace`: the lists that are read now are older."""
        self._updated_during_relist = set()

    def replace(self, within: str | None = None, /, **lists: Iterable[Object]) -> set[Key]:
        """Replace the objects of each kind by a complete list; return every pipeline.

        `within` limits the lists to one namespace: objects of other namespaces are kept. Objects that were updated
        during the relist are kept, too.
        """
        updated, self._updated_during_relist = self._updated_during_relist or set(), None
        for kind, update in self.handlers.items():
            listed = {_namespaced_name(one): one for one in lists.get(kind, ())}
            for one in self._all(kind, within):
                if _namespaced_name(one) not in listed and (kind, _namespaced_name(one)) not in updated:
                    update(one, gone=True)
            for name, one in listed.items():
                if (kind, name) not in updated:
                    update(one)
        self.pods = {
            name: pod for name, pod in self.pods.items() if not pod.gone or owner_key(pod.raw) in self.pipelines
        }
        return {key for key in self.pipelines if within in {None, key.namespace}}

    def _all(self, kind: str, within: str | None) -> list[Object]:
        stored: dict[str, Iterable[Object]] = {
            PIPELINES: self.pipelines.values(),
            "jobs": self.jobs.values(),
            "deployments": self.deployments.values(),
            "services": self.services.values(),
            "pods": (pod.raw for pod in self.all_pods()),
        }
        return [one for one in stored[kind] if within in {None, one["metadata"]["namespace"]}]


def owner_key(child: Object) -> Key | None:
    """Return the pipeline that a Job, Deployment, Service or pod was created for."""
    name = child["metadata"].get("annotations", {}).get(PIPELINE_NAME)
    return Key(child["metadata"]["namespace"], name) if name else None


def _owner_key_of_any(pods: dict[str, Pod]) -> Key | None:
    return next((owner_key(pod.raw) for pod in pods.values()), None)


def _controller_name(pod: Object, kind: str) -> str:
    """Return the name of the controller of this kind that created a pod; empty where none did."""
    owners = [ref for ref in pod["metadata"].get("ownerReferences", []) if ref.get("controller")]
    return next((str(ref["name"]) for ref in owners if ref["kind"] == kind), "")


def _keep_terminal_state(known: Pod | None, received: Pod) -> Pod:
    """Return the received pod, or the known one if that has ended and the received one has not.

    A container of an attempt does not restart, so a version without its end is the older one.
    """
    if known is None or known.raw["metadata"]["uid"] != received.raw["metadata"]["uid"]:
        return received
    states = zip(_terminal_state(known.raw), _terminal_state(received.raw), strict=True)
    is_older = any(had and not has for had, has in states)
    return Pod(known.raw if is_older else received.raw, known.gone or received.gone)


def _terminal_state(raw: Object) -> tuple[bool, bool]:
    pod = Pod(raw)
    return pod.exit_code is not None, pod.finished


def _namespaced_name(found: Object) -> NamespacedName:
    return found["metadata"]["namespace"], found["metadata"]["name"]


def _created_at(pod: Object) -> str:
    return str(pod["metadata"].get("creationTimestamp") or "")


def _strip_metadata(found: Object) -> Object:
    """Return the object without managedFields and the annotations of other programs."""
    meta = {name: value for name, value in found["metadata"].items() if name != "managedFields"}
    if annotations := meta.get("annotations"):
        meta["annotations"] = {name: value for name, value in annotations.items() if name.startswith(f"{GROUP}/")}
    return {**found, "metadata": meta}


def _strip_spec(found: Object) -> Object:
    """Return a child without its long fields: each attempt has a Job and a pod, which hold its whole config."""
    stripped, spec = _strip_metadata(found), found.get("spec")
    if spec is None:
        return stripped
    kept = {name: value for name, value in spec.items() if name not in _UNREAD_FIELDS}
    if containers := spec.get("containers"):
        kept["containers"] = [_strip_container(one) for one in containers]
    return {**stripped, "spec": kept}


def _strip_container(found: Object) -> Object:
    kept = {name: found[name] for name in _CONTAINER_FIELDS if name in found}
    return {**kept, "env": [one for one in found.get("env") or [] if one["name"] == METRICS_PORT]}
