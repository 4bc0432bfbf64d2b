"""What a stage tells whoever started it: its result, its progress, or why it stopped."""

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

from finetune_trainer.contract.recipes import Contract

TERMINATION_MESSAGE_BYTES = 4096
"""The kubelet keeps no more of a container's termination message."""
PROGRESS_BYTES = 64 << 10
"""No more is read of what a stage says of its progress."""
LARGEST = 10**15
"""Of any number: what is made of some of them still has to be a number for JSON and for an API server."""
Number = TypeVar("Number", int, float)
WORDS = 256
"""Characters of a text in Progress; what is longer is cut."""


def _in_json(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


Measured = Annotated[float, PlainSerializer(_in_json, when_used="json")]
"""JSON has no NaN and no infinity; as words they can be read again."""


def _no_larger(value: int) -> int:
    if abs(value) > LARGEST:
        raise ValueError(f"must not be larger than {LARGEST}")
    return value


def _if_sayable(value: Number | None) -> Number | None:
    return value if value is not None and abs(value) <= LARGEST else None  # which NaN is not, either


def _in_utc(value: datetime) -> datetime:
    """Take a time without a zone for one in UTC; a time that UTC has no date for is none."""
    try:
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
    except OverflowError:
        raise ValueError("is no time in UTC") from None


Whole = Annotated[int, AfterValidator(_no_larger)]
Count = Annotated[int | None, AfterValidator(_if_sayable)]
"""One that an API server could not keep is left out: it is not worth the rest."""
Figure = Annotated[float | None, AfterValidator(_if_sayable)]
"""As Count."""
Words = Annotated[str, AfterValidator(lambda text: text[:WORDS])]
Moment = Annotated[datetime, AfterValidator(_in_utc)]


class StageResult(Contract):
    """Common to all stages; written to result.json in the stage's folder when everything else there is durable."""

    identity: str
    """Identity of the stage that made it."""
    digest: str
    """sha256:… over what the stage made."""


class PrepareResult(StageResult):
    """What became of the records."""

    stage: Literal["prepare"] = "prepare"
    records: Whole
    """Records read."""
    invalid: Whole
    """Records that could not be used."""
    truncated: Whole
    """Records cut to the context length."""
    dropped: Whole
    """Records left out because they were too long."""
    train_rows: Whole
    """Packed rows to train on."""
    validation_rows: Whole
    """Packed rows to validate on."""
    train_tokens: Whole
    """Tokens in them, without padding."""
    data_digest: str
    """sha256:… of the data set's file."""
    conversations: bool = False
    """Whether the records were messages, so that the published tokenizer must know how to write them."""


class TrainResult(StageResult):
    """The adapter; its digest is that of adapter_model.safetensors and adapter_config.json."""

    stage: Literal["train"] = "train"
    steps: Whole
    """Optimizer steps done."""
    loss: Measured
    """Mean training loss of the last logging window, in nats a token."""
    validation_loss: Measured | None = None
    """Of the adapter that is the result; absent without validation rows."""
    best_step: Whole
    """The step whose adapter is the result."""
    tokens: Whole
    """Tokens seen in training, without padding and without what was done twice."""


class Score(Contract):
    """One metric of one task."""

    value: Measured
    stderr: Measured | None = None
    """Standard error, where lm-eval gives one."""


class EvaluateResult(StageResult):
    """Scores of the tasks asked for; lm-eval's whole output lies beside it."""

    stage: Literal["evaluate"] = "evaluate"
    scores: dict[str, dict[str, Score]]
    """task -> metric -> score; metrics without their filter where that is unambiguous."""


class PushResult(StageResult):
    """The published model."""

    stage: Literal["push"] = "push"
    uri: str
    """Where it is."""
    size: Whole
    """Bytes in all."""


class DeployResult(StageResult):
    """Proof that the model answered."""

    stage: Literal["deploy"] = "deploy"
    url: str
    """The endpoint that was asked."""
    answer: str
    """What the model said to the prompt; at most 1,024 characters."""
    seconds_to_ready: Measured
    """From the start of the server to its first healthy answer."""
    lasting: bool = False
    """Whether the server goes on running: on a cluster it does."""


AnyResult = Annotated[
    PrepareResult | TrainResult | EvaluateResult | PushResult | DeployResult, Field(discriminator="stage")
]


class Interruption(Contract):
    """The stage was asked to stop and can go on from here."""

    step: Count = None
    """The last finished optimizer step."""
    saved_step: Count = None
    """The step of the newest durable checkpoint; absent: it starts from the beginning."""


class Failure(Contract):
    """What is wrong, where, and how to mend it."""

    message: str


class Progress(Contract):
    """Where a running stage is; served as /progress and written to FINETUNE_PROGRESS_FILE."""

    stage: Words
    updated_at: Moment
    step: Whole
    """Finished units: optimizer steps in train, requests in evaluate, records in prepare."""
    total: Count = None
    """Units in all, where known."""
    start_step: Count = None
    """The unit this process began at: more than 0 after a resume. Absent until that is known."""
    saved_step: Count = None
    """The newest unit that survives a kill."""
    loss: Figure = None
    validation_loss: Figure = None
    tokens_per_second: Figure = None
    step_seconds: Figure = None
    """Mean seconds of a step in this process."""
    eta_seconds: Figure = None
    note: Words = ""
    """What it does just now, where that is not the next step: loading the model, validating."""


def _or_nothing(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    try:
        return handler(value)
    except ValidationError:
        return None


MaybeProgress = Annotated[Progress | None, WrapValidator(_or_nothing)]
"""What is no progress is none: it takes nothing along that stands beside it."""


class TerminationMessage(Contract):
    """Written to FINETUNE_TERMINATION_LOG at the end, at most 4,096 bytes; one of the first three is there."""

    result: AnyResult | None = None
    interruption: Interruption | None = None
    failure: Failure | None = None
    progress: MaybeProgress = None
    """Where it was in the end: what an interruption cost is known also where nobody had asked for a while."""
