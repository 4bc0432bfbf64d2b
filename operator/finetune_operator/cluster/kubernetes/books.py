"""What the watches told: the operator's memory between two looks, which may be lost at any time.

Only pods that are gone are worth more than a cache: their exit code and last words are nowhere else.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from finetune_operator.cluster.kubernetes.job import PIPELINE_NAME
from finetune_operator.cluster.kubernetes.pod import Pod
from finetune_operator.labels import SERVER
from finetune_operator.pipeline import Key

Object = dict[str, Any]
Place = tuple[str, str]
"""Namespace and name."""
JOB_NAME = "batch.kubernetes.io/job-name"
_NOT_KEPT = ("managedFields",)


@dataclass
class Books:
    """Jobs, pods by the Job they are of, and pipelines."""

    jobs: dict[Place, Object] = field(default_factory=dict)
    deployments: dict[Place, Object] = field(default_factory=dict)
    services: dict[Place, Object] = field(default_factory=dict)
    pods: dict[Place, Pod] = field(default_factory=dict)
    """Of Jobs: one each."""
    server_pods: dict[Place, dict[str, Pod]] = field(default_factory=dict)
    """Of servers that are there, by their attempt and their uid."""
    pipelines: dict[Key, Object] = field(default_factory=dict)

    @property
    def note(self) -> dict[str, Callable[..., Key | None]]:
        """Give, by kind, the one who writes it down."""
        return {
            "finetunepipelines": self.note_pipeline,
            "jobs": self.note_job,
            "pods": self.note_pod,
            "deployments": self.note_deployment,
            "services": self.note_service,
        }

    def note_job(self, job: Object, *, gone: bool = False) -> Key | None:
        """Write down a Job, and give its pipeline."""
        return _noted(self.jobs, job, gone=gone)

    def note_deployment(self, deployment: Object, *, gone: bool = False) -> Key | None:
        """Write down a server's Deployment, and give its pipeline."""
        return _noted(self.deployments, deployment, gone=gone)

    def note_service(self, service: Object, *, gone: bool = False) -> Key | None:
        """Write down a Service, and give its pipeline."""
        return _noted(self.services, service, gone=gone)

    def note_pod(self, pod: Object, *, gone: bool = False) -> Key | None:
        """Write down a pod, and give its pipeline; of two pods of one Job the younger counts.

        One that nobody made for the attempt, whatever its labels, is none of ours: pods are asked, and believed.
        """
        labels, namespace = pod["metadata"].get("labels", {}), pod["metadata"]["namespace"]
        if (server := labels.get(SERVER)) and _maker(pod, "ReplicaSet").startswith(f"{server}-"):
            self._note_server_pod((namespace, server), pod, gone=gone)
            return pipeline_of(pod)
        job = labels.get(JOB_NAME)
        if not job or _maker(pod, "Job") != job:
            return None
        place = (namespace, job)
        known = self.pods.get(place)
        if known is None or _age(known.raw) <= _age(pod):
            self.pods[place] = Pod(_trimmed(pod), gone)
        return pipeline_of(pod)

    def _note_server_pod(self, place: Place, pod: Object, *, gone: bool) -> None:
        pods = {uid: one for uid, one in self.server_pods.get(place, {}).items() if uid != pod["metadata"]["uid"]}
        if not gone:
            pods[pod["metadata"]["uid"]] = Pod(_trimmed(pod))
        self.server_pods[place] = pods
        if not pods:
            del self.server_pods[place]

    def note_pipeline(self, pipeline: Object, *, gone: bool = False) -> Key:
        """Write down a pipeline; one that is gone is forgotten with all that was known of it."""
        key = Key(*_place(pipeline))
        known = self.pipelines.get(key, pipeline)
        if gone and known["metadata"].get("uid") == pipeline["metadata"].get("uid"):
            self.forget(key)
        elif not gone:
            self.pipelines[key] = _trimmed(pipeline)
        return key

    def phases(self) -> Counter[str]:
        """Count the pipelines of each phase."""
        return Counter(str((one.get("status") or {}).get("phase") or "Pending") for one in self.pipelines.values())

    def forget(self, key: Key) -> None:
        """Forget a pipeline and what was its."""
        self.pipelines.pop(key, None)
        for kept in (self.jobs, self.deployments, self.services):
            for place in [place for place, child in kept.items() if pipeline_of(child) == key]:
                del kept[place]
        self.pods = {place: pod for place, pod in self.pods.items() if pipeline_of(pod.raw) != key}
        for place in [place for place, pods in self.server_pods.items() if _pipeline_of_any(pods) == key]:
            del self.server_pods[place]

    def all_pods(self) -> Iterator[Pod]:
        """Give Jobs' pods and servers'."""
        yield from self.pods.values()
        for pods in self.server_pods.values():
            yield from pods.values()

    def sweep(self, **lists: Iterable[Object]) -> set[Key]:
        """Compare with whole lists, by kind: take over what is there, drop what is not. Gives every pipeline."""
        fresh = Books()
        for kind, found in lists.items():
            for one in found:
                fresh.note[kind](one)
        lost = {place: Pod(pod.raw, gone=True) for place, pod in self.pods.items() if place not in fresh.pods}
        kept = {place: pod for place, pod in lost.items() if pipeline_of(pod.raw) in fresh.pipelines}
        self.jobs, self.pods, self.pipelines = fresh.jobs, {**kept, **fresh.pods}, fresh.pipelines
        self.deployments, self.services = fresh.deployments, fresh.services
        self.server_pods = fresh.server_pods
        return set(self.pipelines)


def pipeline_of(child: Object) -> Key | None:
    """Name the pipeline that a Job or pod was made for."""
    name = child["metadata"].get("annotations", {}).get(PIPELINE_NAME)
    return Key(child["metadata"]["namespace"], name) if name else None


def _pipeline_of_any(pods: dict[str, Pod]) -> Key | None:
    return next((pipeline_of(pod.raw) for pod in pods.values()), None)


def _maker(pod: Object, kind: str) -> str:
    """Name the controller of this kind that made a pod."""
    makers = [ref for ref in pod["metadata"].get("ownerReferences", []) if ref.get("controller")]
    return next((str(ref["name"]) for ref in makers if ref["kind"] == kind), "")


def _noted(kept: dict[Place, Object], found: Object, *, gone: bool) -> Key | None:
    if gone:
        kept.pop(_place(found), None)
    else:
        kept[_place(found)] = _trimmed(found)
    return pipeline_of(found)


def _place(found: Object) -> Place:
    return found["metadata"]["namespace"], found["metadata"]["name"]


def _age(pod: Object) -> str:
    return str(pod["metadata"].get("creationTimestamp") or "")


def _trimmed(found: Object) -> Object:
    meta = {name: value for name, value in found["metadata"].items() if name not in _NOT_KEPT}
    return {**found, "metadata": meta}
