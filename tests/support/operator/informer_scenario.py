"""Informers of a fake API server whose lists take a while."""

import asyncio

from support.operator.cluster_objects import (
    job_of,
    pipeline_object,
    running_status,
)
from support.operator.fake_api import FakeApi

from finetune_operator.controller.informers import Informers
from finetune_operator.controller.signals import ShutdownSignal
from finetune_operator.controller.workqueue import WorkQueue
from finetune_operator.kubernetes.cache.cache import (
    JOBS,
    PIPELINES,
    PODS,
    ResourceCache,
)
from finetune_operator.kubernetes.translate.api_errors import ApiError

NAME = "demo-train-a1"
PATHS = {
    PODS: "/api/v1/namespaces/{}/pods",
    JOBS: "/apis/batch/v1/namespaces/{}/jobs",
    PIPELINES: "/apis/finetune.dev/v1alpha1/namespaces/{}/finetunepipelines",
}


class SlowApi(FakeApi):
    """A fake API in which events arrive while a list is read: it has been made before them."""

    def __init__(self):
        super().__init__()
        self.during_list = lambda: None
        self.list_errors = {}
        """Namespaces in which every list fails, with the status code."""

    async def pages(self, path, **query):
        pages = [page async for page in super().pages(path, **query)]
        for namespace, status in self.list_errors.items():
            if f"/{namespace}/" in path:
                raise ApiError(status, f"cannot list in {namespace}")
        await asyncio.sleep(0)
        if path.endswith("/pods"):
            self.during_list()
        for page in pages:
            yield page


class InformerScenario:
    """An API server with a pipeline that trains, and the informers with their cache and their queue."""

    def __init__(self, namespaces=("team",)):
        self.api = SlowApi()
        self.cache = ResourceCache()
        self.queue = WorkQueue()
        self.informers = Informers(
            self.api, self.cache, self.queue, ShutdownSignal(), namespaces
        )
        self.create(PIPELINES, pipeline_object(status=running_status(NAME)))
        self.create(JOBS, job_of())

    def create(self, kind, raw, namespace="team"):
        meta = {**raw["metadata"], "namespace": namespace}
        path = f"{PATHS[kind].format(namespace)}/{meta['name']}"
        stored = self.api.put(path, {**raw, "metadata": meta})
        self.cache.update(kind, stored)
        return stored

    def event(self, kind, raw, *, gone=False):
        """Change an object as a watch shows it, and return the change."""
        self.api.version += 1
        raw = {
            **raw,
            "metadata": {**raw["metadata"], "resourceVersion": str(self.api.version)},
        }
        return (self.cache.remove if gone else self.cache.update)(kind, raw)

    def list(self, during_list=lambda: None):
        self.api.during_list = during_list
        return asyncio.run(self._list())

    async def _list(self):
        await self.informers.list()
        queued = []
        while len(self.queue):
            queued.append(await self.queue.get())
        return queued

    @property
    def pod(self):
        return next(iter(self.cache.pods_of("team", NAME)), None)
