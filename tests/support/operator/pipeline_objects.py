"""Pipelines as a user sends them, and as the API server stores them."""

import json
from typing import Any

from support.operator.scenario import Scenario

from finetune_operator.api.group import API_VERSION, KIND

Object = dict[str, Any]


def pipeline_manifest(name: str, spec: Object) -> Object:
    """Return a pipeline as its user sends it."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": name},
        "spec": spec,
    }


def stored_object(scenario: Scenario) -> Object:
    """Return the custom resource with its status."""
    stored = scenario.cluster.pipelines[scenario.key]
    # The default of the CRD: the object exists before the operator has written anything.
    status = {"observedGeneration": -1} | json.loads(stored.status)
    metadata: Object = {
        "name": scenario.key.name,
        "namespace": scenario.key.namespace,
        "uid": stored.uid,
    }
    metadata |= {"generation": stored.generation}
    if stored.annotations:
        metadata["annotations"] = dict(stored.annotations)
    spec = json.loads(stored.spec)
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": metadata,
        "spec": spec,
        "status": status,
    }
