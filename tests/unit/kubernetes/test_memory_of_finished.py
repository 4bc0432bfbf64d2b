"""What the cache keeps of a finished pipeline: 20,000 of them fit into the memory of the chart."""

import gc
import json
import tracemalloc
from typing import Any

from support.operator.scenario import Scenario

from finetune_operator.api.spec import PipelineSpec
from finetune_operator.core.pipeline import Key, Pipeline
from finetune_operator.kubernetes import fast_json
from finetune_operator.kubernetes.cache.cache import (
    CLAIMS,
    JOBS,
    PIPELINES,
    ResourceCache,
)
from finetune_operator.kubernetes.resources.claim import build_claim
from finetune_operator.kubernetes.resources.job import build_job

Object = dict[str, Any]
UID = "0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0"
COUNT = 100
MOST_BYTES = 12_000
"""For a pipeline with four Jobs and a claim. 20,000 of them then take 230 MiB of the 512 MiB of the chart."""
ENDED = {"type": "Complete", "status": "True", "reason": "CompletionsReached"}


def finished_objects() -> list[tuple[str, Object]]:
    """Return a finished pipeline, its Jobs and its claim, with the kind of each."""
    scenario = Scenario()
    scenario.edit(deploy=None)
    cluster = scenario.finish().cluster
    stored = cluster.pipelines[scenario.key]
    spec = json.loads(stored.spec)
    meta = {"name": "demo", "namespace": "team", "uid": UID, "generation": 1}
    raw = {
        "metadata": meta,
        "spec": spec,
        "status": json.loads(stored.status),
    }
    pipeline = Pipeline(Key("team", "demo"), UID, 1, PipelineSpec.model_validate(spec))
    jobs = [build_job(pipeline, entry.template) for entry in cluster.jobs.values()]
    ended = [{**job, "status": {"conditions": [ENDED]}} for job in jobs]
    claim = build_claim(pipeline)
    return [(PIPELINES, raw), (CLAIMS, claim), *((JOBS, job) for job in ended)]


def received(raw: Object, number: int, index: int) -> Object:
    """Return a copy as an API server sends it, with a name and uids of its own."""
    text = json.dumps(raw).replace("demo", f"pipeline-{number:05d}")
    text = text.replace(UID, f"{number:08x}{UID[8:]}")
    copy: Object = fast_json.decode(text.encode())
    copy["metadata"] |= {
        "namespace": "team",
        "resourceVersion": str(10 * number + index + 1),
        "creationTimestamp": "2030-01-01T00:00:00Z",
    }
    copy["metadata"].setdefault("uid", f"{number:06x}{index:02x}{UID[8:]}")
    return copy


def test_finished_pipeline_takes_few_bytes() -> None:
    objects = finished_objects()
    cache = ResourceCache()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(COUNT):
            for index, (kind, raw) in enumerate(objects):
                cache.update(kind, received(raw, number, index))
        gc.collect()
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(cache.pipelines) == COUNT
    assert len(cache.jobs) == 4 * COUNT
    assert used / COUNT < MOST_BYTES
