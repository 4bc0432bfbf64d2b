"""Messages of a stage's process to the operator: its result, its progress, or why it stopped."""

import math
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    Field,
    PlainSerializer,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from finetune_trainer.contract.recipes import ContractModel

TERMINATION_MESSAGE_BYTES = 4096
"""Size limit of a termination message; the kubelet discards the rest."""
PROGRESS_BYTES = 64 << 10
"""Size limit of a stage's progress; the operator reads no more."""
MAX_NUMBER = 10**15
"""Limit of every number, so that sums of them remain valid numbers in JSON and in the API server."""
Number = TypeVar("Number", int, float)
MAX_TEXT_CHARACTERS = 256
"""Limit of a text in Progress; longer texts are truncated."""


def _in_json(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


JsonFloat = Annotated[float, PlainSerializer(_in_json, when_used="json")]
"""A float that is written to JSON as a string if it is NaN or infinite, because JSON has neither."""


def _check_bound(value: int) -> int:
    if abs(value) > MAX_NUMBER:
        raise ValueError(f"must not be larger than {MAX_NUMBER}")
    return value


def _drop_oversized(value: Number | None) -> Number | None:
    return value if value is not None and abs(value) <= MAX_NUMBER else None  # the comparison is False for NaN, too


def _in_utc(value: datetime) -> datetime:
    """Convert a time to UTC; a time without a zone is in UTC already. Raise ValueError if UTC cannot represent it."""
    try:
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
    except OverflowError:
        raise ValueError("cannot be represented in UTC") from None


BoundedInt = Annotated[int, AfterValidator(_check_bound)]
OptionalInt = Annotated[int | None, AfterValidator(_drop_oversized)]
"""An optional integer; a value above MAX_NUMBER becomes None, so that the other fields remain usable."""
OptionalFloat = Annotated[float | None, AfterValidator(_drop_oversized)]
"""An optional float; NaN and values above MAX_NUMBER become None, so that the other fields remain usable."""
ShortText = Annotated[str, AfterValidator(lambda text: text[:MAX_TEXT_CHARACTERS])]
UtcTime = Annotated[datetime, AfterValidator(_in_utc)]


class StageResult(ContractModel):
    """Fields common to all results. A stage writes result.json last, when all its other files are durable."""

    identity: str
    """Identity of the stage that produced the result."""
    digest: str
    """sha256:… over the stage's output."""


class PrepareResult(StageResult):
    """The packed rows, and how many records were used."""

    stage: Literal["prepare"] = "prepare"
    records: BoundedInt
    """Records read."""
    invalid: BoundedInt
    """Records that are invalid."""
    truncated: BoundedInt
    """Records truncated to the context length."""
    dropped: BoundedInt
    """Records dropped because they were too long."""
    train_rows: BoundedInt
    """Packed rows for training."""
    validation_rows: BoundedInt
    """Packed rows for validation."""
    train_tokens: BoundedInt
    """Tokens in the rows for training, without padding."""
    data_digest: str
    """sha256:… of the data set's file."""
    conversations: bool = False
    """Whether the records are conversations, so that the published tokenizer needs the chat template."""
    model_digest: str | None = None
    """sha256:… over the base model's weights, configuration and tokenizer; training uses no other base model."""


class TrainResult(StageResult):
    """The adapter; the digest covers adapter_model.safetensors and adapter_config.json."""

    stage: Literal["train"] = "train"
    steps: BoundedInt
    """Optimizer steps completed."""
    loss: JsonFloat
    """Mean training loss of the last logging window: cross-entropy per token, natural logarithm."""
    validation_loss: JsonFloat | None = None
    """Validation loss of the resulting adapter; absent without validation rows."""
    best_step: BoundedInt
    """The step of the resulting adapter."""
    tokens: BoundedInt
    """Tokens trained on, without padding and without repeated steps."""


class Score(ContractModel):
    """One metric of one task."""

    value: JsonFloat
    stderr: JsonFloat | None = None
    """Standard error; absent if lm-eval computes none."""
    base: JsonFloat | None = None
    """Value of the base model on the same questions; absent if it was not evaluated."""
    difference_stderr: JsonFloat | None = None
    """Standard error of the paired difference value - base; absent if the metric is not a mean over questions."""


class EvaluateResult(StageResult):
    """Scores of the configured tasks; lm-eval's complete output is in the stage's folder."""

    stage: Literal["evaluate"] = "evaluate"
    scores: dict[str, dict[str, Score]]
    """Scores by task and metric; a metric's name has no filter if only one filter was applied."""


class PushResult(StageResult):
    """The published model."""

    stage: Literal["push"] = "push"
    uri: str
    """Location of the published model."""
    size: BoundedInt
    """Total size of the model's files in bytes."""


class DeployResult(StageResult):
    """The model's answer to the prompt."""

    stage: Literal["deploy"] = "deploy"
    url: str
    """Endpoint that received the prompt."""
    answer: str
    """The model's answer to the prompt; at most 1,024 characters."""
    seconds_to_ready: JsonFloat
    """Seconds from the start of the server to its first successful health check."""
    long_running: bool = False
    """Whether the server keeps running after the stage: true on a cluster."""


AnyResult = Annotated[
    PrepareResult | TrainResult | EvaluateResult | PushResult | DeployResult, Field(discriminator="stage")
]


class Interruption(ContractModel):
    """The stage stopped on a signal; the next attempt resumes from its last saved step."""

    step: OptionalInt = None
    """The last completed optimizer step."""
    saved_step: OptionalInt = None
    """Step of the latest durable checkpoint; absent: the next attempt starts from the beginning."""


class Failure(ContractModel):
    """Why the stage failed."""

    message: str
    """What failed, the observed value, and the fix."""


class Progress(ContractModel):
    """State of a running stage; served as /progress and written to FINETUNE_PROGRESS_FILE."""

    stage: ShortText
    updated_at: UtcTime
    step: BoundedInt
    """Completed units: optimizer steps in train, requests in evaluate, records in prepare."""
    total: OptionalInt = None
    """Total number of units; absent: unknown."""
    start_step: OptionalInt = None
    """Unit at which this process started: more than 0 after a resume. Absent until it is known."""
    saved_step: OptionalInt = None
    """Latest unit that is durable and survives a kill."""
    loss: OptionalFloat = None
    validation_loss: OptionalFloat = None
    tokens_per_second: OptionalFloat = None
    step_seconds: OptionalFloat = None
    """Mean duration of a step in this process, in seconds."""
    eta_seconds: OptionalFloat = None
    """Estimated time to completion, in seconds."""
    note: ShortText = ""
    """Current activity if it is not a step, such as loading the model or validating."""


def _none_if_invalid(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    try:
        return handler(value)
    except ValidationError:
        return None


MaybeProgress = Annotated[Progress | None, WrapValidator(_none_if_invalid)]
"""Progress, or None if it is invalid, so that the rest of the message remains usable."""


class TerminationMessage(ContractModel):
    """Content of FINETUNE_TERMINATION_LOG, at most 4,096 bytes; one of result, interruption and failure is present."""

    result: AnyResult | None = None
    interruption: Interruption | None = None
    failure: Failure | None = None
    progress: MaybeProgress = None
    """Final progress. It shows the cost of an interruption even if the operator's last poll was long before."""
