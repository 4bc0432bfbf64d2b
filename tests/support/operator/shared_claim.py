"""Two pipelines that share a claim, reconciled on a fake API server."""

import asyncio
from datetime import UTC, datetime

from support.operator.cluster_objects import (
    pipeline_object,
)
from support.operator.fake_api import FakeApi
from support.operator.pods import job_condition

from finetune_operator.core.pipeline import Key
from finetune_operator.core.settings import Settings
from finetune_operator.kubernetes.cache.cache import (
    JOBS,
    PIPELINES,
    PODS,
    ResourceCache,
)
from finetune_operator.kubernetes.cluster import KubernetesCluster
from finetune_operator.kubernetes.pods.probe import NoProbe
from finetune_operator.kubernetes.pods.progress import NoProgress
from finetune_operator.reconcile import reconcile

CLAIMS = "/api/v1/namespaces/team/persistentvolumeclaims"
JOBS_PATH = "/apis/batch/v1/namespaces/team/jobs"
FINETUNE = "/apis/finetune.dev/v1alpha1/namespaces/team/finetunepipelines"
NOW = datetime(2030, 1, 1, tzinfo=UTC)


class SharedClaim:
    """Two pipelines with the same existing claim as workspace; the API server answers, and no watch runs."""

    def __init__(self):
        self.api = FakeApi()
        self.queue = []
        self.api.put(f"{CLAIMS}/shared", {})
        for name, created in (("older", "2030"), ("younger", "2031")):
            self.submit(name, created)
        self.restart()

    def restart(self):
        """Replace the operator by a new operator, whose cache has only the objects that it lists."""
        self.cache = ResourceCache()
        self.cluster = KubernetesCluster(
            self.api, self.cache, NoProgress(), NoProbe(), enqueue=self.queue.append
        )
        for kind, part in (
            (PIPELINES, "finetunepipelines/"),
            (JOBS, "jobs/"),
            (PODS, "pods/"),
        ):
            for path, actual in self.api.objects.items():
                if part in path:
                    self.cache.update(kind, actual)

    def submit(self, name, created, **status):
        known = pipeline_object(
            name, claim="shared", creationTimestamp=created, status=status
        )
        self.cache_update(PIPELINES, self.api.put(f"{FINETUNE}/{name}", known))

    def cache_update(self, kind, actual):
        if hasattr(self, "cache"):
            self.cache.update(kind, actual)

    def reconcile(self, name, **settings):
        key = Key("team", name)
        return asyncio.run(reconcile(key, self.cluster, Settings(**settings), NOW))

    def end_job(self, name, condition="Failed"):
        path = next(
            path for path in self.api.objects if path.startswith(f"{JOBS_PATH}/{name}-")
        )
        job = self.api.put(
            path,
            {
                **self.api.objects[path],
                "status": {"conditions": [job_condition(condition)]},
            },
        )
        self.cache.update(JOBS, job)

    def reason(self, name):
        conditions = self.api.objects[f"{FINETUNE}/{name}"]["status"]["conditions"]
        return next(
            condition["reason"]
            for condition in conditions
            if condition["type"] == "Ready"
        )

    def message(self, name):
        conditions = self.api.objects[f"{FINETUNE}/{name}"]["status"]["conditions"]
        return next(
            condition["message"]
            for condition in conditions
            if condition["type"] == "Ready"
        )

    @property
    def writers(self):
        """The pipelines with a Job, in the order of their names."""
        names = (
            path.rpartition("/")[2]
            for path in self.api.objects
            if path.startswith(f"{JOBS_PATH}/")
        )
        return sorted(name.split("-")[0] for name in names)
