"""Build the headless Service that gives each pod of an attempt a name: pure."""

from typing import Any

from finetune_operator.core.metadata import (
    MANAGED_BY,
    MANAGED_BY_VALUE,
    PIPELINE,
    STAGE,
    headless_service_name,
    pipeline_label,
)
from finetune_operator.core.pipeline import Pipeline
from finetune_operator.kubernetes.resources.job import PIPELINE_NAME
from finetune_operator.kubernetes.resources.owner_references import owner_references
from finetune_trainer.contract.environment import RENDEZVOUS_PORT


def build_headless_service(pipeline: Pipeline, stage: str) -> dict[str, Any]:
    """Build the Service of all attempts of a stage; the host name of each pod has the attempt and its index.

    It names pods that are not ready, too: they become ready together, after they have found each other.
    """
    selector = {PIPELINE: pipeline_label(pipeline.key.name), STAGE: stage}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": headless_service_name(pipeline.key.name, stage),
            "namespace": pipeline.key.namespace,
            "labels": {MANAGED_BY: MANAGED_BY_VALUE, **selector},
            "annotations": {PIPELINE_NAME: pipeline.key.name},
            "ownerReferences": owner_references(pipeline),
        },
        "spec": {
            # Without an address of its own, the name resolves to the pods' addresses.
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": selector,
            "ports": [{"name": "rendezvous", "port": RENDEZVOUS_PORT}],
        },
    }
