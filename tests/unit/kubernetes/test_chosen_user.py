"""Pods that name no user and no group, so that a cluster such as OpenShift chooses them."""

import json

import pytest
from support.operator.built_objects import MANIFESTS, built_objects, load_manifest

from finetune_operator.core.settings import Settings

CHOSEN = ("runAsUser", "runAsGroup", "fsGroup")


@pytest.mark.parametrize(
    "path", MANIFESTS, ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_no_object_names_a_user_if_the_cluster_chooses_it(path):
    settings = Settings(sets_user=False)
    objects = built_objects(load_manifest(path), "team", settings)
    assert objects.workloads
    for workload in objects.workloads.values():
        text = json.dumps(workload)
        assert not [field for field in CHOSEN if f'"{field}"' in text]
        context = workload["spec"]["template"]["spec"]["securityContext"]
        # The level restricted still asks for both.
        assert context["runAsNonRoot"] is True
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}


def test_pods_name_an_unprivileged_user_by_default():
    objects = built_objects(load_manifest(MANIFESTS[0]), "team")
    for workload in objects.workloads.values():
        context = workload["spec"]["template"]["spec"]["securityContext"]
        assert {context[field] for field in CHOSEN} == {65532}
