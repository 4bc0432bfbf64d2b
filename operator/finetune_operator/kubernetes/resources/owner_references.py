"""Owner references between a pipeline and its children: pure."""

from finetune_operator.api.conditions import Reason
from finetune_operator.api.group import API_VERSION, KIND
from finetune_operator.core.observation import Blocker
from finetune_operator.core.pipeline import Pipeline
from finetune_operator.kubernetes.translate.object import Object


def owner_reference(pipeline: Pipeline) -> Object:
    """Return the reference that makes Kubernetes delete a child with its pipeline."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": pipeline.key.name,
        "uid": pipeline.uid,
        "controller": True,
        # In a foreground deletion, the pipeline stays until this child is gone.
        "blockOwnerDeletion": True,
    }


def owner_references(pipeline: Pipeline) -> list[Object]:
    """Return metadata.ownerReferences of a child."""
    return [owner_reference(pipeline)]


def is_owned_by_uid(uid: str, child: Object) -> bool:
    """Return whether the object of this uid owns an object."""
    references = child["metadata"].get("ownerReferences", [])
    return any(reference["uid"] == uid for reference in references)


def is_owned_by(pipeline: Pipeline, child: Object) -> bool:
    """Return whether an object is owned by this pipeline, and not by an earlier pipeline of the same name."""
    return is_owned_by_uid(pipeline.uid, child)


def foreign_service(pipeline: Pipeline, child: Object) -> Blocker | None:
    """Return why the pipeline cannot use a Service of its name: another owner has created it. None if it can."""
    if is_owned_by(pipeline, child):
        return None
    name = child["metadata"]["name"]
    message = f"the Service {name} was not created for this pipeline: delete it, or rename the pipeline"
    return Blocker(Reason.DEPENDENCY_NOT_READY, message)
