"""The results that a stage must not remove, because other pipelines of the namespace use them."""

import asyncio

import pytest
from support.operator.cluster_objects import pipeline_object
from support.operator.fake_api import FakeApi
from support.operator.shared_claim import FINETUNE, JOBS_PATH, NOW, SharedClaim

from finetune_operator.core.pipeline import Key
from finetune_operator.core.settings import Settings
from finetune_operator.kubernetes.cache.cache import PIPELINES, ResourceCache
from finetune_operator.kubernetes.cluster import KubernetesCluster
from finetune_operator.kubernetes.pods.probe import NoProbe
from finetune_operator.kubernetes.pods.progress import NoProgress
from finetune_operator.reconcile import reconcile

RESULT = "train/0123456789abcdef"


def variables_of(api: FakeApi, pipeline: str) -> dict[str, str]:
    """Return the environment of the pipeline's only Job."""
    [job] = [
        value
        for path, value in api.objects.items()
        if path.startswith(f"{JOBS_PATH}/{pipeline}-")
    ]
    [container] = job["spec"]["template"]["spec"]["containers"]
    return {entry["name"]: entry.get("value", "") for entry in container["env"]}


def start(*others, spec=None):
    """Return the environment of the first stage of the pipeline demo, beside other pipelines."""
    api = FakeApi()
    cache = ResourceCache()
    for pipeline in (pipeline_object(), *others):
        path = f"{FINETUNE}/{pipeline['metadata']['name']}"
        cache.update(PIPELINES, api.put(path, pipeline))
    cluster = KubernetesCluster(api, cache, NoProgress(), NoProbe())
    asyncio.run(reconcile(Key("team", "demo"), cluster, Settings(), NOW))
    return variables_of(api, "demo")


def other(claim="", **spec):
    pipeline = pipeline_object("other", claim=claim)
    pipeline["spec"] |= spec
    return pipeline


def test_pipeline_alone_on_its_claim_names_its_own_result():
    variables = start(other())
    [own] = variables["FINETUNE_KEEP"].split(",")
    assert own.startswith("prepare/")
    assert variables["FINETUNE_KEEP_UNUSED"] == "1"
    assert "FINETUNE_WORKSPACE_SHARED" not in variables


def test_claim_that_another_pipeline_names_is_shared():
    assert start(other("demo-workspace"))["FINETUNE_WORKSPACE_SHARED"] == "1"


@pytest.mark.parametrize(
    "spec",
    [
        {"model": {"uri": f"pvc://demo-workspace/{RESULT}/output"}},
        {"datasets": [{"uri": f"pvc://demo-workspace/{RESULT}"}]},
        {"validation": {"uri": f"pvc://demo-workspace/{RESULT}/a.jsonl"}},
        {"train": {"startFrom": {"uri": f"pvc://demo-workspace/{RESULT}/output"}}},
    ],
)
def test_result_that_another_pipeline_reads_is_kept(spec):
    assert start(other(**spec))["FINETUNE_KEEP"].split(",")[1:] == [RESULT]


@pytest.mark.parametrize(
    "spec",
    [
        {"model": {"uri": f"pvc://foreign/{RESULT}/output"}},
        {"model": "text", "train": [], "datasets": 7, "validation": None},
        {"model": {"uri": 7}},
    ],
)
def test_other_specs_keep_nothing(spec):
    assert len(start(other(**spec))["FINETUNE_KEEP"].split(",")) == 1


def test_pipelines_on_an_existing_claim_share_it():
    sharing = SharedClaim()
    sharing.reconcile("older")
    assert variables_of(sharing.api, "older")["FINETUNE_WORKSPACE_SHARED"] == "1"
