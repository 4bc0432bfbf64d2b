"""A manifest that is a copy of another object has the requests about that object."""

import asyncio
from typing import Any

import pytest
from support.operator.fake_api import FakeApi
from support.operator.scenario import START, a_pipeline

from finetune_operator.core.pipeline import Key
from finetune_operator.core.settings import Settings
from finetune_operator.kubernetes.cache.cache import PIPELINES, ResourceCache
from finetune_operator.kubernetes.cluster import KubernetesCluster
from finetune_operator.kubernetes.pods.probe import NoProbe
from finetune_operator.kubernetes.pods.progress import NoProgress
from finetune_operator.reconcile import reconcile

PIPELINE = "/apis/finetune.dev/v1alpha1/namespaces/team/finetunepipelines/demo"
CANCEL = "finetune.dev/cancel"
CREATED = "2030-01-01T00:00:00Z"
BEFORE = "2029-12-31T23:59:59Z"
AFTER = "2030-01-01T00:00:01Z"
ANNOTATION: dict[str, Any] = {"f:metadata": {"f:annotations": {f"f:{CANCEL}": {}}}}
WHOLE = {**ANNOTATION, "f:spec": {}}


def managed(time, fields):
    """Return the record of a client that has written the annotation."""
    return [{"manager": "kubectl", "time": time, "fieldsV1": fields}]


class Copy:
    """A pipeline with the annotation, which no operator has seen."""

    def __init__(self, managed_fields):
        self.api = FakeApi()
        spec = a_pipeline().model_dump(mode="json", by_alias=True, exclude_none=True)
        meta = {
            "uid": "uid-demo",
            "generation": 1,
            "creationTimestamp": CREATED,
            "annotations": {CANCEL: "1"},
            "managedFields": managed_fields,
        }
        self.api.put(PIPELINE, {"metadata": meta, "spec": spec, "status": {}})

    def reconcile(self):
        """Reconcile as an operator that has just started."""
        cache = ResourceCache()
        cache.update(PIPELINES, self.api.objects[PIPELINE])
        cluster = KubernetesCluster(self.api, cache, NoProgress(), NoProbe())
        asyncio.run(reconcile(Key("team", "demo"), cluster, Settings(), START))
        return self.api.objects[PIPELINE]["status"]


@pytest.mark.parametrize(
    "managed_fields", [managed(CREATED, WHOLE), managed(BEFORE, ANNOTATION)]
)
def test_copied_request_to_cancel_cancels_nothing(managed_fields):
    """The second object was written with the managed fields of the first."""
    copied = Copy(managed_fields)
    assert copied.reconcile()["phase"] != "Cancelled"
    # The operator has seen the value, so a later write of the same manifest requests nothing.
    copied.api.objects[PIPELINE]["metadata"]["managedFields"] = managed(AFTER, WHOLE)
    assert copied.reconcile()["phase"] != "Cancelled"
    copied.api.objects[PIPELINE]["metadata"]["annotations"] = {CANCEL: "2"}
    assert copied.reconcile()["cancelled"] is True


@pytest.mark.parametrize(
    "managed_fields",
    [managed(AFTER, WHOLE), managed(CREATED, ANNOTATION), [], None],
)
def test_request_after_the_creation_cancels(managed_fields):
    """The user has cancelled before any operator has seen the object."""
    assert Copy(managed_fields).reconcile()["cancelled"] is True
