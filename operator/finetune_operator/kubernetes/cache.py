"""A cache of pipelines and of what belongs to them, which may be lost at any time.

Lists, watches and the answers to the operator's own requests fill it. Only deleted pods are more than a cache: no API
returns their exit code and termination message any more.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from enum import IntEnum
from typing import Any

from finetune_operator.core.metadata import SERVER, service_name
from finetune_operator.core.pipeline import Key, Pipeline
from finetune_operator.kubernetes.cached_pipeline import CachedPipeline, WaitingStage, trim_pipeline
from finetune_operator.kubernetes.resources.claim import WORKSPACE_OF
from finetune_operator.kubernetes.resources.job import PIPELINE_NAME
from finetune_operator.kubernetes.store import (
    Entry,
    NamespacedName,
    Store,
    namespaced_name,
    version_of,
)
from finetune_operator.kubernetes.translate.attempt_pods import completions_of
from finetune_operator.kubernetes.translate.defaults import NAME as DEFAULTS_NAME
from finetune_operator.kubernetes.translate.defaults import NONE, NamespaceDefaults, read_defaults
from finetune_operator.kubernetes.translate.diagnose import STARTING
from finetune_operator.kubernetes.translate.job import is_finished
from finetune_operator.kubernetes.translate.pod import Pod
from finetune_operator.kubernetes.trim import (
    JOB_NAME,
    trim_claim,
    trim_deployment,
    trim_job,
    trim_pod,
    trim_service,
)

Object = dict[str, Any]
PIPELINES, JOBS, PODS, EVENTS = "finetunepipelines", "jobs", "pods", "events"
DEPLOYMENTS, SERVICES, CLAIMS = "deployments", "services", "persistentvolumeclaims"
DEFAULTS = "configmaps"
"""Of all ConfigMaps only those with defaults of their namespace, which have one name."""
WARNING_LENGTH = 1024
"""Characters kept of a Warning event's message, which any author of Events may choose."""
WARNINGS_KEPT = 4096
"""Warning events that are kept, the newest of each object."""
LOST_CLAIMS_KEPT, LOST_JOBS_KEPT = 16384, 16
"""Claims of deleted Jobs without a known pod, and Jobs of each claim. The newest are kept."""


class Urgency(IntEnum):
    """How soon a change is to be reconciled."""

    NEVER = 0
    LATER = 1
    """It changes what the status shows, but nothing that the operator does."""
    NOW = 2


@dataclass(frozen=True)
class Change:
    """The pipelines to reconcile because of a change."""

    keys: tuple[Key, ...] = ()
    urgency: Urgency = Urgency.NEVER


NO_CHANGE = Change()


class ResourceCache:
    """Pipelines and their Jobs, pods, Deployments, Services and claims, and Warning events about them."""

    def __init__(self) -> None:
        self.pipelines: Store[CachedPipeline] = Store(
            trim_pipeline, claim=lambda one: [(one.key.namespace, one.claim)]
        )
        self.jobs: Store[Object] = Store(trim_job, owner=_owner_uids, claim=_claims)
        self.pods: Store[Object] = Store(trim_pod, job=_job_of, server=_server_of, claim=_claims)
        self.deployments: Store[Object] = Store(trim_deployment, owner=_owner_uids)
        self.services: Store[Object] = Store(trim_service)
        self.claims: Store[Object] = Store(trim_claim)
        self.defaults: Store[NamespaceDefaults] = Store(read_defaults)
        self.warnings: OrderedDict[tuple[str, str, str], tuple[str, str]] = OrderedDict()
        """Namespace, kind and name of an object -> time and message of the newest Warning event about it."""
        self.stores: dict[str, Store[Any]] = {
            PIPELINES: self.pipelines,
            JOBS: self.jobs,
            PODS: self.pods,
            DEPLOYMENTS: self.deployments,
            SERVICES: self.services,
            CLAIMS: self.claims,
            DEFAULTS: self.defaults,
        }
        self._lost_jobs: OrderedDict[NamespacedName, tuple[str, ...]] = OrderedDict()
        """Claim -> its deleted Jobs whose pods no watch has shown. A pod may run: a watch may be behind another."""
        self._ended: dict[str, tuple[int, ...]] = {}
        """uid of a Job that is not Complete yet -> indexes of its ended pods; the first one only if it succeeded."""

    def update(self, kind: str, found: Object) -> Change:
        """Store what a list, a watch or an answer delivered, unless it is older than what is stored."""
        if kind == EVENTS:
            return self._update_warning(found)
        store = self.stores[kind]
        if not store.is_news(found):
            return NO_CHANGE
        before = store.get(namespaced_name(found))
        if kind == PODS:
            return self._update_pod(before, trim_pod(found), version_of(found))
        after = store.update(found)
        if kind == DEFAULTS:
            return self._defaults_changed(namespaced_name(found)[0], before or NONE, after)
        if kind == PIPELINES:
            self._forget_ended_pods(before, after)
            next_users = (
                self._sharing(after.key, before) if before and before.frees_claim(after) else ()
            )
            changed = before is None or after.differs(before) or bool(next_users)
            return Change((after.key, *next_users), Urgency.NOW if changed else Urgency.NEVER)
        return self._changed(kind, before, after)

    def remove(self, kind: str, found: Object) -> Change:
        """Remove a deleted object; a deleted pod of a running attempt is kept, because its end is known only here."""
        if kind == EVENTS or not self.stores[kind].is_news(found):
            return NO_CHANGE
        name, version = namespaced_name(found), version_of(found)
        if kind == PODS:
            return self._update_pod(self.pods.get(name), {**trim_pod(found), "gone": True}, version)
        before = self.stores[kind].remove(name, version)
        if kind == DEFAULTS:
            return self._defaults_changed(name[0], before or NONE, NONE)
        if kind == PIPELINES:
            for job in before.running_jobs if before else ():
                self._forget_pods(name[0], job)
            return Change((Key(*name), *self._sharing(Key(*name), before)), Urgency.NOW)
        if kind == JOBS and before:
            self._note_lost_job(before)
            self._ended.pop(before["metadata"]["uid"], None)
        if kind == CLAIMS:
            self.forget_lost_jobs(*name)  # a claim goes only after the last pod that uses it
        return self._changed(kind, before, None) if before else NO_CHANGE

    def sweep(
        self, kind: str, listed: set[NamespacedName], version: int, namespace: str | None
    ) -> Iterator[Change]:
        """Remove what a complete list of this version no longer has: a watch has missed the deletion."""
        store = self.stores[kind]
        for name in store.unlisted(listed, version, namespace):
            meta = {"namespace": name[0], "name": name[1], "uid": store.entries[name].uid}
            if kind == PODS:
                pod = self.pods.entries[name].value
                change = self._update_pod(pod, {**pod, "gone": True}, version + 1)
            else:
                change = self.remove(
                    kind, {"metadata": {**meta, "resourceVersion": str(version + 1)}}
                )
            if change is not NO_CHANGE:
                yield change

    def note_written(self, pipeline: Pipeline, answer: Object) -> tuple[Key, ...]:
        """Store the answer to a write of the status, with the parsed object, so that it is not parsed again.

        Return the other pipelines with the claim, where it may be their turn now.
        """
        name = (pipeline.key.namespace, pipeline.key.name)
        change = self.update(PIPELINES, answer)
        entry = self.pipelines.entries.get(name)
        if entry and entry.version == version_of(answer):
            self.pipelines.entries[name] = replace(entry, value=entry.value.with_parsed(pipeline))
        return change.keys[1:]

    # Reads.

    def is_over(self, job: Object) -> bool:
        """Return whether no process of the Job is left: it has ended, or its pods have and the first one succeeded.

        The Job controller needs a second or more until a Job with a succeeded pod is Complete.
        """
        return is_finished(job) or len(
            self._ended.get(job["metadata"]["uid"], ())
        ) >= completions_of(job)

    def pods_of(self, namespace: str, job: str, uid: str | None = None) -> list[Pod]:
        """Return the pods of a Job by their index, of two the younger; with the Job's uid, only pods of this Job."""
        pods = self.pods.select("job", (namespace, job))
        found = [one for one in pods if uid is None or uid in _owner_uids(one)]
        by_index = {pod.index: pod for pod in map(_pod, sorted(found, key=_created_at))}
        return [by_index[index] for index in sorted(by_index)]

    def server_pods(self, namespace: str, server: str) -> list[Pod]:
        """Return the pods of an attempt's servers, the oldest first."""
        return [
            _pod(one)
            for one in sorted(self.pods.select("server", (namespace, server)), key=_created_at)
        ]

    def all_pods(self) -> Iterator[Pod]:
        """Yield all pods."""
        return (_pod(entry.value) for entry in self.pods.entries.values())

    def writers(self, namespace: str, claim: str) -> list[Object]:
        """Return the Jobs and pods that mount the claim for writing and have not ended."""
        jobs = (
            one for one in self.jobs.select("claim", (namespace, claim)) if not self.is_over(one)
        )
        pods = (
            one for one in self.pods.select("claim", (namespace, claim)) if not _pod(one).finished
        )
        return [*jobs, *pods]

    def lost_jobs(self, namespace: str, claim: str) -> tuple[str, ...]:
        """Return deleted Jobs with this claim whose pods are to be read: no watch has shown them."""
        return self._lost_jobs.get((namespace, claim), ())

    def forget_lost_jobs(self, namespace: str, claim: str) -> None:
        """Forget the deleted Jobs with this claim, whose pods have been read."""
        self._lost_jobs.pop((namespace, claim), None)

    def warning(self, namespace: str, kind: str, name: str) -> str:
        """Return the message of the newest Warning event about an object; empty where there is none."""
        return self.warnings.get((namespace, kind, name), ("", ""))[1]

    def defaults_of(self, namespace: str) -> NamespaceDefaults:
        """Return the defaults of a namespace."""
        return self.defaults.get((namespace, DEFAULTS_NAME)) or NONE

    def phases(self) -> Counter[str]:
        """Return the number of pipelines in each phase."""
        return Counter(entry.value.phase for entry in self.pipelines.entries.values())

    def unreadable(self) -> int:
        """Return the number of pipelines that this version of the operator cannot read."""
        return sum(entry.value.unreadable for entry in self.pipelines.entries.values())

    def waiting(self) -> Iterator[WaitingStage]:
        """Yield the stage that waits, of each pipeline that has one."""
        return (one for entry in self.pipelines.entries.values() if (one := entry.value.waiting))

    def servers_down(self) -> int:
        """Return the number of pipelines whose Service leads to a server without a ready pod, whatever their phase."""
        return sum(self._is_server_down(entry.value) for entry in self.pipelines.entries.values())

    def _is_server_down(self, pipeline: CachedPipeline) -> bool:
        namespace = pipeline.key.namespace
        service = self.services.get((namespace, service_name(pipeline.key.name)))
        own = service is not None and pipeline.uid in _owner_uids(service)
        target = service["spec"]["selector"].get(SERVER) if service and own else None
        server = self.deployments.get((namespace, target)) if target else None
        return bool(target) and not (server and server["status"]["readyReplicas"])

    # Changes.

    def _defaults_changed(
        self, namespace: str, before: NamespaceDefaults, after: NamespaceDefaults
    ) -> Change:
        """Return the unfinished pipelines of the namespace: an attempt may wait for other defaults."""
        if before == after:
            return NO_CHANGE
        known = (entry.value for entry in self.pipelines.entries.values())
        keys = tuple(
            one.key for one in known if one.key.namespace == namespace and not one.finished
        )
        return Change(keys, Urgency.NOW)

    def _changed(self, kind: str, before: Object | None, after: Object | None) -> Change:
        found = after or before or {}
        key = owner_key(found)
        if key is None or before == after:
            return NO_CHANGE
        if kind != JOBS:
            return Change((key,), Urgency.NOW)
        running = found["metadata"]["name"] in self._running(key)
        if (
            before
            and self.is_over(before)
            and (after is None or self.is_over(after))
            and not running
        ):
            return NO_CHANGE
        if after and before and is_finished(before) == is_finished(after):
            return Change((key,), Urgency.LATER)
        waiting = () if after and not self.is_over(after) else self._waiting(found, key)
        return Change((key, *waiting), Urgency.NOW)

    def _update_pod(self, before: Object | None, found: Object, version: int) -> Change:
        """Store a trimmed pod of an attempt's Job or ReplicaSet, and no other: what a pod says is believed."""
        name, key, gone = namespaced_name(found), owner_key(found), bool(found.get("gone"))
        labels = found["metadata"]["labels"]
        if key is None or not (
            _is_of(found, "Job", labels.get(JOB_NAME))
            or _is_of(found, "ReplicaSet", labels.get(SERVER))
        ):
            return NO_CHANGE
        after = _with_known_end(before, found)
        pod = _pod(after)
        self._note_end(after, pod)
        entry = Entry(after["metadata"]["uid"], version, after)
        if (gone and SERVER in labels) or (
            pod.finished and JOB_NAME in labels and labels[JOB_NAME] not in self._running(key)
        ):
            self.pods.remove(
                name, entry.version if gone else 0
            )  # one that exists may be read again
        else:
            self.pods.put(name, entry)
        if before is None and pod.finished and labels.get(JOB_NAME) not in self._running(key):
            return NO_CHANGE
        if _urgent_facts(before) == _urgent_facts(after):
            return NO_CHANGE if before == after else Change((key,), Urgency.LATER)
        return Change((key, *(self._waiting(after, key) if pod.finished else ())), Urgency.NOW)

    def _note_lost_job(self, job: Object) -> None:
        name = namespaced_name(job)
        if not self.is_over(job) and not self.pods.select("job", name):
            for claim in _claims(job):
                self._lost_jobs[claim] = (*self._lost_jobs.get(claim, ()), name[1])[
                    -LOST_JOBS_KEPT:
                ]
        while len(self._lost_jobs) > LOST_CLAIMS_KEPT:
            self._lost_jobs.popitem(last=False)

    def _note_end(self, raw: Object, pod: Pod) -> None:
        owner = next(
            (ref["uid"] for ref in raw["metadata"]["ownerReferences"] if ref.get("controller")), ""
        )
        job = self.jobs.get(
            (raw["metadata"]["namespace"], raw["metadata"]["labels"].get(JOB_NAME, ""))
        )
        has_ended = pod.finished if pod.index else pod.succeeded
        if has_ended and job and job["metadata"]["uid"] == owner and not is_finished(job):
            self._ended[owner] = tuple({*self._ended.get(owner, ()), pod.index})

    def _update_warning(self, event: Object) -> Change:
        involved = event.get("involvedObject") or {}
        name = (
            str(involved.get("namespace")),
            str(involved.get("kind")),
            str(involved.get("name")),
        )
        time = str(
            event.get("lastTimestamp")
            or event.get("eventTime")
            or event["metadata"].get("creationTimestamp")
        )
        if event.get("type") != "Warning" or self.warnings.get(name, ("", ""))[0] > time:
            return NO_CHANGE
        self.warnings[name] = (time, str(event.get("message") or "")[:WARNING_LENGTH])
        self.warnings.move_to_end(name)
        if len(self.warnings) > WARNINGS_KEPT:
            self.warnings.popitem(last=False)
        store = {"Job": self.jobs, "Pod": self.pods, "Deployment": self.deployments}.get(name[1])
        found = store.get((name[0], name[2])) if store else None
        key = owner_key(found) if found else None
        return Change((key,), Urgency.LATER) if key else NO_CHANGE

    def _running(self, key: Key) -> frozenset[str]:
        pipeline = self.pipelines.get((key.namespace, key.name))
        return pipeline.running_jobs if pipeline else frozenset()

    def _waiting(self, found: Object, own: Key) -> tuple[Key, ...]:
        """Return the other pipelines with a claim of this Job or pod: it may be their turn now."""
        namespace = found["metadata"]["namespace"]
        users = (
            one
            for claim in found.get("claims", ())
            for one in self.pipelines.select("claim", (namespace, claim))
        )
        return tuple(one.key for one in users if one.key != own)

    def _sharing(self, own: Key, pipeline: CachedPipeline | None) -> tuple[Key, ...]:
        users = self.pipelines.select("claim", (own.namespace, pipeline.claim)) if pipeline else []
        return tuple(one.key for one in users if one.key != own)

    def _forget_ended_pods(self, before: CachedPipeline | None, after: CachedPipeline) -> None:
        """Drop the finished pods of attempts whose end the status has now."""
        for job in (before.running_jobs - after.running_jobs) if before else ():
            self._forget_pods(after.key.namespace, job)

    def _forget_pods(self, namespace: str, job: str) -> None:
        for raw in self.pods.select("job", (namespace, job)):
            if _pod(raw).finished:
                self.pods.remove(namespaced_name(raw))


def owner_key(child: Object) -> Key | None:
    """Return the pipeline that a child was created for."""
    annotations = child["metadata"].get("annotations") or {}
    name = annotations.get(PIPELINE_NAME) or annotations.get(
        WORKSPACE_OF
    )  # the latter: a claim has no other
    return Key(child["metadata"]["namespace"], name) if name else None


def _pod(raw: Object) -> Pod:
    return Pod(raw, bool(raw.get("gone")))


def _owner_uids(found: Object) -> list[str]:
    return [ref["uid"] for ref in found["metadata"]["ownerReferences"]]


def _claims(found: Object) -> list[NamespacedName]:
    return [(found["metadata"]["namespace"], claim) for claim in found["claims"]]


def _job_of(pod: Object) -> list[NamespacedName]:
    job = pod["metadata"]["labels"].get(JOB_NAME)
    return [(pod["metadata"]["namespace"], job)] if job else []


def _server_of(pod: Object) -> list[NamespacedName]:
    server = pod["metadata"]["labels"].get(SERVER)
    return [(pod["metadata"]["namespace"], server)] if server else []


def _is_of(pod: Object, kind: str, name: str | None) -> bool:
    """Return whether the controller of this kind and name created the pod; a ReplicaSet's name ends with a hash."""
    owners = (
        ref
        for ref in pod["metadata"].get("ownerReferences") or []
        if ref.get("controller") and ref["kind"] == kind
    )
    owner = next((str(ref["name"]) for ref in owners), "")
    return bool(name) and (owner == name if kind == "Job" else owner.startswith(f"{name}-"))


def _with_known_end(known: Object | None, received: Object) -> Object:
    """Return the received pod, with the known end if that has one and the received version has not.

    A container of an attempt does not restart, so a version without its end is the older one.
    """
    if known is None or known["metadata"]["uid"] != received["metadata"]["uid"]:
        return received
    before, after = _pod(known), _pod(received)
    lost_end = before.exit_code is not None and after.exit_code is None
    return {**known, **({"gone": True} if received.get("gone") else {})} if lost_end else received


def _urgent_facts(raw: Object | None) -> tuple[object, ...]:
    """Return what of a pod changes what the operator does, or what it must say at once."""
    pod = _pod(raw or {"metadata": {}, "spec": {}, "status": {}})
    scheduled, waiting = pod.condition("PodScheduled"), pod.waiting
    return (
        (
            pod.finished,
            pod.exit_code,
            pod.disruption,
            pod.deleted_at is not None,
            pod.termination_text,
        ),
        scheduled.get("message") if scheduled.get("status") == "False" else None,
        waiting if waiting.get("reason") not in STARTING else None,
        (pod.ready, pod.restarts) if raw and SERVER in raw["metadata"]["labels"] else None,
    )


def _created_at(raw: Object) -> tuple[str, str]:
    created: datetime | str = raw["metadata"].get("creationTimestamp") or ""
    return str(created), raw["metadata"]["name"]
