"""What the cache keeps of objects that are gone has a fixed length."""

import gc
import tracemalloc

from support.operator.cluster_objects import job_of, pipeline_object, pod_of

from finetune_operator.kubernetes.cache.cache import (
    CLAIMS,
    EVENTS,
    JOBS,
    PIPELINES,
    PODS,
    ResourceCache,
)
from finetune_operator.kubernetes.translate.object import Object


def warning(pod: str) -> Object:
    involved = {"kind": "Pod", "namespace": "team", "name": pod}
    event = {
        "type": "Warning",
        "message": "FailedScheduling " * 12,
        "lastTimestamp": "2030-01-01T00:00:00Z",
    }
    return {
        **event,
        "involvedObject": involved,
        "metadata": {"namespace": "team", "name": f"{pod}.1"},
    }


def churned(cache: ResourceCache, numbers: range) -> int:
    """Return the memory in bytes that pipelines leave behind which came, were warned about, lost a Job and went."""
    before = tracemalloc.get_traced_memory()[0]
    for number in numbers:
        name = f"pipeline-with-a-long-name-{number}"
        version = 4 * number
        objects = {
            PIPELINES: pipeline_object(name, version=version),
            CLAIMS: {
                "metadata": {
                    "namespace": "team",
                    "name": f"{name}-workspace",
                    "resourceVersion": str(version),
                }
            },
            JOBS: job_of(name, version=version),
            PODS: pod_of(name, version=version),
        }
        for kind, result in objects.items():
            cache.update(kind, result)
        cache.update(EVENTS, warning(f"{name}-pod"))
        for kind in (PODS, JOBS, PIPELINES, CLAIMS):
            gone = objects[kind]
            cache.remove(
                kind,
                {
                    **gone,
                    "metadata": {
                        **gone["metadata"],
                        "resourceVersion": str(version + 1),
                    },
                },
            )
    gc.collect()
    return tracemalloc.get_traced_memory()[0] - before


def test_memory_of_deleted_objects_is_bounded(monkeypatch):
    for limit in (
        "finetune_operator.kubernetes.cache.store.DELETIONS_KEPT",
        "finetune_operator.kubernetes.cache.warning_events.WARNINGS_KEPT",
    ):
        monkeypatch.setattr(limit, 128)
    cache = ResourceCache()
    tracemalloc.start()
    try:
        growth = [
            churned(cache, range(start, start + 300))
            for start in range(1000, 2200, 300)
        ]
    finally:
        tracemalloc.stop()
    assert growth[0] > 64 * 2**10
    assert growth[-1] < 8 * 2**10  # after the last resize of a dict
