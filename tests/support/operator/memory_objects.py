"""What a cluster in memory stores."""

from dataclasses import dataclass, field
from functools import lru_cache

from finetune_operator.api.spec import PipelineSpec
from finetune_operator.core.job_template import JobTemplate
from finetune_operator.core.observation import (
    JobState,
    ObservedJob,
)

LIVE = frozenset({JobState.WAITING, JobState.RUNNING})


class InvariantViolation(AssertionError):
    """The operator broke one of its invariants."""


@dataclass
class StoredPipeline:
    """A pipeline as an API server stores it: JSON text without nulls."""

    uid: str
    spec: str
    status: str = "{}"
    generation: int = 1
    version: int = 1
    annotations: dict[str, str] = field(default_factory=dict)

    def parsed_spec(self) -> PipelineSpec:
        """Return the spec, of which a cluster's cache also keeps a parsed object."""
        return _parsed(self.spec)


@lru_cache(maxsize=64)
def _parsed(text: str) -> PipelineSpec:
    return PipelineSpec.model_validate_json(text)


@dataclass
class MemoryJob:
    """A Job, its observed state, and whether the operator asked it to stop."""

    owner: str
    claim: str
    template: JobTemplate
    observed: ObservedJob
    asked_to_stop: bool = False

    @property
    def live(self) -> bool:
        """Whether the Job may still have a running process."""
        return self.observed.state in LIVE
