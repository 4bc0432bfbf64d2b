"""One FineTunePipeline, as read from the cluster."""

from dataclasses import dataclass, field

from typing_extensions import override

from finetune_operator.api.group import (
    ADOPT_ANNOTATION,
    CANCEL_ANNOTATION,
    RETRY_ANNOTATION,
)
from finetune_operator.api.spec import PipelineSpec
from finetune_operator.api.status import PipelineStatus


@dataclass(frozen=True, order=True)
class Key:
    """Namespace and name of a pipeline."""

    namespace: str
    name: str

    @override
    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True)
class Pipeline:
    """The custom resource: the spec of the user, and the last status written by the operator."""

    key: Key
    uid: str
    generation: int
    spec: PipelineSpec
    status: PipelineStatus = field(default_factory=PipelineStatus)
    resource_version: str = ""
    annotations: dict[str, str] = field(default_factory=dict)
    copied_annotations: frozenset[str] = frozenset()
    """Annotations that the object was created with. They are requests about the object that it is a copy of."""

    @property
    def retry(self) -> str | None:
        """Return the token of a retry request that has not been handled yet, or None."""
        return self._unhandled(RETRY_ANNOTATION, self.status.observed_annotations.retry)

    @property
    def cancel(self) -> str | None:
        """Return the token of a cancel request that has not been handled yet, or None."""
        return self._unhandled(
            CANCEL_ANNOTATION, self.status.observed_annotations.cancel
        )

    @property
    def adopt(self) -> str | None:
        """Return the published model to adopt, or None. A copied manifest brings it along on purpose."""
        value = self.annotations.get(ADOPT_ANNOTATION)
        return value if value != self.status.observed_annotations.adopt else None

    def _unhandled(self, annotation: str, handled: str | None) -> str | None:
        value = self.annotations.get(annotation)
        return value if value != handled and not self.is_copied(annotation) else None

    def is_copied(self, annotation: str) -> bool:
        """Return whether the operator sees the object for the first time, and the annotation came with its creation."""
        is_new = not self.status.observed_version
        return is_new and annotation in self.copied_annotations
