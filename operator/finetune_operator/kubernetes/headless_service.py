"""The headless Service by whose name the pods of an attempt find each other."""

from finetune_operator.core.metadata import headless_service_name
from finetune_operator.core.pipeline import Pipeline
from finetune_operator.kubernetes import paths
from finetune_operator.kubernetes.cache.cache import SERVICES, ResourceCache
from finetune_operator.kubernetes.client import KubernetesClient
from finetune_operator.kubernetes.resources.headless_service import (
    build_headless_service,
)
from finetune_operator.kubernetes.resources.owner_references import foreign_service
from finetune_operator.kubernetes.translate.api_errors import AlreadyExists, Blocked


async def create_headless_service(
    api: KubernetesClient, cache: ResourceCache, pipeline: Pipeline, stage: str
) -> None:
    """Create the Service of the stage's attempts unless it exists. Raises Blocked if another owner has the name."""
    namespace = pipeline.key.namespace
    name = headless_service_name(pipeline.key.name, stage)
    service = cache.services.get((namespace, name))
    desired = build_headless_service(pipeline, stage)
    if service is None:
        try:
            cache.update(SERVICES, await api.create(paths.services(namespace), desired))
        except AlreadyExists:
            # The watch of Services is behind, or the Service has lost the operator's label.
            service = await api.get(paths.services(namespace, name))
    blocker = foreign_service(pipeline, service) if service else None
    if blocker:
        raise Blocked(blocker.reason, blocker.message)
    # An earlier version has cut the label of a long name in another way.
    selector = desired["spec"]["selector"]
    if service and service["spec"].get("selector") != selector:
        patch = {"spec": {"selector": selector}}
        path = paths.services(namespace, name)
        cache.update(SERVICES, await api.patch(path, patch))
