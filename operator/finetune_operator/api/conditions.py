"""Condition types and reasons: closed vocabularies, and how a condition changes."""

from collections.abc import Iterable
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from finetune_trainer.contract import ContractModel

READY = "Ready"
"""All that was asked for is done."""
RECONCILING = "Reconciling"
"""Work is going on. Present only while True (kstatus)."""
STALLED = "Stalled"
"""Nothing will happen until someone acts. Present only while True (kstatus)."""
FINISHED = "Finished"
"""True on success and on failure, so that waiting for it always ends."""


class Reason(StrEnum):
    """Why a stage or a condition is what it is."""

    ALL_STAGES_SUCCEEDED = "AllStagesSucceeded"
    BELOW_THRESHOLD = "BelowThreshold"
    CANCELLED = "Cancelled"
    CREDENTIALS_REJECTED = "CredentialsRejected"
    DATA_INVALID = "DataInvalid"
    CONTAINER_NOT_STARTED = "ContainerNotStarted"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    DEPENDENCY_NOT_READY = "DependencyNotReady"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    INTERRUPTED = "Interrupted"
    JOB_DISAPPEARED = "JobDisappeared"
    NODE_LOST = "NodeLost"
    NOT_REQUESTED = "NotRequested"
    OUT_OF_MEMORY = "OutOfMemory"
    POD_REFUSED = "PodRefused"
    PROGRESSING = "Progressing"
    RESULT_MISSING = "ResultMissing"
    RETRIES_EXHAUSTED = "RetriesExhausted"
    RETRYING = "Retrying"
    SECRET_NOT_FOUND = "SecretNotFound"  # noqa: S105  no password
    SERVER_NOT_READY = "ServerNotReady"
    SOURCE_NOT_FOUND = "SourceNotFound"
    SOURCE_UNAVAILABLE = "SourceUnavailable"
    SPEC_CHANGED = "SpecChanged"
    SPEC_INVALID = "SpecInvalid"
    STAGE_FAILED = "StageFailed"
    STAGE_SUCCEEDED = "StageSucceeded"
    SUSPENDED = "Suspended"
    VOLUME_NOT_READY = "VolumeNotReady"
    WAITING_FOR_CAPACITY = "WaitingForCapacity"
    WAITING_FOR_QUOTA = "WaitingForQuota"
    WORKSPACE_IN_USE = "WorkspaceInUse"


class Condition(ContractModel):
    """One observation, in the form that kubectl, Flux and Argo CD read."""

    type: Annotated[str, StringConstraints(max_length=316)]
    """What is observed."""
    status: Literal["True", "False", "Unknown"]
    """Whether it is so."""
    reason: Reason
    """Why, in one word."""
    message: Annotated[str, StringConstraints(max_length=32768)] = ""
    """Why, for people: what, where, and what to do."""
    observed_generation: int = Field(ge=0)
    """The generation of the spec that this speaks of."""
    last_transition_time: datetime
    """When status last changed."""


def merge_conditions(old: Iterable[Condition], new: Iterable[Condition]) -> tuple[Condition, ...]:
    """Give the new conditions, each keeping its old time of transition where its status did not change."""
    before = {condition.type: condition for condition in old}
    return tuple(
        condition.model_copy(update={"last_transition_time": before[condition.type].last_transition_time})
        if condition.type in before and before[condition.type].status == condition.status
        else condition
        for condition in new
    )
