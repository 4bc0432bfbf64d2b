"""What the operator says of a pipeline.

`assess` reads back only what cannot be observed again: identities, attempts and their outcomes, counters,
results, `budgetBaseAttempt`, `cancelled`, `observedAnnotations`. Phase, stage, progress, conditions and every state are written for readers.
"""

from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints, WithJsonSchema

from finetune_operator.api.conditions import Condition, Reason
from finetune_trainer.contract import AnyResult, ContractModel, MaybeProgress

MESSAGE_LENGTH = 4096
Message = Annotated[str, StringConstraints(max_length=MESSAGE_LENGTH)]
StoredResult = Annotated[AnyResult, WithJsonSchema({"type": "object", "x-kubernetes-preserve-unknown-fields": True})]

ATTEMPTS_KEPT = 10


def truncate_message(words: str) -> str:
    """Cut words to the length of a Message, or the API server would refuse the whole status."""
    return words if len(words) <= MESSAGE_LENGTH else words[: MESSAGE_LENGTH - 2] + " …"


class StageState(StrEnum):
    """What a stage is."""

    PENDING = "Pending"
    QUEUED = "Queued"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    SKIPPED = "Skipped"


class Outcome(StrEnum):
    """How an attempt ended, if it has."""

    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    """The program's own fault; counts against retries.failures."""
    INTERRUPTED = "Interrupted"
    """Its node or its right to run was taken; counts against retries.interruptions."""
    STOPPED = "Stopped"
    """Asked for: suspended, cancelled, changed. Counts against nothing."""


class AttemptStatus(ContractModel):
    """One Job."""

    number: int = Field(ge=1)
    """1 for the first; never used twice in one stage."""
    job: str
    """The Job's name."""
    identity: str
    """Hash over what it was to make."""
    execution: str
    """Hash over how it ran."""
    outcome: Outcome = Outcome.RUNNING
    """How it ended, if it has."""
    reason: Reason = Reason.PROGRESSING
    """Why it ended so."""
    message: Message = ""
    """What it said, or what was seen."""
    exit_code: int | None = None
    """Of the process; absent where nobody saw it."""
    stopping: Reason | None = None
    """Why the operator asked it to stop, if it did."""
    created_at: datetime | None = None
    """When its Job was first seen."""
    started_at: datetime | None = None
    """When its process started."""
    finished_at: datetime | None = None
    """When it ended."""
    start_step: int | None = None
    """The step it began at: more than 0 after a resume."""
    last_step: int | None = None
    """The last step it was seen to finish."""
    step_seconds: float | None = None
    """Mean seconds of a step."""
    lost_steps: int | None = None
    """Steps it had done that the next attempt had to do again; absent until that is known."""
    lost_seconds: float | None = None
    """What those steps had taken."""


class StageStatus(ContractModel):
    """One stage."""

    state: StageState = StageState.PENDING
    """What the stage is."""
    reason: Reason = Reason.PROGRESSING
    """Why, in one word."""
    message: Message = ""
    """Why, for people."""
    identity: str = ""
    """Hash over everything that determines the stage's result."""
    execution: str = ""
    """Hash over how the stage runs."""
    attempts: Annotated[tuple[AttemptStatus, ...], Field(json_schema_extra={"x-kubernetes-list-type": "atomic"})] = ()
    """The newest ten Jobs of this stage, oldest first."""
    failures: int = 0
    """Attempts that failed, of all with this identity."""
    interruptions: int = 0
    """Attempts that were interrupted, of all with this identity."""
    lost_steps: int = 0
    """Steps that had to be done again, in all attempts with this identity."""
    lost_seconds: float = 0.0
    """What those steps had taken."""
    active_seconds: float = 0.0
    """How long its ended attempts with this identity ran, since someone last asked for a retry."""
    budget_base_attempt: int = 0
    """Attempts up to this number do not count any more: someone asked for a retry, or the spec changed."""
    budget_base_failures: int = 0
    """How many of the failures these were."""
    budget_base_interruptions: int = 0
    """How many of the interruptions these were."""
    started_at: datetime | None = None
    """When its first attempt started."""
    finished_at: datetime | None = None
    """When it succeeded."""
    progress: MaybeProgress = None
    """Where the running attempt is."""
    result: StoredResult | None = None
    """What it made."""

    @property
    def failures_counted(self) -> int:
        """Failures that count against retries.failures."""
        return self.failures - self.budget_base_failures

    @property
    def interruptions_counted(self) -> int:
        """Interruptions that count against retries.interruptions."""
        return self.interruptions - self.budget_base_interruptions

    @property
    def last_attempt(self) -> AttemptStatus | None:
        """The newest Job, running or not."""
        return self.attempts[-1] if self.attempts else None


class GateStatus(ContractModel):
    """The score that decides."""

    task: str
    metric: str
    value: float | None = None
    stderr: float | None = None
    threshold: float
    measured: bool = True
    """Whether there is a score to compare; false: evaluate.gate asks for one that was not measured."""
    passed: bool
    message: Message
    """The comparison in words."""


class ModelStatus(ContractModel):
    """The published model."""

    uri: str
    digest: str
    endpoint: str | None = None
    """Where the cluster's clients find the OpenAI-compatible API, once `deploy` has answered."""


class HandledAnnotations(ContractModel):
    """The values of the annotations that were obeyed last."""

    retry: str | None = None
    cancel: str | None = None


class PipelineStatus(ContractModel):
    """Everything the operator says of a pipeline."""

    observed_generation: int = 0
    """The generation of the spec that all this speaks of."""
    phase: str = "Pending"
    """One word for people; nothing reads it back."""
    stage: str = ""
    """The stage that is running, or where it stopped."""
    progress: str = ""
    """How far that stage is."""
    attempt: int = 0
    """Which attempt of that stage."""
    conditions: Annotated[
        tuple[Condition, ...],
        Field(json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}),
    ] = ()
    """Observations, in the form that kubectl, Flux and Argo CD read."""
    stages: dict[str, StageStatus] = Field(default_factory=dict)
    """Every stage by name."""
    gate: GateStatus | None = None
    """The score that decides, once it is known."""
    model: ModelStatus | None = None
    """The published model, once it is."""
    interruptions: int = 0
    """Of all stages."""
    lost_steps: int = 0
    """Of all stages."""
    lost_seconds: float = 0.0
    """Of all stages."""
    started_at: datetime | None = None
    """When the first stage started."""
    finished_at: datetime | None = None
    """When the pipeline finished, well or not."""
    cancelled: bool = False
    """Cancelled, and not retried since."""
    observed_annotations: HandledAnnotations = HandledAnnotations()
    """The annotations that were obeyed."""
