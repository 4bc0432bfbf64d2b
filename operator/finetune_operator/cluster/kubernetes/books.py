"""What the watches told: the operator's memory between two looks, which may be lost at any time.

Only pods that are gone are worth more than a cache: their exit code and last words are nowhere else.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from finetune_operator.cluster.kubernetes.job import PIPELINE_NAME
from finetune_operator.cluster.kubernetes.pod import Pod
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
    pods: dict[Place, Pod] = field(default_factory=dict)
    pipelines: dict[Key, Object] = field(default_factory=dict)

    def note_job(self, job: Object, *, gone: bool = False) -> Key | None:
        """Write down a Job, and give its pipeline."""
        place = _place(job)
        if gone:
            self.jobs.pop(place, None)
        else:
            self.jobs[place] = _trimmed(job)
        return pipeline_of(job)

    def note_pod(self, pod: Object, *, gone: bool = False) -> Key | None:
        """Write down a pod, and give its pipeline; of two pods of one Job the younger counts."""
        job = pod["metadata"].get("labels", {}).get(JOB_NAME)
        if not job:
            return None
        place = (pod["metadata"]["namespace"], job)
        known = self.pods.get(place)
        if known is None or _age(known.raw) <= _age(pod):
            self.pods[place] = Pod(_trimmed(pod), gone)
        return pipeline_of(pod)

    def note_pipeline(self, pipeline: Object, *, gone: bool = False) -> Key:
        """Write down a pipeline; one that is gone is forgotten with all that was known of it."""
        key = Key(*_place(pipeline))
        if gone:
            self.forget(key)
        else:
            self.pipelines[key] = _trimmed(pipeline)
        return key

    def forget(self, key: Key) -> None:
        """Forget a pipeline and what was its."""
        self.pipelines.pop(key, None)
        self.jobs = {place: job for place, job in self.jobs.items() if pipeline_of(job) != key}
        self.pods = {place: pod for place, pod in self.pods.items() if pipeline_of(pod.raw) != key}

    def sweep(self, jobs: Iterable[Object], pods: Iterable[Object], pipelines: Iterable[Object]) -> set[Key]:
        """Compare with whole lists: take over what is there, drop what is not. Gives every pipeline there is."""
        fresh = Books()
        for job in jobs:
            fresh.note_job(job)
        for pod in pods:
            fresh.note_pod(pod)
        for pipeline in pipelines:
            fresh.note_pipeline(pipeline)
        lost = {place: Pod(pod.raw, gone=True) for place, pod in self.pods.items() if place not in fresh.pods}
        kept = {place: pod for place, pod in lost.items() if pipeline_of(pod.raw) in fresh.pipelines}
        self.jobs, self.pods, self.pipelines = fresh.jobs, {**kept, **fresh.pods}, fresh.pipelines
        return set(self.pipelines)


def pipeline_of(child: Object) -> Key | None:
    """Name the pipeline that a Job or pod was made for."""
    name = child["metadata"].get("annotations", {}).get(PIPELINE_NAME)
    return Key(child["metadata"]["namespace"], name) if name else None


def _place(found: Object) -> Place:
    return found["metadata"]["namespace"], found["metadata"]["name"]


def _age(pod: Object) -> str:
    return str(pod["metadata"].get("creationTimestamp") or "")


def _trimmed(found: Object) -> Object:
    meta = {name: value for name, value in found["metadata"].items() if name not in _NOT_KEPT}
    return {**found, "metadata": meta}
