"""Servers on Kubernetes: an attempt of `deploy` is a Deployment, and succeeds when its server answers the probe."""

import re
from dataclasses import replace
from datetime import datetime

from finetune_operator.api.conditions import Reason
from finetune_operator.api.stages.base import Serving
from finetune_operator.core.attempts.history import server_job
from finetune_operator.core.job_template import JobTemplate
from finetune_operator.core.metadata import IDENTITY, SERVER, STAGE, service_name
from finetune_operator.core.observation import (
    Blocker,
    JobState,
    ObservedJob,
    ObservedServer,
)
from finetune_operator.core.pipeline import Pipeline
from finetune_operator.errors import ClusterError
from finetune_operator.kubernetes import paths
from finetune_operator.kubernetes.cache.cache import (
    DEPLOYMENTS,
    SERVICES,
    ResourceCache,
)
from finetune_operator.kubernetes.client import KubernetesClient
from finetune_operator.kubernetes.pods.probe import NoProbe, ProbeResult, ServerProbe
from finetune_operator.kubernetes.resources.owner_references import (
    foreign_service,
    is_owned_by,
)
from finetune_operator.kubernetes.resources.server import (
    build_deployment,
    build_service,
    launch_of,
    serving_of,
    url_of,
)
from finetune_operator.kubernetes.translate.api_errors import AlreadyExists, Blocked
from finetune_operator.kubernetes.translate.diagnose import diagnose
from finetune_operator.kubernetes.translate.object import Object
from finetune_operator.kubernetes.translate.pod import ObservedPod, time_of
from finetune_trainer.contract import DeployResult, Failure, TerminationMessage
from finetune_trainer.exit_codes import PERMANENT_EXIT_CODES, ExitCode

MAX_CRASHES = 3
"""Number of restarts before the first answer at which the attempt fails."""
IMAGE_VOLUMES_SINCE = (1, 35)
"""Version of Kubernetes in which the feature gate ImageVolume is on by default."""


def version_of_cluster(version: Object) -> tuple[int, int]:
    """Return major and minor version of an API server, from its /version; (0, 0) if that is unreadable."""
    return _leading_number(version.get("major")), _leading_number(version.get("minor"))


def _leading_number(text: object) -> int:
    # Some providers write a minor version such as 33+.
    number = re.match(r"\d+", str(text or ""))
    if number is None:
        return 0
    return int(number[0])


class Servers:
    """The Deployments and Services of pipelines."""

    def __init__(
        self, api: KubernetesClient, cache: ResourceCache, probes: ServerProbe | NoProbe
    ) -> None:
        self.api = api
        self.cache = cache
        self.probes = probes
        self._image_volumes: bool | None = None

    async def observe(self, pipeline: Pipeline) -> dict[str, ObservedServer]:
        """Return the pipeline's servers that are not being deleted, by attempt."""
        for stage in pipeline.status.stages.values():
            # A server missing from the cache is read from the API: the stage loses its result only if it is gone.
            job = server_job(stage)
            if job:
                await self._deployment(pipeline, job)
        current = _traffic_target(pipeline, self.service(pipeline))
        servers: dict[str, ObservedServer] = {}
        for deployment in self.cache.deployments.select("owner", pipeline.uid):
            meta = deployment["metadata"]
            if _is_intact(deployment) and not meta.get("deletionTimestamp"):
                name = meta["name"]
                servers[name] = ObservedServer(
                    meta["labels"][STAGE],
                    name == current,
                    _unavailable(deployment),
                    deployment["spec"].get("replicas", 1),
                    (deployment.get("status") or {}).get("replicas") or 0,
                )
        return servers

    def service(self, pipeline: Pipeline) -> Object | None:
        """Return the Service of the pipeline's name from the cache."""
        return self.cache.services.get(
            (pipeline.key.namespace, service_name(pipeline.key.name))
        )

    def has_service(self, pipeline: Pipeline) -> bool:
        """Return whether the pipeline's own Service exists."""
        service = self.service(pipeline)
        return service is not None and is_owned_by(pipeline, service)

    def service_blocker(self, pipeline: Pipeline) -> Blocker | None:
        """Return why the Service cannot be used: another owner created it."""
        service = self.service(pipeline)
        if not service:
            return None
        return foreign_service(pipeline, service)

    async def observe_attempt(
        self, pipeline: Pipeline, name: str, now: datetime
    ) -> ObservedJob | None:
        """Return the state of the attempt that started this server."""
        deployment = await self._deployment(pipeline, name)
        if deployment is None:
            return None
        pods = self.cache.server_pods(pipeline.key.namespace, name)
        # First: a crashed server is unready as well.
        for pod in pods:
            crashed = _observe_crash(name, pod)
            if crashed:
                return crashed
        unready = [pod for pod in pods if not pod.ready]
        if not pods or unready:
            waiting = unready[0] if unready else None
            return _observe_start(
                name, waiting, self._warning(deployment, waiting), now
            )
        # The cache may have fewer pods than the Deployment is to have.
        if _ready(deployment) < deployment["spec"].get("replicas", 1):
            failure = self._warning(deployment, None)
            # The pods that exist are ready: the attempt waits for a pod that cannot be created, or is not known yet.
            return _observe_start(name, None if failure else pods[0], failure, now)
        result = self.probes.result(pods[0])
        if result:
            return _observe_answer(
                pipeline, deployment, pods[0], serving_of(deployment), result
            )
        started = _observe_start(name, pods[0], "", now)
        return replace(started, awaits_probe=True, unready=False)

    def _warning(self, deployment: Object, pod: ObservedPod | None) -> str:
        namespace = deployment["metadata"]["namespace"]
        failure = replica_failure(deployment)
        if failure or pod is None:
            return failure
        return self.cache.warning(namespace, "Pod", pod.name)

    async def _deployment(self, pipeline: Pipeline, name: str) -> Object | None:
        """Return the attempt's own Deployment, from the API server if the cache does not have it."""
        namespaced_name = (pipeline.key.namespace, name)
        deployment = self.cache.deployments.get(namespaced_name)
        if deployment is None:
            current = await self.api.get(paths.deployments(*namespaced_name))
            if current:
                self.cache.update(DEPLOYMENTS, current)
                deployment = self.cache.deployments.get(namespaced_name)
        if deployment and not is_owned_by(pipeline, deployment):
            raise ClusterError(
                f"the Deployment {name} is not owned by this pipeline: delete it, or rename the pipeline"
            )
        if deployment and _is_intact(deployment):
            return deployment
        return None

    async def create(
        self, pipeline: Pipeline, template: JobTemplate, serving: Serving
    ) -> None:
        """Start the servers of an attempt in parallel with running servers. Raises Blocked if they could not serve."""
        path = paths.deployments(pipeline.key.namespace)
        try:
            desired = build_deployment(
                pipeline,
                template,
                serving,
                image_volumes=await self._has_image_volumes(),
            )
            created = await self.api.create(path, desired)
        except AlreadyExists:
            if await self._deployment(pipeline, template.name) is None:
                raise
        else:
            self.cache.update(DEPLOYMENTS, created)

    async def _has_image_volumes(self) -> bool:
        """Return whether the cluster mounts images as volumes, by its version."""
        if self._image_volumes is None:
            version = await self.api.get(paths.SERVER_VERSION)
            self._image_volumes = (
                version_of_cluster(version or {}) >= IMAGE_VOLUMES_SINCE
            )
        return self._image_volumes

    def probe(self, pipeline: Pipeline, name: str) -> None:
        """Send the prompt to the oldest pod of the attempt's servers, in the background."""
        deployment = self.cache.deployments.get((pipeline.key.namespace, name))
        pods = self.cache.server_pods(pipeline.key.namespace, name)
        if deployment and pods:
            # Forgets the results of pods that no longer exist, or the results would only grow.
            self.probes.retain({pod.uid for pod in self.cache.all_pods()})
            serving = serving_of(deployment)
            self.probes.start(pods[0], launch_of(serving).model, serving)

    async def switch_traffic(self, pipeline: Pipeline, stage: str, name: str) -> None:
        """Send requests to the servers of this attempt. Raises Blocked if the pipeline does not own the Service."""
        desired = build_service(pipeline, stage, name)
        service = self.service(pipeline)
        if service is None:
            try:
                created = await self.api.create(
                    paths.services(pipeline.key.namespace), desired
                )
            except AlreadyExists:
                # A Service without the operator's labels is listed by no informer.
                service = await self.api.get(_service_path(pipeline))
            else:
                self.cache.update(SERVICES, created)
                return
        blocker = foreign_service(pipeline, service) if service else None
        if blocker:
            raise Blocked(blocker.reason, blocker.message)
        meta = {
            "labels": desired["metadata"]["labels"],
            "annotations": desired["metadata"]["annotations"],
        }
        # A patch keeps the clusterIP that the API server has assigned.
        patch = {"metadata": meta, "spec": {"selector": desired["spec"]["selector"]}}
        self.cache.update(
            SERVICES, await self.api.patch(_service_path(pipeline), patch)
        )

    async def scale(self, pipeline: Pipeline, name: str, replicas: int) -> None:
        """Change the number of replicas of the attempt's own Deployment. Its pods stay as far as they are asked for."""
        if await self._deployment(pipeline, name) is None:
            return
        path = paths.deployments(pipeline.key.namespace, name)
        changed = await self.api.patch(path, {"spec": {"replicas": replicas}})
        self.cache.update(DEPLOYMENTS, changed)

    async def delete_service(self, pipeline: Pipeline) -> None:
        """Delete the pipeline's own Service."""
        service = self.service(pipeline)
        if service is None or not is_owned_by(pipeline, service):
            return
        if not service["metadata"].get("deletionTimestamp"):
            await self.api.delete(
                _service_path(pipeline), uid=service["metadata"]["uid"]
            )

    async def stop(self, pipeline: Pipeline, name: str) -> bool:
        """Delete the servers of an attempt; return False if there are none."""
        deployment = self.cache.deployments.get((pipeline.key.namespace, name))
        if deployment is None or not is_owned_by(pipeline, deployment):
            return False
        meta = deployment["metadata"]
        if not meta.get("deletionTimestamp"):
            path = paths.deployments(pipeline.key.namespace, name)
            # In the foreground: the Deployment exists until its pods have ended.
            await self.api.delete(path, "Foreground", uid=meta["uid"])
        return True


def _service_path(pipeline: Pipeline) -> str:
    return paths.services(pipeline.key.namespace, service_name(pipeline.key.name))


def replica_failure(deployment: Object | None) -> str:
    """Return why the Deployment cannot create its pods; empty if it can.

    The Deployment's condition has the reason; the events belong to its ReplicaSet.
    """
    conditions = ((deployment or {}).get("status") or {}).get("conditions") or []
    for condition in conditions:
        if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
            return str(condition.get("message") or "")
    return ""


def _ready(deployment: Object) -> int:
    return int((deployment.get("status") or {}).get("readyReplicas") or 0)


def _unavailable(deployment: Object) -> Blocker | None:
    if _ready(deployment):
        return None
    name = deployment["metadata"]["name"]
    replicas = deployment["spec"].get("replicas", 1)
    message = f"0 of {replicas} replicas of the Deployment {name} are ready: see `kubectl describe deployment {name}`"
    return Blocker(Reason.SERVER_NOT_READY, message)


def _traffic_target(pipeline: Pipeline, service: Object | None) -> str | None:
    if service is None or not is_owned_by(pipeline, service):
        return None
    selector: Object = service["spec"].get("selector") or {}
    return selector.get(SERVER)


def _is_intact(deployment: Object) -> bool:
    """Return whether the operator's labels and annotation are still there; without them it counts as deleted."""
    labels: Object = deployment["metadata"].get("labels") or {}
    try:
        serving_of(deployment)
    except (LookupError, TypeError, ValueError):
        return False
    return STAGE in labels and IDENTITY in labels


def _observe_crash(name: str, pod: ObservedPod) -> ObservedJob | None:
    """Return the failed attempt of a server that will never answer; None if it may still answer."""
    terminated = pod.last_failure
    if not terminated:
        return None
    code = terminated.get("exitCode")
    out_of_memory = terminated.get("reason") == "OOMKilled"
    is_permanent = out_of_memory or code in PERMANENT_EXIT_CODES
    # The kubelet restarts a server after any other crash, which may pass.
    if not is_permanent and pod.restarts < MAX_CRASHES:
        return None
    detail = str(terminated.get("message") or "").strip()[-1000:]
    failure = Failure(
        message=f"the server exited with code {code}: {detail}".rstrip(": ")
    )
    return ObservedJob(
        name,
        JobState.FAILED,
        started_at=pod.started_at,
        finished_at=time_of(terminated.get("finishedAt")),
        exit_code=code,
        out_of_memory=out_of_memory,
        memory_limit=pod.memory_limit,
        stage=pod.stage,
        message=None if out_of_memory else TerminationMessage(failure=failure),
    )


def _observe_start(
    name: str, pod: ObservedPod | None, warning: str, now: datetime
) -> ObservedJob:
    blocker = diagnose(pod, warning, now)
    if pod and pod.started_at:
        return ObservedJob(
            name,
            JobState.RUNNING,
            started_at=pod.started_at,
            blocker=blocker,
            unready=True,
        )
    return ObservedJob(name, JobState.WAITING, blocker=blocker)


def _observe_answer(
    pipeline: Pipeline,
    deployment: Object,
    pod: ObservedPod,
    serving: Serving,
    probe: ProbeResult,
) -> ObservedJob:
    """Return the attempt as complete with the probe's answer, or as failed with the probe's failure."""
    name = deployment["metadata"]["name"]
    started_at = pod.started_at
    if probe.failure:
        message = TerminationMessage(failure=Failure(message=probe.failure))
        # The user must change the manifest: the same model gives the same answer.
        exit_code = ExitCode.CONFIG if probe.is_permanent else None
        return ObservedJob(
            name,
            JobState.FAILED,
            started_at=started_at,
            exit_code=exit_code,
            message=message,
        )
    ready = time_of(pod.condition("Ready").get("lastTransitionTime"))
    result = DeployResult(
        identity=deployment["metadata"]["labels"][IDENTITY],
        digest=serving.digest or "",
        url=url_of(pipeline),
        answer=probe.text,
        seconds_to_ready=_seconds(started_at, ready),
        long_running=True,
    )
    return ObservedJob(
        name,
        JobState.COMPLETE,
        started_at=started_at,
        exit_code=0,
        message=TerminationMessage(result=result),
    )


def _seconds(started: datetime | None, ready: datetime | None) -> float:
    if started is None or ready is None:
        return 0.0
    return max(0.0, (ready - started).total_seconds())
