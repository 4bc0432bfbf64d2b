"""One FineTunePipeline as it was read."""

from dataclasses import dataclass, field

from typing_extensions import override

from finetune_operator.api.group import CANCEL_ANNOTATION, RETRY_ANNOTATION
from finetune_operator.api.spec import PipelineSpec
from finetune_operator.api.status import PipelineStatus


@dataclass(frozen=True, order=True)
class Key:
    """Which pipeline."""

    namespace: str
    name: str

    @override
    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True)
class Pipeline:
    """The object: what is asked, and what was last said of it."""

    key: Key
    uid: str
    generation: int
    spec: PipelineSpec
    status: PipelineStatus = field(default_factory=PipelineStatus)
    resource_version: str = ""
    annotations: dict[str, str] = field(default_factory=dict)

    @property
    def retry(self) -> str | None:
        """A retry that was asked for and not obeyed yet."""
        return self._verb(RETRY_ANNOTATION, self.status.observed_annotations.retry)

    @property
    def cancel(self) -> str | None:
        """A cancellation that was asked for and not obeyed yet."""
        return self._verb(CANCEL_ANNOTATION, self.status.observed_annotations.cancel)

    def _verb(self, annotation: str, handled: str | None) -> str | None:
        value = self.annotations.get(annotation)
        return value if value != handled else None
