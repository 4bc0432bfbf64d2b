"""A cache of pipelines and of the objects that belong to them, which may be lost at any time.

Lists, watches and the operator's own requests fill it. Only deleted pods are more than a cache: no API returns their
exit code and termination message any more.
"""

from collections.abc import Iterator
from typing import Any

from finetune_operator.core.metadata import SERVER
from finetune_operator.core.pipeline import Key, Pipeline
from finetune_operator.kubernetes.cache.change import NO_CHANGE, Change, Urgency
from finetune_operator.kubernetes.cache.children import claims_of, owner_key, owner_uids
from finetune_operator.kubernetes.cache.claim_users import next_users, users_of
from finetune_operator.kubernetes.cache.lost_jobs import LostJobs
from finetune_operator.kubernetes.cache.pipeline import CachedPipeline, trim_pipeline
from finetune_operator.kubernetes.cache.pod import (
    age_order,
    controller_of,
    is_of_attempt,
    job_of,
    merge_pod,
    pod_of,
    server_of,
    urgent_facts,
)
from finetune_operator.kubernetes.cache.store import (
    Entry,
    NamespacedName,
    Store,
    TextStore,
    namespaced_name,
    version_of,
)
from finetune_operator.kubernetes.cache.trim import (
    JOB_NAME,
    trim_claim,
    trim_deployment,
    trim_job,
    trim_pod,
    trim_service,
)
from finetune_operator.kubernetes.cache.warning_events import WarningEvents
from finetune_operator.kubernetes.clock import utc_now
from finetune_operator.kubernetes.translate.attempt_pods import completions_of
from finetune_operator.kubernetes.translate.defaults import NAME as DEFAULTS_NAME
from finetune_operator.kubernetes.translate.defaults import (
    NONE,
    NamespaceDefaults,
    read_defaults,
)
from finetune_operator.kubernetes.translate.job import is_finished
from finetune_operator.kubernetes.translate.object import Object
from finetune_operator.kubernetes.translate.pod import ObservedPod

PIPELINES = "finetunepipelines"
JOBS = "jobs"
PODS = "pods"
EVENTS = "events"
DEPLOYMENTS = "deployments"
SERVICES = "services"
CLAIMS = "persistentvolumeclaims"
DEFAULTS = "configmaps"
"""Only the ConfigMaps with the defaults of their namespace, which all have the same name."""


class ResourceCache:
    """Pipelines and their Jobs, pods, Deployments, Services and claims, and Warning events about them."""

    def __init__(self) -> None:
        self.clock = utc_now
        self.pipelines: Store[CachedPipeline] = Store(
            trim_pipeline,
            claim=lambda pipeline: [(pipeline.key.namespace, pipeline.claim)],
            reads=lambda pipeline: pipeline.read_claims,
        )
        self.jobs = TextStore(trim_job, is_finished, owner=owner_uids, claim=claims_of)
        self.pods: Store[Object] = Store(
            trim_pod, job=job_of, server=server_of, claim=claims_of
        )
        self.deployments: Store[Object] = Store(trim_deployment, owner=owner_uids)
        self.services: Store[Object] = Store(trim_service)
        self.claims = TextStore(trim_claim, lambda _claim: True)
        self.defaults: Store[NamespaceDefaults] = Store(read_defaults)
        self.has_all_claims = True
        """Whether all claims are listed: else a claim that the cache lacks may exist."""
        self.warnings = WarningEvents()
        self.stores: dict[str, Store[Any]] = {
            PIPELINES: self.pipelines,
            JOBS: self.jobs,
            PODS: self.pods,
            DEPLOYMENTS: self.deployments,
            SERVICES: self.services,
            CLAIMS: self.claims,
            DEFAULTS: self.defaults,
        }
        self._lost_jobs = LostJobs()
        self._ended: dict[str, tuple[int, ...]] = {}
        """uid of a Job that is not Complete yet -> indexes of its ended pods; index 0 only if the pod succeeded."""

    def update(self, kind: str, received: Object) -> Change:
        """Store an object from a list, a watch or an answer, unless the stored version is newer."""
        if kind == EVENTS:
            return self._update_warning(received)
        store = self.stores[kind]
        if not store.is_news(received):
            return NO_CHANGE
        name = namespaced_name(received)
        before = store.get(name)
        if kind == PODS:
            return self._update_pod(before, trim_pod(received), version_of(received))
        after = store.update(received)
        if kind == DEFAULTS:
            return self._defaults_changed(name[0], before or NONE, after)
        if kind == PIPELINES:
            return self._update_pipeline(before, after)
        return self._child_changed(kind, before, after)

    def remove(self, kind: str, deleted: Object) -> Change:
        """Remove a deleted object; a deleted pod of a running attempt is kept, because its end is known only here."""
        if kind == EVENTS or not self.stores[kind].is_news(deleted):
            return NO_CHANGE
        name = namespaced_name(deleted)
        version = version_of(deleted)
        if kind == PODS:
            gone = {**trim_pod(deleted), "gone": True}
            return self._update_pod(self.pods.get(name), gone, version)
        before = self.stores[kind].remove(name, version)
        if kind == DEFAULTS:
            return self._defaults_changed(name[0], before or NONE, NONE)
        if kind == PIPELINES:
            # No status will record their end any more.
            for job in before.running_jobs if before else ():
                self._forget_pods(name[0], job)
            key = Key(*name)
            return Change((key, *self._sharing(key, before)), Urgency.NOW)
        if kind == JOBS and before:
            self._note_lost_job(before)
            self._ended.pop(before["metadata"]["uid"], None)
        if kind == CLAIMS:
            # A claim goes only after the last pod that uses it, so no lost pod is left.
            self.forget_lost_jobs(*name)
        if before is None:
            return NO_CHANGE
        return self._child_changed(kind, before, None)

    def sweep(
        self,
        kind: str,
        listed: set[NamespacedName],
        version: int,
        namespace: str | None,
    ) -> Iterator[Change]:
        """Remove the objects that a complete list of this version no longer has: a watch has missed their deletion."""
        store = self.stores[kind]
        # The deletion is newer than the list that does not show the object.
        deleted_at = version + 1
        for name in store.unlisted(listed, version, namespace):
            if kind == PODS:
                pod = self.pods.entries[name].value
                change = self._update_pod(pod, {**pod, "gone": True}, deleted_at)
            else:
                meta = {
                    "namespace": name[0],
                    "name": name[1],
                    "uid": store.entries[name].uid,
                    "resourceVersion": str(deleted_at),
                }
                change = self.remove(kind, {"metadata": meta})
            if change is not NO_CHANGE:
                yield change

    def note_written(self, pipeline: Pipeline, answer: Object) -> tuple[Key, ...]:
        """Store the answer to a write of the status, parsed; return the other pipelines whose turn it may be now."""
        if not self.pipelines.is_news(answer):
            return ()
        name = namespaced_name(answer)
        before = self.pipelines.get(name)
        # Text is smaller, and most pipelines have finished.
        parsed = None if pipeline.status.finished_at else pipeline
        after = trim_pipeline(answer, parsed)
        self.pipelines.put(name, Entry(after.uid, version_of(answer), after))
        return self._update_pipeline(before, after).keys[1:]

    # Reads.

    def is_over(self, job: Object) -> bool:
        """Return whether no process of the Job is left: it has ended, or its pods have and the first pod succeeded.

        The Job controller needs a second or more until a Job with a succeeded pod is Complete.
        """
        if is_finished(job):
            return True
        ended = self._ended.get(job["metadata"]["uid"], ())
        return len(ended) >= completions_of(job)

    def pods_of(
        self, namespace: str, job: str, uid: str | None = None
    ) -> list[ObservedPod]:
        """Return the pods of a Job by their index, the youngest of each; with a uid, only pods of the Job with it."""
        by_index: dict[int, ObservedPod] = {}
        for raw in sorted(self.pods.select("job", (namespace, job)), key=age_order):
            if uid is None or uid in owner_uids(raw):
                pod = pod_of(raw)
                by_index[pod.index] = pod
        return [by_index[index] for index in sorted(by_index)]

    def server_pods(self, namespace: str, server: str) -> list[ObservedPod]:
        """Return the pods of an attempt's servers, the oldest first."""
        pods = self.pods.select("server", (namespace, server))
        return [pod_of(raw) for raw in sorted(pods, key=age_order)]

    def all_pods(self) -> Iterator[ObservedPod]:
        """Yield all pods."""
        return (pod_of(entry.value) for entry in self.pods.entries.values())

    def writers(self, namespace: str, claim: str) -> list[Object]:
        """Return the Jobs and pods that mount the claim for writing and have not ended."""
        name = (namespace, claim)
        jobs = [job for job in self.jobs.select("claim", name) if not self.is_over(job)]
        mounted = self.pods.select("claim", name)
        pods = [pod for pod in mounted if not pod_of(pod).finished]
        return [*jobs, *pods]

    def lost_jobs(self, namespace: str, claim: str) -> tuple[str, ...]:
        """Return the deleted Jobs with this claim that have unknown pods: no watch has shown them."""
        return self._lost_jobs.of_claim((namespace, claim))

    def forget_lost_jobs(self, namespace: str, claim: str) -> None:
        """Forget the deleted Jobs with this claim: their pods have been read."""
        self._lost_jobs.forget((namespace, claim))

    def warning(self, namespace: str, kind: str, name: str) -> str:
        """Return the message of the newest Warning event about an object; empty if there is none."""
        return self.warnings.message(namespace, kind, name)

    def defaults_of(self, namespace: str) -> NamespaceDefaults:
        """Return the defaults of a namespace."""
        return self.defaults.get((namespace, DEFAULTS_NAME)) or NONE

    # Changes.

    def _update_pipeline(
        self, before: CachedPipeline | None, after: CachedPipeline
    ) -> Change:
        self._forget_ended_pods(before, after)
        next_users: tuple[Key, ...] = ()
        if before and before.frees_claim(after):
            next_users = self._sharing(after.key, before)
        if before is None or after.differs(before) or next_users:
            return Change((after.key, *next_users), Urgency.NOW)
        return Change((after.key,), Urgency.NEVER)

    def _defaults_changed(
        self, namespace: str, before: NamespaceDefaults, after: NamespaceDefaults
    ) -> Change:
        """Return the unfinished pipelines of the namespace: an attempt may wait for other defaults."""
        if before == after:
            return NO_CHANGE
        keys = [
            entry.value.key
            for name, entry in self.pipelines.entries.items()
            if name[0] == namespace and not entry.value.finished
        ]
        return Change(tuple(keys), Urgency.NOW)

    def _child_changed(
        self, kind: str, before: Object | None, after: Object | None
    ) -> Change:
        child = after or before or {}
        key = owner_key(child)
        if key is None or before == after:
            return NO_CHANGE
        if kind != JOBS:
            users = []
            # Ended Jobs of all users of a claim hold it while it is being deleted.
            if kind == CLAIMS:
                users = users_of(self.pipelines, *namespaced_name(child))
            return Change(tuple(dict.fromkeys([key, *users])), Urgency.NOW)
        return self._job_changed(key, before, after)

    def _job_changed(
        self, key: Key, before: Object | None, after: Object | None
    ) -> Change:
        child = after or before or {}
        was_over = before is not None and self.is_over(before)
        is_over = after is None or self.is_over(after)
        is_running = child["metadata"]["name"] in self._running(key)
        if was_over and is_over and not is_running:
            # The status has this end already: the Job controller or the operator only cleans up.
            return NO_CHANGE
        if after and before and is_finished(before) == is_finished(after):
            return Change((key,), Urgency.LATER)
        # An ended Job may have been the last writer of its claims: others may wait for their turn.
        waiting = self._waiting(child, key) if is_over else ()
        return Change((key, *waiting), Urgency.NOW)

    def _update_pod(
        self, before: Object | None, received: Object, version: int
    ) -> Change:
        """Store a trimmed pod of an attempt's Job or ReplicaSet, and no other: a pod's status is trusted."""
        key = owner_key(received)
        if key is None or not is_of_attempt(received):
            return NO_CHANGE
        after = merge_pod(before, received, self.clock())
        pod = pod_of(after)
        self._note_end(after, pod)
        job = received["metadata"]["labels"].get(JOB_NAME)
        is_recorded = pod.finished and job not in self._running(key)
        is_gone = bool(received.get("gone"))
        self._store_pod(after, version, is_gone=is_gone, is_recorded=is_recorded)
        # A list shows the pods of all earlier attempts to a new leader.
        if before is None and is_recorded:
            return NO_CHANGE
        if urgent_facts(before) != urgent_facts(after):
            # A finished pod may have been the last writer of its claims.
            waiting = self._waiting(after, key) if pod.finished else ()
            return Change((key, *waiting), Urgency.NOW)
        if before == after:
            return NO_CHANGE
        return Change((key,), Urgency.LATER)

    def _store_pod(
        self, raw: Object, version: int, *, is_gone: bool, is_recorded: bool
    ) -> None:
        """Store a pod, or remove it if it is needed no longer.

        `is_recorded`: the pod has finished, and the status has the end of its attempt.
        """
        name = namespaced_name(raw)
        labels = raw["metadata"]["labels"]
        # A server's end has no result. The end of an attempt's process is kept until the status has it.
        if (is_gone and SERVER in labels) or (is_recorded and JOB_NAME in labels):
            # Version 0 leaves no trace: a pod that exists may be read again.
            self.pods.remove(name, version if is_gone else 0)
        else:
            self.pods.put(name, Entry(raw["metadata"]["uid"], version, raw))

    def _note_lost_job(self, job: Object) -> None:
        name = namespaced_name(job)
        if not self.is_over(job) and not self.pods.select("job", name):
            self._lost_jobs.add(name[1], claims_of(job))

    def _note_end(self, raw: Object, pod: ObservedPod) -> None:
        meta = raw["metadata"]
        # The success of the first pod ends the Job; its failure does not show that the other pods have ended.
        has_ended = pod.finished if pod.index else pod.succeeded
        job = self.jobs.get((meta["namespace"], meta["labels"].get(JOB_NAME, "")))
        if not has_ended or job is None or is_finished(job):
            return
        owner = controller_of(raw).get("uid", "")
        if job["metadata"]["uid"] == owner:
            self._ended[owner] = tuple({*self._ended.get(owner, ()), pod.index})

    def _update_warning(self, event: Object) -> Change:
        about = self.warnings.update(event)
        if about is None:
            return NO_CHANGE
        namespace, kind, name = about
        stores = {"Job": self.jobs, "Pod": self.pods, "Deployment": self.deployments}
        child = stores[kind].get((namespace, name)) if kind in stores else None
        if child is None:
            return NO_CHANGE
        key = owner_key(child)
        if key is None:
            return NO_CHANGE
        # A warning only explains: the operator does nothing else because of it.
        return Change((key,), Urgency.LATER)

    def _running(self, key: Key) -> frozenset[str]:
        pipeline = self.pipelines.get((key.namespace, key.name))
        return pipeline.running_jobs if pipeline else frozenset()

    def _waiting(self, child: Object, own: Key) -> tuple[Key, ...]:
        """Return the other pipelines whose turn it may be now on the claims of this Job or pod."""
        namespace = child["metadata"]["namespace"]
        keys: list[Key] = []
        for claim in child.get("claims", ()):
            keys += next_users(self.pipelines, namespace, claim)
        return tuple(key for key in keys if key != own)

    def _sharing(self, own: Key, pipeline: CachedPipeline | None) -> tuple[Key, ...]:
        if pipeline is None:
            return ()
        users = next_users(self.pipelines, own.namespace, pipeline.claim)
        return tuple(key for key in users if key != own)

    def _forget_ended_pods(
        self, before: CachedPipeline | None, after: CachedPipeline
    ) -> None:
        """Drop the finished pods of attempts if the status has their end now."""
        if before is None:
            return
        for job in before.running_jobs - after.running_jobs:
            self._forget_pods(after.key.namespace, job)

    def _forget_pods(self, namespace: str, job: str) -> None:
        for raw in self.pods.select("job", (namespace, job)):
            if pod_of(raw).finished:
                self.pods.remove(namespaced_name(raw))
