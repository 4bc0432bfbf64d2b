"""The Jobs of pipelines: created, observed with their pods, and deleted."""

from collections.abc import Sequence

from finetune_operator.api.conditions import Reason
from finetune_operator.core.job_template import JobTemplate
from finetune_operator.core.observation import JobState, ObservedJob
from finetune_operator.core.pipeline import Pipeline
from finetune_operator.kubernetes import paths
from finetune_operator.kubernetes.cache.cache import JOBS, PODS, ResourceCache
from finetune_operator.kubernetes.cache.trim import JOB_NAME
from finetune_operator.kubernetes.client import KubernetesClient
from finetune_operator.kubernetes.clock import utc_now
from finetune_operator.kubernetes.headless_service import create_headless_service
from finetune_operator.kubernetes.pods.progress import NoProgress, ProgressPoller
from finetune_operator.kubernetes.resources.job import build_job
from finetune_operator.kubernetes.resources.owner_references import is_owned_by
from finetune_operator.kubernetes.translate.api_errors import AlreadyExists, Blocked
from finetune_operator.kubernetes.translate.attempt_pods import AttemptPods
from finetune_operator.kubernetes.translate.diagnose import lost_since
from finetune_operator.kubernetes.translate.job import is_finished, observe_job
from finetune_operator.kubernetes.translate.object import Object
from finetune_operator.kubernetes.translate.pod import ObservedPod


class Jobs:
    """The Jobs on an API server."""

    def __init__(
        self,
        api: KubernetesClient,
        cache: ResourceCache,
        progress: ProgressPoller | NoProgress,
        notices: str = "",
    ) -> None:
        self.api = api
        self.cache = cache
        self.progress = progress
        self.notices = notices
        """The cloud whose metadata endpoint training processes watch; empty: none."""

    async def read(self, pipeline: Pipeline, name: str) -> Object | None:
        """Return the pipeline's own Job of this name; another owner's is not cached, because no watch follows it."""
        job = await self.api.get(paths.jobs(pipeline.key.namespace, name))
        if job is None or not is_owned_by(pipeline, job):
            return None
        self.cache.update(JOBS, job)
        return self.cache.jobs.get((pipeline.key.namespace, name))

    async def read_pods(self, namespace: str, *jobs: str) -> None:
        """Read the pods of these Jobs into the cache."""
        selector = f"{JOB_NAME} in ({','.join(jobs)})"
        async for pod in self.api.list(paths.pods(namespace), labelSelector=selector):
            self.cache.update(PODS, pod)

    def observe(self, pipeline: Pipeline, name: str) -> ObservedJob | None:
        """Return the observed state of a Job from the cache; None if there is neither the Job nor a pod of it."""
        namespace = pipeline.key.namespace
        job = self.cache.jobs.get((namespace, name))
        if job and not is_owned_by(pipeline, job):
            # Another owner's Job has this name. Creating ours fails and sets a condition.
            return None
        pods = self.cache.pods_of(
            namespace, name, job["metadata"]["uid"] if job else None
        )
        if job and not pods and self.cache.is_over(job) and not is_finished(job):
            # The status has the end of its attempt, and its pods are forgotten.
            return ObservedJob(name, JobState.COMPLETE)
        first_pod = AttemptPods.of(job, pods).first
        return observe_job(
            name,
            job,
            pods,
            utc_now(),
            progress=self.progress.latest(first_pod),
            warnings=self._warnings(namespace, name, pods),
        )

    def _warnings(
        self, namespace: str, job: str, pods: Sequence[ObservedPod]
    ) -> dict[str, str]:
        """Return why processes have not started: no status of the Job or of a pod has the reason."""
        warnings = {
            pod.name: self.cache.warning(namespace, "Pod", pod.name)
            for pod in pods
            if not pod.started_at
        }
        return warnings | {job: self.cache.warning(namespace, "Job", job)}

    async def create(self, pipeline: Pipeline, template: JobTemplate) -> None:
        """Create the Job of an attempt; do nothing if the pipeline has it already. Raises Blocked and ApiError."""
        # Before the Job: its pods find each other by the name of this Service.
        if template.pods > 1:
            await create_headless_service(
                self.api, self.cache, pipeline, template.stage
            )
        try:
            job = build_job(pipeline, template, self.notices)
            created = await self.api.create(paths.jobs(pipeline.key.namespace), job)
        except AlreadyExists:
            if await self.read(pipeline, template.name) is None:
                message = f"the Job {template.name} exists and is not owned by this pipeline: delete it"
                raise Blocked(Reason.DEPENDENCY_NOT_READY, message) from None
        else:
            self.cache.update(JOBS, created)

    async def replace_lost(self, pipeline: Pipeline, name: str) -> None:
        """Delete a Job, and by force its pods on lost nodes, which no kubelet removes."""
        # The Job first: with a podFailurePolicy its controller keeps a pod that has not ended, until the Job is being
        # deleted.
        await self.delete(pipeline, name, "Foreground")
        namespace = pipeline.key.namespace
        job = self.cache.jobs.get((namespace, name))
        if job and not is_owned_by(pipeline, job):
            return
        now = utc_now()
        uid = job["metadata"]["uid"] if job else None
        for pod in self.cache.pods_of(namespace, name, uid):
            if lost_since(pod, now):
                path = paths.pods(namespace, pod.name)
                options = {"gracePeriodSeconds": 0}
                await self.api.delete(path, options=options, uid=pod.uid)

    async def delete(self, pipeline: Pipeline, name: str, propagation: str) -> None:
        """Delete a Job; in the foreground, it exists until its pod has ended by SIGTERM, grace period and SIGKILL."""
        namespace = pipeline.key.namespace
        job = self.cache.jobs.get((namespace, name)) or await self.read(pipeline, name)
        if job is None or not is_owned_by(pipeline, job):
            return
        if not job["metadata"].get("deletionTimestamp"):
            # The uid: a new Job of the same name is not deleted.
            uid = job["metadata"]["uid"]
            await self.api.delete(paths.jobs(namespace, name), propagation, uid=uid)
