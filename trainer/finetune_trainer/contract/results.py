"""Messages of a stage's process to the operator: its result, its progress, or the reason why it stopped."""

import json
import math
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    Field,
    PlainSerializer,
    WrapValidator,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema

from finetune_trainer.contract.chat_template import ChatTemplateOrigin
from finetune_trainer.contract.loss_curve import MaybeLossCurve
from finetune_trainer.contract.models import ExtensibleModel, none_if_invalid

# The kubelet's limit: it discards the rest.
TERMINATION_MESSAGE_BYTES = 4096
"""Size limit of a termination message."""
PROGRESS_BYTES = 64 << 10
"""Size limit of a stage's progress; the operator reads no more."""
# Sums of such numbers are still valid numbers in JSON and in the API server.
MAX_NUMBER = 10**15
"""Limit of every number."""
Number = TypeVar("Number", int, float)
MAX_TEXT_CHARACTERS = 256
"""Limit of a text in Progress; longer texts are truncated."""


def _in_json(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return str(value)


JsonFloat = Annotated[float, PlainSerializer(_in_json, when_used="json")]
"""A float that is written to JSON as a string if it is NaN or infinite, because JSON has neither."""


def _check_bound(value: int) -> int:
    if abs(value) > MAX_NUMBER:
        raise ValueError(f"must not be larger than {MAX_NUMBER}")
    return value


def _drop_oversized(value: Number | None) -> Number | None:
    # The comparison is False for NaN, too.
    if value is not None and abs(value) <= MAX_NUMBER:
        return value
    return None


def _in_utc(value: datetime) -> datetime:
    """Convert a time to UTC; a time without a zone is in UTC already. Raise ValueError if UTC cannot represent it."""
    if value.tzinfo is None:
        return value.replace(tzinfo=UTC)
    try:
        return value.astimezone(UTC)
    except OverflowError:
        raise ValueError("cannot be represented in UTC") from None


# A result must be complete, so an invalid number in it is an error. Progress only informs, so its invalid numbers are
# left out.
BoundedInt = Annotated[int, AfterValidator(_check_bound)]
OptionalInt = Annotated[int | None, AfterValidator(_drop_oversized)]
"""An optional integer; a value above MAX_NUMBER becomes None, so that the other fields remain usable."""
OptionalFloat = Annotated[float | None, AfterValidator(_drop_oversized)]
"""An optional float; NaN and values above MAX_NUMBER become None, so that the other fields remain usable."""
ShortText = Annotated[str, AfterValidator(lambda text: text[:MAX_TEXT_CHARACTERS])]
UtcTime = Annotated[datetime, AfterValidator(_in_utc)]


# The API server stores them in the status, whose size and depth it limits.
MAX_UNKNOWN_BYTES = 4096
"""Limit of all unknown fields of an object together, as JSON."""
MAX_UNKNOWN_DEPTH = 16
"""Nesting levels of an unknown field."""


def _is_storable(value: Any, depth: int = MAX_UNKNOWN_DEPTH) -> bool:
    """Return whether the API server can store the JSON value."""
    match value:
        case None | bool() | str():
            return True
        case int() | float():
            # False for NaN, too.
            return abs(value) <= MAX_NUMBER
        case list():
            return depth > 0 and all(_is_storable(inner, depth - 1) for inner in value)
        case dict():
            return depth > 0 and all(
                _is_storable(inner, depth - 1) for inner in value.values()
            )
        case _:
            return False


class ProcessOutput(ExtensibleModel):
    """Base of all messages that a stage's process writes. Another version of the trainer may write more fields.

    They end up in the pipeline's status, so an unknown field is kept only if the API server can store it.
    """

    # Dropped and not refused: the message of a newer version is still of use without these fields.
    @model_validator(mode="after")
    def _drop_unstorable_fields(self) -> Self:
        unknown = self.__pydantic_extra__ or {}
        # A copy of the items, because the loop deletes some of them.
        for name, value in list(unknown.items()):
            if not _is_storable(value):
                del unknown[name]
        if unknown and len(json.dumps(unknown)) > MAX_UNKNOWN_BYTES:
            unknown.clear()
        return self


class StageResult(ProcessOutput):
    """Fields common to all results. A stage writes result.json last, when all its other files are durable."""

    identity: str
    """Identity of the stage that produced the result."""
    digest: str
    """sha256:… over the stage's output."""


class PrepareResult(StageResult):
    """The packed rows, and the numbers of records."""

    stage: Literal["prepare"] = "prepare"
    records: BoundedInt
    """Records read."""
    invalid: BoundedInt
    """Records that are invalid."""
    truncated: BoundedInt
    """Records truncated to the context length."""
    dropped: BoundedInt
    """Records dropped because they were too long."""
    split: BoundedInt = 0
    """Records split into several documents because they were too long."""
    unrendered: BoundedInt = 0
    """Records with a text that is not in the rows, or from which nothing learns; prepare.unrendered allows them."""
    unread_words: BoundedInt = 0
    """Records with a single word in a column that nothing reads, which may be a label."""
    unused: BoundedInt = 0
    """Records left out by the weight of their data set."""
    train_rows: BoundedInt
    """Packed rows for training; two rows for each pair with objective DPO."""
    validation_rows: BoundedInt
    """Packed rows for validation, counted in the same way."""
    train_tokens: BoundedInt
    """Tokens in the rows for training, without padding."""
    train_targets: BoundedInt | None = None
    """The part of these tokens that is in the loss; absent if an earlier version of the trainer prepared the rows."""
    unknown_fraction: float = Field(default=0.0, ge=0, le=1)
    """Fraction of all tokens for text that the tokenizer does not have; prepare.unrendered allows them."""
    data_digest: str
    """sha256:… of the data set's file; if there are several files, of their digests in order."""
    data_pins: tuple[str | None, ...] = ()
    """Content of each data set at its store, for example a commit; None for a data set on a volume. In the order of the
    manifest; the validation set comes last."""
    conversations: bool = False
    """Whether any records are conversations, so that the published tokenizer needs the chat template."""
    chat_template: ChatTemplateOrigin | None = None
    """Where the chat template is from: BaseModel, Manifest, or Default if the base model has none. Absent: there is no
    template, and no record needed it."""
    model_digest: str | None = None
    """sha256:… over the base model's weights, configuration and tokenizer; training uses no other base model."""
    model_pin: str | None = None
    """Content of the base model at its store, for example a commit; None if it is on a volume."""
    start_digest: str | None = None
    """sha256:… over the adapter that training starts from; absent if training starts from no adapter."""
    start_pin: str | None = None
    """Content of the adapter that training starts from at its store; None if it is on a volume."""


LAST_STEPS = "mean of the last steps"
"""What a training loss is. A curve ends with another number: its last point, the mean of as many steps as each."""


class TrainResult(StageResult):
    """The adapter; the digest covers adapter_model.safetensors and adapter_config.json."""

    stage: Literal["train"] = "train"
    steps: BoundedInt
    """Optimizer steps completed."""
    loss: JsonFloat
    """Mean training loss of the last logging window: cross-entropy per token, natural logarithm; with objective DPO the
    loss per pair."""
    validation_loss: JsonFloat | None = None
    """Validation loss of the resulting adapter; absent without validation rows."""
    best_step: BoundedInt
    """The step of the resulting adapter."""
    tokens: BoundedInt
    """Tokens trained on, without padding and without repeated steps."""


class Score(ProcessOutput):
    """A metric of a task."""

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
    """Scores by task and metric. A metric's name has no filter if only one filter was applied."""


class PublishedTarget(ProcessOutput):
    """The model in a target."""

    target: str
    """URI of the target in the manifest."""
    uri: str
    """Location of exactly this model."""
    format: str
    """Merged or Adapter."""
    digest: str
    """sha256:… over the files except the model card."""
    size: BoundedInt
    """Total size of the files in bytes."""


class PushResult(StageResult):
    """The published model; `digest` is the digest of the first target."""

    stage: Literal["push"] = "push"
    published: tuple[PublishedTarget, ...]
    """The targets, in the order of the manifest."""

    def first(self, form: str) -> PublishedTarget | None:
        """Return the first target of this format, or None."""
        for target in self.published:
            if target.format == form:
                return target
        return None


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
    PrepareResult | TrainResult | EvaluateResult | PushResult | DeployResult,
    Field(discriminator="stage"),
]


class Interruption(ProcessOutput):
    """The stage stopped on a signal; the next attempt resumes from its last saved step."""

    step: OptionalInt = None
    """The last completed optimizer step."""
    saved_step: OptionalInt = None
    """Step of the latest durable checkpoint; absent if the next attempt starts from the beginning."""
    message: ShortText | None = None
    """Reason for the stop, if it is not a signal: a newer attempt has replaced this attempt."""


class Failure(ProcessOutput):
    """The reason why the stage failed."""

    message: str
    """What failed, the observed value, and the fix."""
    device: bool = False
    """Whether a device of the node may be broken. A later attempt then avoids a node on which this happens twice."""
    machine: bool = False
    """Whether the machine is the cause: its disk is full, or it has no network. A run on one machine is then not
    retried by itself."""


class Progress(ProcessOutput):
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
    """Training loss of the last step, per token; with objective DPO per pair."""
    validation_loss: OptionalFloat = None
    """Latest loss on the validation data, per token; with objective DPO per pair."""
    reward_margin: OptionalFloat = None
    """With objective DPO, difference of the last step's mean rewards: chosen completions minus rejected completions."""
    reward_accuracy: OptionalFloat = None
    """With objective DPO, fraction of the last step's pairs in which the chosen completion has the higher reward."""
    tokens_per_second: OptionalFloat = None
    """Tokens that this process has handled, per second of work."""
    step_seconds: OptionalFloat = None
    """Mean duration of a step in this process, in seconds."""
    eta_seconds: OptionalFloat = None
    """Estimated time to completion, in seconds."""
    note: ShortText = ""
    """Current activity if it is no step, such as loading the model or validating."""
    reused: bool = False
    """Whether the result was in the workspace already, so that the stage has done nothing."""
    notice: ShortText | None = None
    """The last announcement that this machine will end, after which the process saves early; absent: none."""
    # Not in the schema, because in the status it is a field of the stage.
    loss_curve: SkipJsonSchema[MaybeLossCurve] = None
    """Loss of the whole training so far, also of earlier attempts. Absent in other stages."""


MaybeProgress = Annotated[Progress | None, WrapValidator(none_if_invalid)]
"""Progress, or None if it is invalid, so that the rest of the message remains usable."""


class TerminationMessage(ProcessOutput):
    """Content of FINETUNE_TERMINATION_LOG, at most 4,096 bytes. It has a result, an interruption or a failure."""

    result: AnyResult | None = None
    interruption: Interruption | None = None
    failure: Failure | None = None
    progress: MaybeProgress = None
    """Final progress. It shows the cost of an interruption even if the operator's last poll was long before."""

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        # Without this check, any JSON object would be a termination message, also an object in a program's own format.
        if self.model_extra and not (
            self.result or self.interruption or self.failure or self.progress
        ):
            raise ValueError("has none of result, interruption, failure and progress")
        return self
