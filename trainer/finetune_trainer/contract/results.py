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

from finetune_trainer.contract.recipes import ContractModel

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


JsonFloat = Annotated[float, PlainSerializer(_in_json, when_used="json")]
"""JSON has no NaN and no infinity; as words they can be read again."""


def _no_larger(value: int) -> int:
    if abs(value) > LARGEST:
        raise ValueError(f"must not be larger than {LARGEST}")
    return value


def _drop_oversized(value: Number | None) -> Number | None:
    return value if value is not None and abs(value) <= LARGEST else None  # which NaN is not, either


def _in_utc(value: datetime) -> datetime:
    """Take a time without a zone for one in UTC; a time that UTC has no date for is none."""
    try:
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
    except OverflowError:
        raise ValueError("is no time in UTC") from None


BoundedInt = Annotated[int, AfterValidator(_no_larger)]
OptionalInt = Annotated[int | None, AfterValidator(_drop_oversized)]
"""One that an API server could not keep is left out: it is not worth the rest."""
OptionalFloat = Annotated[float | None, AfterValidator(_drop_oversized)]
"""As Count."""
ShortText = Annotated[str, AfterValidator(lambda text: text[:WORDS])]
UtcTime = Annotated[datetime, AfterValidator(_in_utc)]


class StageResult(ContractModel):
    """Common to all stages; written to result.json in the stage's folder when everything else there is durable."""

    identity: str
    """Identity of the stage that made it."""
    digest: str
    """sha256:… over what the stage made."""


class PrepareResult(StageResult):
    """What became of the records."""

    stage: Literal["prepare"] = "prepare"
    records: BoundedInt
    """Records read."""
    invalid: BoundedInt
    """Records that could not be used."""
    truncated: BoundedInt
    """Records cut to the context length."""
    dropped: BoundedInt
    """Records left out because they were too long."""
    train_rows: BoundedInt
    """Packed rows to train on."""
    validation_rows: BoundedInt
    """Packed rows to validate on."""
    train_tokens: BoundedInt
    """Tokens in them, without padding."""
    data_digest: str
    """sha256:… of the data set's file."""
    conversations: bool = False
    """Whether the records were messages, so that the published tokenizer must know how to write them."""


class TrainResult(StageResult):
    """The adapter; its digest is that of adapter_model.safetensors and adapter_config.json."""

    stage: Literal["train"] = "train"
    steps: BoundedInt
    """Optimizer steps done."""
    loss: JsonFloat
    """Mean training loss of the last logging window, in nats a token."""
    validation_loss: JsonFloat | None = None
    """Of the adapter that is the result; absent without validation rows."""
    best_step: BoundedInt
    """The step whose adapter is the result."""
    tokens: BoundedInt
    """Tokens seen in training, without padding and without what was done twice."""


class Score(ContractModel):
    """One metric of one task."""

    value: JsonFloat
    stderr: JsonFloat | None = None
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
    size: BoundedInt
    """Bytes in all."""


class DeployResult(StageResult):
    """Proof that the model answered."""

    stage: Literal["deploy"] = "deploy"
    url: str
    """The endpoint that was asked."""
    answer: str
    """What the model said to the prompt; at most 1,024 characters."""
    seconds_to_ready: JsonFloat
    """From the start of the server to its first healthy answer."""
    long_running: bool = False
    """Whether the server goes on running: on a cluster it does."""


AnyResult = Annotated[
    PrepareResult | TrainResult | EvaluateResult | PushResult | DeployResult, Field(discriminator="stage")
]


class Interruption(ContractModel):
    """The stage was asked to stop and can go on from here."""

    step: OptionalInt = None
    """The last finished optimizer step."""
    saved_step: OptionalInt = None
    """The step of the newest durable checkpoint; absent: it starts from the beginning."""


class Failure(ContractModel):
    """What is wrong, where, and how to mend it."""

    message: str


class Progress(ContractModel):
    """Where a running stage is; served as /progress and written to FINETUNE_PROGRESS_FILE."""

    stage: ShortText
    updated_at: UtcTime
    step: BoundedInt
    """Finished units: optimizer steps in train, requests in evaluate, records in prepare."""
    total: OptionalInt = None
    """Units in all, where known."""
    start_step: OptionalInt = None
    """The unit this process began at: more than 0 after a resume. Absent until that is known."""
    saved_step: OptionalInt = None
    """The newest unit that survives a kill."""
    loss: OptionalFloat = None
    validation_loss: OptionalFloat = None
    tokens_per_second: OptionalFloat = None
    step_seconds: OptionalFloat = None
    """Mean seconds of a step in this process."""
    eta_seconds: OptionalFloat = None
    note: ShortText = ""
    """What it does just now, where that is not the next step: loading the model, validating."""


def _none_if_invalid(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    try:
        return handler(value)
    except ValidationError:
        return None


MaybeProgress = Annotated[Progress | None, WrapValidator(_none_if_invalid)]
"""What is no progress is none: it takes nothing along that stands beside it."""


class TerminationMessage(ContractModel):
    """Written to FINETUNE_TERMINATION_LOG at the end, at most 4,096 bytes; one of the first three is there."""

    result: AnyResult | None = None
    interruption: Interruption | None = None
    failure: Failure | None = None
    progress: MaybeProgress = None
    """Where it was in the end: what an interruption cost is known also where nobody had asked for a while."""
