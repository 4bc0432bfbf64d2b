"""Condition types and reasons (both closed sets), the page that explains reasons, and the merge of conditions."""

from collections.abc import Iterable
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import Field, GetJsonSchemaHandler, StringConstraints
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema
from typing_extensions import override

from finetune_trainer.contract import ExtensibleModel

READY = "Ready"
"""True when every requested stage is done."""
# Present only while True, as kstatus requires.
RECONCILING = "Reconciling"
"""True while the operator makes progress or waits to do so."""
# Present only while True, as kstatus requires.
STALLED = "Stalled"
"""True when nothing happens until the user acts."""
# So `kubectl wait --for=condition=Finished` returns in both cases.
FINISHED = "Finished"
"""True on success and on failure."""


class OpenEnum(StrEnum):
    """An enum that only informs, so that a value of another version of the operator is kept as it is.

    Such a value is equal to its text, and identical to no member.
    """

    @override
    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        if not isinstance(value, str):
            return None
        # Not added to the members: the set of known values stays closed.
        unknown = str.__new__(cls, value)
        unknown._name_ = unknown._value_ = value
        return unknown

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        # Without the list of values: after a rollback, the API server must accept the kept values of the newer version.
        schema = handler.resolve_ref_schema(handler(core))
        del schema["enum"]
        return schema


# A new reason needs a section in the troubleshooting guide: the end of a message names it.
class Reason(OpenEnum):
    """Why a stage or a condition is in its state."""

    ALL_STAGES_SUCCEEDED = "AllStagesSucceeded"
    BELOW_THRESHOLD = "BelowThreshold"
    CANCELLED = "Cancelled"
    CREDENTIALS_REJECTED = "CredentialsRejected"
    DATA_INVALID = "DataInvalid"
    CONFIG_MAP_NOT_FOUND = "ConfigMapNotFound"
    CONTAINER_NOT_STARTED = "ContainerNotStarted"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    DEPENDENCY_NOT_READY = "DependencyNotReady"
    DEVICE_FAILED = "DeviceFailed"
    EPHEMERAL_STORAGE_EXCEEDED = "EphemeralStorageExceeded"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    INIT_CONTAINER_FAILED = "InitContainerFailed"
    INTERRUPTED = "Interrupted"
    JOB_DISAPPEARED = "JobDisappeared"
    NODE_LOST = "NodeLost"
    NODE_PRESSURE = "NodePressure"
    NOT_REQUESTED = "NotRequested"
    OUT_OF_MEMORY = "OutOfMemory"
    PLACEMENT_CHANGED = "PlacementChanged"
    POD_REFUSED = "PodRefused"
    PROGRESSING = "Progressing"
    RESULT_MISSING = "ResultMissing"
    RETRIES_EXHAUSTED = "RetriesExhausted"
    RETRYING = "Retrying"
    SECRET_NOT_FOUND = "SecretNotFound"  # noqa: S105  not a password
    SERVER_NOT_READY = "ServerNotReady"
    SIDECAR_FAILED = "SidecarFailed"
    SIDECAR_RUNNING = "SidecarRunning"
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


TROUBLESHOOTING_URL = "docs/guides/troubleshooting.md"
"""Address of the page with a section for each reason; the platform team may set the address of its own copy."""

NEEDS_PERSON = frozenset(
    {
        Reason.CONFIG_MAP_NOT_FOUND,
        Reason.CONTAINER_NOT_STARTED,
        Reason.DEPENDENCY_NOT_READY,
        Reason.IMAGE_PULL_FAILED,
        Reason.POD_REFUSED,
        Reason.SECRET_NOT_FOUND,
        Reason.SERVER_NOT_READY,
        Reason.SIDECAR_FAILED,
        Reason.SPEC_INVALID,
        Reason.VOLUME_NOT_READY,
    }
)
"""Reasons of an attempt that goes on only when a person has mended something, and holds its claim."""
NOTHING_TO_FIX = frozenset(
    {
        Reason.ALL_STAGES_SUCCEEDED,
        Reason.INTERRUPTED,
        Reason.JOB_DISAPPEARED,
        Reason.NOT_REQUESTED,
        Reason.PLACEMENT_CHANGED,
        Reason.PROGRESSING,
        Reason.SPEC_CHANGED,
        Reason.STAGE_SUCCEEDED,
    }
)
"""Reasons of a pipeline that succeeds or goes on by itself. With any other reason, it waits or has failed."""


class Condition(ExtensibleModel):
    """A condition, in the standard form that kubectl and Flux read."""

    # The lengths of type and message are the limits of metav1.Condition.
    type: Annotated[str, StringConstraints(max_length=316)]
    """Type of the condition."""
    status: Literal["True", "False", "Unknown"]
    """Status of the condition: True, False or Unknown."""
    reason: Reason
    """Machine-readable reason, in CamelCase."""
    message: Annotated[str, StringConstraints(max_length=32768)] = ""
    """Human-readable message: what happened, in which place, and what to do."""
    observed_generation: int = Field(ge=0)
    """Generation of the spec that this condition describes."""
    last_transition_time: datetime
    """Time at which the status last changed."""


def link(reason: Reason, url: str) -> str:
    """Return the end of a message that names the section of its reason. It is empty if there is nothing to fix."""
    if reason in NOTHING_TO_FIX:
        return ""
    if not url:
        return f" (see `finetune explain {reason}`)"
    # The page's headings are the reasons, and Markdown renderers make anchors of headings in lower case.
    return f" (see {url}#{reason.lower()})"


def merge_conditions(
    old: Iterable[Condition], new: Iterable[Condition]
) -> tuple[Condition, ...]:
    """Return the new conditions. Each keeps its last transition time unless its status changed."""
    before = {condition.type: condition for condition in old}
    return tuple(
        _merge_condition(before.get(condition.type), condition) for condition in new
    )


def _merge_condition(old: Condition | None, new: Condition) -> Condition:
    merged = new.with_unknown_fields_of(old)
    if old is None or old.status != new.status:
        return merged
    # The time is when the status changed: a new message or reason alone does not move it.
    return merged.model_copy(update={"last_transition_time": old.last_transition_time})
