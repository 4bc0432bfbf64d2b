"""What the watches told: the operator's memory between two looks, which may be lost at any time.

Only pods that are gone are worth more than a cache: their exit code and last words are nowhere else.
Lists are read now and then to find what a watch missed, and take a while: what is told meanwhile is newer.
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
Place = tuple[str, str]
"""Namespace and name."""
PIPELINES = "finetunepipelines"
JOB_NAME = "batch.kubernetes.io/job-name"
_LONG = frozenset({"template", "initContainers", "ephemeralContainers", "volumes", "affinity", "tolerations"})
"""What is long in the spec of a Job, a Deployment or a pod, and read by nobody here."""
_OF_CONTAINERS = ("name", "image", "ports")


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
    _news: set[tuple[str, Place]] | None = None
    """Kind and place of what was noted since lists are being read; None: none are."""

    @property
    def note(self) -> dict[str, Callable[..., Key | None]]:
        """Give, by kind, the one who writes it down."""
        return {
            PIPELINES: self.note_pipeline,
            "jobs": self.note_job,
            "pods": self.note_pod,
            "deployments": self.note_deployment,
            "services": self.note_service,
        }

    def note_job(self, job: Object, *, gone: bool = False) -> Key | None:
        """Write down a Job, and give its pipeline."""
        return self._noted("jobs", self.jobs, job, gone=gone)

    def note_deployment(self, deployment: Object, *, gone: bool = False) -> Key | None:
        """Write down a server's Deployment, and give its pipeline."""
        return self._noted("deployments", self.deployments, deployment, gone=gone)

    def note_service(self, service: Object, *, gone: bool = False) -> Key | None:
        """Write down a Service, and give its pipeline."""
        return self._noted("services", self.services, service, gone=gone)

    def _noted(self, kind: str, kept: dict[Place, Object], found: Object, *, gone: bool) -> Key | None:
        self._heard(kind, found)
        if gone:
            kept.pop(_place(found), None)
        else:
            kept[_place(found)] = _short(found)
        return pipeline_of(found)

    def _heard(self, kind: str, found: Object) -> None:
        if self._news is not None:
            self._news.add((kind, _place(found)))

    def note_pod(self, pod: Object, *, gone: bool = False) -> Key | None:
        """Write down a pod, and give its pipeline; of two pods of one Job the younger counts.

        One that nobody made for the attempt, whatever its labels, is none of ours: pods are asked, and believed.
        """
        self._heard("pods", pod)
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
            self.pods[place] = _with_its_end(known, Pod(_short(pod), gone))
        return pipeline_of(pod)

    def _note_server_pod(self, place: Place, pod: Object, *, gone: bool) -> None:
        pods = {uid: one for uid, one in self.server_pods.get(place, {}).items() if uid != pod["metadata"]["uid"]}
        if not gone:
            pods[pod["metadata"]["uid"]] = Pod(_short(pod))
        self.server_pods[place] = pods
        if not pods:
            del self.server_pods[place]

    def note_pipeline(self, pipeline: Object, *, gone: bool = False) -> Key:
        """Write down a pipeline; one that is gone is forgotten with all that was known of it."""
        self._heard(PIPELINES, pipeline)
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

    def begin(self) -> None:
        """Remember what is noted from here on, until `sweep`: the lists that are read now are older."""
        self._news = set()

    def sweep(self, within: str | None = None, /, **lists: Iterable[Object]) -> set[Key]:
        """Compare with whole lists, by kind: take over what is there, drop what is not. Gives every pipeline.

        Lists of one namespace say nothing of what is elsewhere.
        """
        news, self._news = self._news or set(), None
        for kind, note in self.note.items():
            listed = {_place(one): one for one in lists.get(kind, ())}
            for one in self._all(kind, within):
                if _place(one) not in listed and (kind, _place(one)) not in news:
                    note(one, gone=True)
            for place, one in listed.items():
                if (kind, place) not in news:
                    note(one)
        self.pods = {at: pod for at, pod in self.pods.items() if not pod.gone or pipeline_of(pod.raw) in self.pipelines}
        return {key for key in self.pipelines if within in {None, key.namespace}}

    def _all(self, kind: str, within: str | None) -> list[Object]:
        kept: dict[str, Iterable[Object]] = {
            PIPELINES: self.pipelines.values(),
            "jobs": self.jobs.values(),
            "deployments": self.deployments.values(),
            "services": self.services.values(),
            "pods": (pod.raw for pod in self.all_pods()),
        }
        return [one for one in kept[kind] if within in {None, one["metadata"]["namespace"]}]


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


def _with_its_end(known: Pod | None, told: Pod) -> Pod:
    """Keep how a pod ended: no process comes back, so that a view without its end is an older one."""
    if known is None or known.raw["metadata"]["uid"] != told.raw["metadata"]["uid"]:
        return told
    older = any(had and not has for had, has in zip(_end_of(known.raw), _end_of(told.raw), strict=True))
    return Pod(known.raw if older else told.raw, known.gone or told.gone)


def _end_of(pod: Object) -> tuple[bool, bool]:
    seen = Pod(pod)
    return seen.exit_code is not None, seen.over


def _place(found: Object) -> Place:
    return found["metadata"]["namespace"], found["metadata"]["name"]


def _age(pod: Object) -> str:
    return str(pod["metadata"].get("creationTimestamp") or "")


def _trimmed(found: Object) -> Object:
    """Leave out what others note on an object for themselves."""
    meta = {name: value for name, value in found["metadata"].items() if name != "managedFields"}
    if notes := meta.get("annotations"):
        meta["annotations"] = {name: value for name, value in notes.items() if name.startswith(f"{GROUP}/")}
    return {**found, "metadata": meta}


def _short(found: Object) -> Object:
    """Keep what is read of a child: every attempt has a Job and a pod, which hold its whole config."""
    trimmed, spec = _trimmed(found), found.get("spec")
    if spec is None:
        return trimmed
    kept = {name: value for name, value in spec.items() if name not in _LONG}
    if containers := spec.get("containers"):
        kept["containers"] = [_container(one) for one in containers]
    return {**trimmed, "spec": kept}


def _container(found: Object) -> Object:
    kept = {name: found[name] for name in _OF_CONTAINERS if name in found}
    return {**kept, "env": [one for one in found.get("env") or [] if one["name"] == METRICS_PORT]}
