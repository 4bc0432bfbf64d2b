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
NamespacedName = tuple[str, str]
"""Namespace and name."""
PIPELINES = "finetunepipelines"
JOB_NAME = "batch.kubernetes.io/job-name"
_UNREAD_FIELDS = frozenset({"template", "initContainers", "ephemeralContainers", "volumes", "affinity", "tolerations"})
"""What is long in the spec of a Job, a Deployment or a pod, and read by nobody here."""
_CONTAINER_FIELDS = ("name", "image", "ports")


@dataclass
class ResourceCache:
    """Jobs, pods by the Job they are of, and pipelines."""

    jobs: dict[NamespacedName, Object] = field(default_factory=dict)
    deployments: dict[NamespacedName, Object] = field(default_factory=dict)
    services: dict[NamespacedName, Object] = field(default_factory=dict)
    pods: dict[NamespacedName, Pod] = field(default_factory=dict)
    """Of Jobs: one each."""
    server_pods: dict[NamespacedName, dict[str, Pod]] = field(default_factory=dict)
    """Of servers that are there, by their attempt and their uid."""
    pipelines: dict[Key, Object] = field(default_factory=dict)
    _updated_during_relist: set[tuple[str, NamespacedName]] | None = None
    """Kind and place of what was noted since lists are being read; None: none are."""

    @property
    def handlers(self) -> dict[str, Callable[..., Key | None]]:
        """Give, by kind, the one who writes it down."""
        return {
            PIPELINES: self.update_pipeline,
            "jobs": self.update_job,
            "pods": self.update_pod,
            "deployments": self.update_deployment,
            "services": self.update_service,
        }

    def update_job(self, job: Object, *, gone: bool = False) -> Key | None:
        """Write down a Job, and give its pipeline."""
        return self._update("jobs", self.jobs, job, gone=gone)

    def update_deployment(self, deployment: Object, *, gone: bool = False) -> Key | None:
        """Write down a server's Deployment, and give its pipeline."""
        return self._update("deployments", self.deployments, deployment, gone=gone)

    def update_service(self, service: Object, *, gone: bool = False) -> Key | None:
        """Write down a Service, and give its pipeline."""
        return self._update("services", self.services, service, gone=gone)

    def _update(self, kind: str, kept: dict[NamespacedName, Object], found: Object, *, gone: bool) -> Key | None:
        self._mark_updated(kind, found)
        if gone:
            kept.pop(_namespaced_name(found), None)
        else:
            kept[_namespaced_name(found)] = _strip_spec(found)
        return owner_key(found)

    def _mark_updated(self, kind: str, found: Object) -> None:
        if self._updated_during_relist is not None:
            self._updated_during_relist.add((kind, _namespaced_name(found)))

    def update_pod(self, pod: Object, *, gone: bool = False) -> Key | None:
        """Write down a pod, and give its pipeline; of two pods of one Job the younger counts.

        One that nobody made for the attempt, whatever its labels, is none of ours: pods are asked, and believed.
        """
        self._mark_updated("pods", pod)
        labels, namespace = pod["metadata"].get("labels", {}), pod["metadata"]["namespace"]
        if (server := labels.get(SERVER)) and _controller_name(pod, "ReplicaSet").startswith(f"{server}-"):
            self._update_server_pod((namespace, server), pod, gone=gone)
            return owner_key(pod)
        job = labels.get(JOB_NAME)
        if not job or _controller_name(pod, "Job") != job:
            return None
        place = (namespace, job)
        known = self.pods.get(place)
        if known is None or _created_at(known.raw) <= _created_at(pod):
            self.pods[place] = _keep_terminal_state(known, Pod(_strip_spec(pod), gone))
        return owner_key(pod)

    def _update_server_pod(self, place: NamespacedName, pod: Object, *, gone: bool) -> None:
        pods = {uid: one for uid, one in self.server_pods.get(place, {}).items() if uid != pod["metadata"]["uid"]}
        if not gone:
            pods[pod["metadata"]["uid"]] = Pod(_strip_spec(pod))
        self.server_pods[place] = pods
        if not pods:
            del self.server_pods[place]

    def update_pipeline(self, pipeline: Object, *, gone: bool = False) -> Key:
        """Write down a pipeline; one that is gone is forgotten with all that was known of it."""
        self._mark_updated(PIPELINES, pipeline)
        key = Key(*_namespaced_name(pipeline))
        known = self.pipelines.get(key, pipeline)
        if gone and known["metadata"].get("uid") == pipeline["metadata"].get("uid"):
            self.forget(key)
        elif not gone:
            self.pipelines[key] = _strip_metadata(pipeline)
        return key

    def phases(self) -> Counter[str]:
        """Count the pipelines of each phase."""
        return Counter(str((one.get("status") or {}).get("phase") or "Pending") for one in self.pipelines.values())

    def forget(self, key: Key) -> None:
        """Forget a pipeline and what was its."""
        self.pipelines.pop(key, None)
        for kept in (self.jobs, self.deployments, self.services):
            for place in [place for place, child in kept.items() if owner_key(child) == key]:
                del kept[place]
        self.pods = {place: pod for place, pod in self.pods.items() if owner_key(pod.raw) != key}
        for place in [place for place, pods in self.server_pods.items() if _owner_key_of_any(pods) == key]:
            del self.server_pods[place]

    def all_pods(self) -> Iterator[Pod]:
        """Give Jobs' pods and servers'."""
        yield from self.pods.values()
        for pods in self.server_pods.values():
            yield from pods.values()

    def begin_relist(self) -> None:
        """Remember what is noted from here on, until `sweep`: the lists that are read now are older."""
        self._updated_during_relist = set()

    def replace(self, within: str | None = None, /, **lists: Iterable[Object]) -> set[Key]:
        """Compare with whole lists, by kind: take over what is there, drop what is not. Gives every pipeline.

        Lists of one namespace say nothing of what is elsewhere.
        """
        news, self._updated_during_relist = self._updated_during_relist or set(), None
        for kind, note in self.handlers.items():
            listed = {_namespaced_name(one): one for one in lists.get(kind, ())}
            for one in self._all(kind, within):
                if _namespaced_name(one) not in listed and (kind, _namespaced_name(one)) not in news:
                    note(one, gone=True)
            for place, one in listed.items():
                if (kind, place) not in news:
                    note(one)
        self.pods = {at: pod for at, pod in self.pods.items() if not pod.gone or owner_key(pod.raw) in self.pipelines}
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


def owner_key(child: Object) -> Key | None:
    """Name the pipeline that a Job or pod was made for."""
    name = child["metadata"].get("annotations", {}).get(PIPELINE_NAME)
    return Key(child["metadata"]["namespace"], name) if name else None


def _owner_key_of_any(pods: dict[str, Pod]) -> Key | None:
    return next((owner_key(pod.raw) for pod in pods.values()), None)


def _controller_name(pod: Object, kind: str) -> str:
    """Name the controller of this kind that made a pod."""
    makers = [ref for ref in pod["metadata"].get("ownerReferences", []) if ref.get("controller")]
    return next((str(ref["name"]) for ref in makers if ref["kind"] == kind), "")


def _keep_terminal_state(known: Pod | None, told: Pod) -> Pod:
    """Keep how a pod ended: no process comes back, so that a view without its end is an older one."""
    if known is None or known.raw["metadata"]["uid"] != told.raw["metadata"]["uid"]:
        return told
    older = any(had and not has for had, has in zip(_terminal_state(known.raw), _terminal_state(told.raw), strict=True))
    return Pod(known.raw if older else told.raw, known.gone or told.gone)


def _terminal_state(pod: Object) -> tuple[bool, bool]:
    seen = Pod(pod)
    return seen.exit_code is not None, seen.finished


def _namespaced_name(found: Object) -> NamespacedName:
    return found["metadata"]["namespace"], found["metadata"]["name"]


def _created_at(pod: Object) -> str:
    return str(pod["metadata"].get("creationTimestamp") or "")


def _strip_metadata(found: Object) -> Object:
    """Leave out what others note on an object for themselves."""
    meta = {name: value for name, value in found["metadata"].items() if name != "managedFields"}
    if notes := meta.get("annotations"):
        meta["annotations"] = {name: value for name, value in notes.items() if name.startswith(f"{GROUP}/")}
    return {**found, "metadata": meta}


def _strip_spec(found: Object) -> Object:
    """Keep what is read of a child: every attempt has a Job and a pod, which hold its whole config."""
    trimmed, spec = _strip_metadata(found), found.get("spec")
    if spec is None:
        return trimmed
    kept = {name: value for name, value in spec.items() if name not in _UNREAD_FIELDS}
    if containers := spec.get("containers"):
        kept["containers"] = [_strip_container(one) for one in containers]
    return {**trimmed, "spec": kept}


def _strip_container(found: Object) -> Object:
    kept = {name: found[name] for name in _CONTAINER_FIELDS if name in found}
    return {**kept, "env": [one for one in found.get("env") or [] if one["name"] == METRICS_PORT]}
