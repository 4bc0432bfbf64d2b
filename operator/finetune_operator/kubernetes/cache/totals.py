"""Totals over all cached pipelines, for metrics."""

from collections import Counter
from collections.abc import Iterator

from finetune_operator.core.metadata import SERVER, service_name
from finetune_operator.kubernetes.cache.cache import ResourceCache
from finetune_operator.kubernetes.cache.children import owner_uids
from finetune_operator.kubernetes.cache.pipeline import CachedPipeline, WaitingStage


def phases(cache: ResourceCache) -> Counter[str]:
    """Return the number of pipelines in each phase."""
    return Counter(pipeline.phase for pipeline in _pipelines(cache))


def unreadable(cache: ResourceCache) -> int:
    """Return the number of pipelines that this version of the operator cannot read."""
    return sum(pipeline.unreadable for pipeline in _pipelines(cache))


def waiting(cache: ResourceCache) -> Iterator[WaitingStage]:
    """Yield the waiting stage of each pipeline with a waiting stage."""
    for pipeline in _pipelines(cache):
        if pipeline.waiting:
            yield pipeline.waiting


def servers_down(cache: ResourceCache) -> int:
    """Return the number of pipelines with a Service that leads to no ready pod, whatever their phase."""
    return sum(_is_server_down(cache, pipeline) for pipeline in _pipelines(cache))


def _pipelines(cache: ResourceCache) -> Iterator[CachedPipeline]:
    for entry in cache.pipelines.entries.values():
        yield entry.value


def _is_server_down(cache: ResourceCache, pipeline: CachedPipeline) -> bool:
    namespace = pipeline.key.namespace
    service = cache.services.get((namespace, service_name(pipeline.key.name)))
    if service is None or pipeline.uid not in owner_uids(service):
        return False
    target = service["spec"]["selector"].get(SERVER)
    if not target:
        return False
    server = cache.deployments.get((namespace, target))
    return server is None or not server["status"]["readyReplicas"]
