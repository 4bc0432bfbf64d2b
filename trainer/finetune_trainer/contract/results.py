"""What a stage tells whoever started it: its result, its progress, or why it stopped."""

import math
from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field, PlainSerializer

from finetune_trainer.contract.recipes import Contract

TERMINATION_MESSAGE_BYTES = 4096
"""The kubelet keeps no more of a container's termination message."""


def _in_json(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


Measured = Annotated[float, PlainSerializer(_in_json, when_used="json")]
"""JSON has no NaN and no infinity; as words they can be read again."""


class StageResult(Contract):
    """Common to all stages; written to result.json in the stage's folder when everything else there is durable."""

    identity: str
    """Identity of the stage that made it."""
    digest: str
    """sha256:… over what the stage made."""


class PrepareResult(StageResult):
    """What became of the records."""

    stage: Literal["prepare"] = "prepare"
    records: int
    """Records read."""
    invalid: int
    """Records that could not be used."""
    truncated: int
    """Records cut to the context length."""
    dropped: int
    """Records left out because they were too long."""
    train_rows: int
    """Packed rows to train on."""
    validation_rows: int
    """Packed rows to validate on."""
    train_tokens: int
    """Tokens in them, without padding."""
    data_digest: str
    """sha256:… of the data set's file."""
    conversations: bool = False
    """Whether the records were messages, so that the published tokenizer must know how to write them."""


class TrainResult(StageResult):
    """The adapter; its digest is that of adapter_model.safetensors and adapter_config.json."""

    stage: Literal["train"] = "train"
    steps: int
    """Optimizer steps done."""
    loss: Measured
    """Mean training loss of the last logging window, in nats a token."""
    validation_loss: Measured | None = None
    """Of the adapter that is the result; absent without validation rows."""
    best_step: int
    """The step whose adapter is the result."""
    tokens: int
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
    size: int
    """Bytes in all."""


class DeployResult(StageResult):
    """Proof that the model answered."""

    stage: Literal["deploy"] = "deploy"
    url: str
    """The endpoint that was asked."""
    answer: str
    """What the model said to the prompt; at most 1,024 characters."""
    seconds_to_ready: float
    """From the start of the server to its first healthy answer."""
    lasting: bool = False
    """Whether the server goes on running: on a cluster it does."""


AnyResult = Annotated[
    PrepareResult | TrainResult | EvaluateResult | PushResult | DeployResult, Field(discriminator="stage")
]


class Interruption(Contract):
    """The stage was asked to stop and can go on from here."""

    step: int | None = None
    """The last finished optimizer step."""
    saved_step: int | None = None
    """The step of the newest durable checkpoint; absent: it starts from the beginning."""


class Failure(Contract):
    """What is wrong, where, and how to mend it."""

    message: str


class Progress(Contract):
    """Where a running stage is; served as /progress and written to FINETUNE_PROGRESS_FILE."""

    stage: str
    updated_at: datetime
    step: int
    """Finished units: optimizer steps in train, requests in evaluate, records in prepare."""
    total: int | None = None
    """Units in all, where known."""
    start_step: int | None = None
    """The unit this process began at: more than 0 after a resume. Absent until that is known."""
    saved_step: int | None = None
    """The newest unit that survives a kill."""
    loss: float | None = None
    validation_loss: float | None = None
    tokens_per_second: float | None = None
    step_seconds: float | None = None
    """Mean seconds of a step in this process."""
    eta_seconds: float | None = None
    note: str = ""
    """What it does just now, where that is not the next step: loading the model, validating."""


class TerminationMessage(Contract):
    """Written to FINETUNE_TERMINATION_LOG at the end, at most 4,096 bytes; one of the first three is there."""

    result: AnyResult | None = None
    interruption: Interruption | None = None
    failure: Failure | None = None
    progress: Progress | None = None
    """Where it was in the end: what an interruption cost is known also where nobody had asked for a while."""
