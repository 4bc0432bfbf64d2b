"""A pipeline with JSON as deeply nested as an API server accepts is invalid, and does not affect other pipelines."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.operator.scenario import a_pipeline

from finetune_operator.errors import InvalidObject
from finetune_operator.kubernetes.pipeline_object import parse_pipeline

ROOT = Path(__file__).parents[3]
PROGRAM = """
import asyncio, copy, json
from unittest.mock import patch
from aiohttp import web
from kubernetes.aio.client import Configuration
from support.http_server import serve_http
from support.operator.scenario import a_pipeline
from finetune_operator import __main__ as operator
from finetune_operator.kubernetes.pods.probe import NoProbe
from finetune_operator.kubernetes.client import open_client
from finetune_operator.kubernetes.cache.cache import ResourceCache
from finetune_operator.kubernetes.cluster import KubernetesCluster
from finetune_operator.kubernetes.pods.progress import NoProgress
from finetune_operator.controller.workqueue import WorkQueue
from finetune_operator.controller.signals import ShutdownSignal
from finetune_operator.controller.informers import Informers
from finetune_operator.controller.worker import process
from finetune_operator.core.pipeline import Key
from finetune_operator.core.settings import Settings

DEPTH = 10_000 - 10  # the list, its items and the spec are levels, too
DEEP = '{"a":' * DEPTH + "1" + "}" * DEPTH
SPEC = a_pipeline().model_dump(mode="json", by_alias=True, exclude_none=True)


def pipeline_json(name, affinity):
    meta = {"namespace": "team", "name": name, "uid": name, "generation": 1, "resourceVersion": "1"}
    train = {**SPEC["train"], "pod": {"affinity": "AFFINITY"}}
    return json.dumps({"metadata": meta, "spec": {**SPEC, "train": train}}).replace('"AFFINITY"', affinity)


patches = []
PIPELINES = {"good": pipeline_json("good", "{}"), "bad": pipeline_json("bad", DEEP)}


async def respond(request):
    *_, name = request.path.split("/")
    if request.method == "PATCH":
        patches.append(await request.json())
        return web.Response(text=PIPELINES["bad"], content_type="application/json")
    items = ", ".join(PIPELINES.values()) if name == "finetunepipelines" else ""
    text = PIPELINES.get(name) or '{"metadata": {}, "items": [' + items + "]}"
    return web.Response(text=text, content_type="application/json")


async def scenario(_options):
    parsed = json.loads(DEEP)
    assert len(json.dumps(copy.deepcopy(parsed))) > DEPTH
    async with serve_http(respond) as port:
        configuration = Configuration()
        configuration.host = f"http://127.0.0.1:{port}"
        async with open_client(configuration) as api:
            cache, queue = ResourceCache(), WorkQueue()
            await Informers(api, cache, queue, ShutdownSignal(), ("team",)).list()
            assert set(cache.pipelines.entries) == {("team", "good"), ("team", "bad")}
            cluster = KubernetesCluster(api, cache, NoProgress(), NoProbe())
            assert await process(Key("team", "bad"), queue, cluster, Settings()) == "invalid"
            assert "nested" in patches[0]["status"]["conditions"][0]["message"]
            assert (await cluster.read(Key("team", "good"))).key.name == "good"
    try:  # even deeper JSON, as a user's model server may return, does not end the process either
        json.loads("[" * 1_000_000)
    except RecursionError:
        print("the other pipelines went on")


with patch.object(operator, "run", scenario):
    operator.main([])
"""


def test_deepest_json_invalidates_only_its_own_pipeline():
    path = [*(str(ROOT / part) for part in ("operator", "trainer", "tests")), str(ROOT)]
    program = f"import sys; sys.path[:0] = {path!r}\n{PROGRAM}"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "the other pipelines went on\n"), (
        done.stderr[-3000:]
    )


@pytest.mark.parametrize("affinity", [{"a": 1}, [1]])
def test_deeply_nested_affinity_is_an_invalid_object(affinity):
    for _ in range(300):
        affinity = {"a": affinity} if isinstance(affinity, dict) else [affinity]
    spec = a_pipeline().model_dump(mode="json", by_alias=True, exclude_none=True)
    spec["train"]["pod"] = {"affinity": {"nodeAffinity": affinity}}
    meta = {"namespace": "team", "name": "demo", "uid": "u", "generation": 1}
    with pytest.raises(InvalidObject, match=r"train\.pod\.affinity: .*nested"):
        parse_pipeline({"metadata": meta, "spec": spec})
