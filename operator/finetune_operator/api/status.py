"""The status of a FineTunePipeline, written by the operator.

`assess` reads back only what cannot be observed again: identities, attempts and their outcomes, counters, results,
`budgetBaseAttempt`, `cancelled` and `observedAnnotations`. Phase, stage, progress, conditions and every state are
output for users and tools.
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
"""Attempts per stage in the status; more would let the object grow without limit."""


def truncate_message(text: str) -> str:
    """Return the text cut to the maximum length of a Message; the API server rejects a status with a longer one."""
    return text if len(text) <= MESSAGE_LENGTH else text[: MESSAGE_LENGTH - 2] + " …"


class StageState(StrEnum):
    """State of a stage."""

    PENDING = "Pending"
    QUEUED = "Queued"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    SKIPPED = "Skipped"


class Outcome(StrEnum):
    """Outcome of an attempt."""

    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    """The program failed. Counts against retries.failures."""
    INTERRUPTED = "Interrupted"
    """The attempt was evicted or preempted, or its node was lost. Counts against retries.interruptions."""
    STOPPED = "Stopped"
    """Stopped on request: suspended, cancelled, or the spec changed. Counts against no budget."""


class AttemptStatus(ContractModel):
    """One attempt of a stage, which is one Job."""

    number: int = Field(ge=1)
    """Number of the attempt, starting at 1. Never reused within a stage."""
    job: str
    """Name of the Job."""
    identity: str
    """Hash of everything that determines the attempt's result."""
    execution: str
    """Hash of how the attempt runs: resources, placement, image and environment."""
    outcome: Outcome = Outcome.RUNNING
    """Outcome of the attempt, or Running."""
    reason: Reason = Reason.PROGRESSING
    """Machine-readable reason of the outcome."""
    message: Message = ""
    """Termination message of the process, or what the operator observed."""
    exit_code: int | None = None
    """Exit code of the process. Absent if it was not observed."""
    stopping: Reason | None = None
    """Why the operator stopped the attempt. Absent if it did not."""
    created_at: datetime | None = None
    """Time at which the Job was first observed."""
    started_at: datetime | None = None
    """Time at which the process started."""
    finished_at: datetime | None = None
    """Time at which the attempt ended."""
    start_step: int | None = None
    """Step at which the attempt began. Greater than 0 after a resume."""
    last_step: int | None = None
    """Last step that the attempt is known to have finished."""
    step_seconds: float | None = None
    """Mean duration of a step, in seconds."""
    lost_steps: int | None = None
    """Steps of this attempt that the next one had to repeat. Absent until known."""
    lost_seconds: float | None = None
    """Time that those steps had taken, in seconds."""


class StageStatus(ContractModel):
    """Status of one stage."""

    state: StageState = StageState.PENDING
    """State of the stage."""
    reason: Reason = Reason.PROGRESSING
    """Machine-readable reason of the state."""
    message: Message = ""
    """Human-readable explanation of the state."""
    identity: str = ""
    """Hash of everything that determines the stage's result."""
    execution: str = ""
    """Hash of how the stage runs: resources, placement, image and environment."""
    attempts: Annotated[tuple[AttemptStatus, ...], Field(json_schema_extra={"x-kubernetes-list-type": "atomic"})] = ()
    """The newest ten attempts of the stage, oldest first."""
    failures: int = 0
    """Number of failed attempts with this identity."""
    interruptions: int = 0
    """Number of interrupted attempts with this identity."""
    lost_steps: int = 0
    """Steps that had to be repeated, over all attempts with this identity."""
    lost_seconds: float = 0.0
    """Time that those steps had taken, in seconds."""
    active_seconds: float = 0.0
    """Running time of ended attempts with this identity since the last retry request, in seconds."""
    budget_base_attempt: int = 0
    """Attempts up to this number no longer count, because of a retry request or a change of the spec."""
    budget_base_failures: int = 0
    """Number of failures among those attempts."""
    budget_base_interruptions: int = 0
    """Number of interruptions among those attempts."""
    started_at: datetime | None = None
    """Time at which the first attempt started."""
    finished_at: datetime | None = None
    """Time at which the stage succeeded."""
    progress: MaybeProgress = None
    """Latest progress report of the current attempt."""
    result: StoredResult | None = None
    """Result of the stage. Absent until it succeeds."""
    model_digest: str | None = None
    """Digest of the base model in the stage's latest result; stays while the stage is repeated. Only of prepare."""

    @property
    def failures_counted(self) -> int:
        """Return the failures that count against retries.failures."""
        return self.failures - self.budget_base_failures

    @property
    def interruptions_counted(self) -> int:
        """Return the interruptions that count against retries.interruptions."""
        return self.interruptions - self.budget_base_interruptions

    @property
    def last_attempt(self) -> AttemptStatus | None:
        """Return the newest attempt, running or ended, or None."""
        return self.attempts[-1] if self.attempts else None


class GateStatus(ContractModel):
    """Comparison of the measured score with the gate."""

    task: str
    """Task of the gate."""
    metric: str
    """Metric of the gate."""
    value: float | None = None
    """Measured score. Absent if it was not measured or is not finite."""
    stderr: float | None = None
    """Standard error of the score. Absent if it is unknown or not finite."""
    base: float | None = None
    """Score of the base model on the same questions. Absent if it was not measured or is not finite."""
    difference_stderr: float | None = None
    """Standard error of the paired difference between the two. Absent if it is unknown or not finite."""
    threshold: float
    """Threshold of the gate."""
    measured: bool = True
    """Whether there is a score to compare. False if evaluate.gate needs one that was not measured."""
    passed: bool
    """Whether the score, or its difference from the base's, is above the threshold by the margin of error."""
    message: Message
    """Human-readable comparison."""


class ModelStatus(ContractModel):
    """The published model."""

    uri: str
    """URI of the model."""
    digest: str
    """Digest of the model's files."""
    endpoint: str | None = None
    """URL of the OpenAI-compatible API inside the cluster. Absent until the server has answered the prompt."""


class HandledAnnotations(ContractModel):
    """Values of the annotations that the operator handled last."""

    retry: str | None = None
    """Last handled value of the retry annotation."""
    cancel: str | None = None
    """Last handled value of the cancel annotation."""


class PipelineStatus(ContractModel):
    """Observed state of the pipeline, written by the operator."""

    observed_generation: int = 0
    """Generation of the spec that this status describes."""
    phase: str = "Pending"
    """One-word summary for users. The operator never reads it back."""
    stage: str = ""
    """Stage that is running, or at which the pipeline stopped."""
    progress: str = ""
    """Progress of that stage, in percent."""
    attempt: int = 0
    """Number of the newest attempt of that stage."""
    conditions: Annotated[
        tuple[Condition, ...],
        Field(json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}),
    ] = ()
    """Conditions: Ready, Reconciling, Stalled, Finished, and one for each stage."""
    stages: dict[str, StageStatus] = Field(default_factory=dict)
    """Status of each stage, by name."""
    gate: GateStatus | None = None
    """Comparison of the measured score with the gate. Absent until evaluate is done."""
    model: ModelStatus | None = None
    """The published model. Absent until push is done."""
    interruptions: int = 0
    """Interrupted attempts of all stages."""
    lost_steps: int = 0
    """Steps that had to be repeated, over all stages."""
    lost_seconds: float = 0.0
    """Time that those steps had taken, in seconds."""
    started_at: datetime | None = None
    """Time at which the first stage started."""
    finished_at: datetime | None = None
    """Time at which the pipeline finished, successfully or not."""
    cancelled: bool = False
    """Whether the pipeline was cancelled and not retried since."""
    observed_annotations: HandledAnnotations = HandledAnnotations()
    """Values of the annotations that the operator handled last."""
