"""JSON as deep as an API server takes it is its pipeline's trouble, and nobody else's."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.scenario import a_pipeline

from finetune_operator.errors import InvalidObject
from finetune_operator.kubernetes.cluster import parse_pipeline

ROOT = Path(__file__).parents[3]
PROGRAM = """
import asyncio, copy, json
from unittest.mock import patch
from aiohttp import web
from kubernetes.aio.client import Configuration
from support.http_server import answering
from support.scenario import a_pipeline
from finetune_operator import __main__ as operator
from finetune_operator.kubernetes.pods.probe import NoProbe
from finetune_operator.kubernetes.client import open_client
from finetune_operator.kubernetes.cache import ResourceCache
from finetune_operator.kubernetes.cluster import KubernetesCluster
from finetune_operator.kubernetes.pods.progress import NoProgress
from finetune_operator.controller.workqueue import WorkQueue
from finetune_operator.controller.signals import StopSignal
from finetune_operator.controller.informers import Informers
from finetune_operator.controller.worker import process
from finetune_operator.core.pipeline import Key
from finetune_operator.core.settings import Settings

DEPTH = 10_000 - 10  # within the list, its items, the spec ...
DEEP = '{"a":' * DEPTH + "1" + "}" * DEPTH
SPEC = a_pipeline().model_dump(mode="json", by_alias=True, exclude_none=True)


def text_of(name, affinity):
    meta = {"namespace": "team", "name": name, "uid": name, "generation": 1, "resourceVersion": "1"}
    train = {**SPEC["train"], "placement": {"affinity": "AFFINITY"}}
    return json.dumps({"metadata": meta, "spec": {**SPEC, "train": train}}).replace('"AFFINITY"', affinity)


written = []
TEXTS = {"good": text_of("good", "{}"), "bad": text_of("bad", DEEP)}


async def answer(request):
    *_, last = request.path.split("/")
    if request.method == "PATCH":
        written.append(await request.json())
        return web.Response(text=TEXTS["bad"], content_type="application/json")
    listed = ", ".join(TEXTS.values()) if last == "finetunepipelines" else ""
    text = TEXTS.get(last) or '{"metadata": {}, "items": [' + listed + "]}"
    return web.Response(text=text, content_type="application/json")


async def story(_options):
    found = json.loads(DEEP)
    assert len(json.dumps(copy.deepcopy(found))) > DEPTH
    async with answering(answer) as port:
        settings = Configuration()
        settings.host = f"http://127.0.0.1:{port}"
        async with open_client(settings) as api:
            books, queue = ResourceCache(), WorkQueue()
            await Informers(api, books, queue, StopSignal(), ("team",)).relist()
            assert set(books.pipelines) == {Key("team", "good"), Key("team", "bad")}
            cluster = KubernetesCluster(api, books, NoProgress(), NoProbe())
            assert await process(Key("team", "bad"), queue, cluster, Settings()) == "refused"
            assert "nested" in written[0]["status"]["conditions"][0]["message"]
            assert (await cluster.read(Key("team", "good"))).key.name == "good"
    try:  # something deeper still, as a server of somebody's may answer, ends nothing either
        json.loads("[" * 1_000_000)
    except RecursionError:
        print("the others went on")


with patch.object(operator, "run", story):
    operator.main([])
"""


def test_an_object_as_deep_as_an_api_server_takes_it_is_refused_and_the_others_go_on():
    path = [*(str(ROOT / part) for part in ("operator", "trainer", "tests")), str(ROOT)]
    program = f"import sys; sys.path[:0] = {path!r}\n{PROGRAM}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "the others went on\n"), done.stderr[-3000:]


@pytest.mark.parametrize("one", [{"a": 1}, [1]])
def test_an_affinity_that_no_pod_can_have_makes_its_pipeline_unusable(one):
    for _ in range(300):
        one = {"a": one} if isinstance(one, dict) else [one]
    spec = a_pipeline().model_dump(mode="json", by_alias=True, exclude_none=True)
    spec["train"]["placement"] = {"affinity": {"nodeAffinity": one}}
    meta = {"namespace": "team", "name": "demo", "uid": "u", "generation": 1}
    with pytest.raises(InvalidObject, match=r"train\.placement\.affinity: .*nested"):
        parse_pipeline({"metadata": meta, "spec": spec})
