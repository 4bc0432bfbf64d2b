"""The current state of a pipeline and its stages, as `assess` returns it."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from finetune_operator.api.conditions import Reason
from finetune_operator.api.spec import STAGES
from finetune_operator.api.stages.base import StageSpec
from finetune_operator.api.status import (
    GateStatus,
    StageState,
    StageStatus,
    truncate_message,
)
from finetune_operator.core.observation import (
    Blocker,
    Observation,
    ObservedJob,
    ObservedServer,
)
from finetune_trainer.contract import StageConfig

MISSING_INPUT = frozenset({Reason.SOURCE_NOT_FOUND, Reason.DATA_INVALID})
HOLDS_STOP = frozenset({Reason.NODE_LOST, Reason.DEPENDENCY_NOT_READY})
"""Reasons for which a Job does not end."""
DONE = frozenset({StageState.SUCCEEDED, StageState.SKIPPED})


@dataclass(frozen=True)
class StageAssessment:
    """The current state of one stage."""

    spec: StageSpec | None
    """None: the user did not request the stage."""
    config: StageConfig | None
    """The config of the stage's process, with its identity. None: not requested."""
    status: StageStatus
    servers: Mapping[str, ObservedServer]
    """Job -> the server that it started for this stage."""


@dataclass(frozen=True)
class PipelineAssessment:
    """The current state of all stages, in execution order."""

    stages: Mapping[str, StageAssessment]
    gates: tuple[GateStatus, ...]
    """Comparisons of the scores with the gates. Empty: no scores yet, or no gates."""
    cancelled: bool
    """Whether the user cancelled the pipeline and did not retry it since."""
    active_time: timedelta
    """Running time of all attempts so far."""
    observation: Observation
    """What the assessment is based on."""
    refusals: Mapping[str, Blocker]
    """Subject -> why the API server refused a request that may be planned again."""

    @property
    def statuses(self) -> dict[str, StageStatus]:
        """The status of every stage."""
        return {name: stage.status for name, stage in self.stages.items()}

    @property
    def done(self) -> bool:
        """Whether every stage has succeeded or is skipped."""
        return all(stage.status.state in DONE for stage in self.stages.values())

    @property
    def failed_stage(self) -> str | None:
        """Return the name of the first failed stage, or None."""
        for name, stage in self.stages.items():
            if stage.status.state is StageState.FAILED:
                return name
        return None


def stages_to_verify(stages: Mapping[str, StageStatus]) -> frozenset[str]:
    """Return the stages whose output a later stage found missing or damaged. A retry runs them again first.

    This is cheap if the output exists: each stage looks for its own result before it starts to work.
    """
    names: set[str] = set()
    # Backwards, so that the inputs of a stage to verify are verified too.
    for kind in reversed(STAGES):
        status = stages.get(kind.name, StageStatus())
        misses_input = (
            status.state is StageState.FAILED and status.reason in MISSING_INPUT
        )
        if misses_input or kind.name in names:
            names.update(kind.needs)
    return frozenset(names)


def describe_stop(
    reason: Reason, job: ObservedJob | None, refusal: Blocker | None
) -> Blocker:
    """Return why an attempt is being stopped, and what holds the stop up: a lost node, a finalizer, or a refusal."""
    blocker = job.blocker if job else None
    if blocker and blocker.reason in HOLDS_STOP:
        # Its fix is the only way on, whatever the attempt is stopped for.
        return Blocker(blocker.reason, f"stopping: {blocker.message}")
    message = f"stopping: {refusal.message}" if refusal else "stopping"
    return Blocker(reason, message)


def with_server_warning(
    status: StageStatus, servers: Mapping[str, ObservedServer]
) -> StageStatus:
    """Add to the message of an unfinished stage that the server of its earlier result is down."""
    if status.state is StageState.SUCCEEDED:
        return status
    for server in servers.values():
        if server.current and server.problem:
            parts = (status.message, f"meanwhile {server.problem.message}")
            message = truncate_message("; ".join(part for part in parts if part))
            return status.model_copy(update={"message": message})
    return status


def with_state(
    status: StageStatus, state: StageState, reason: Reason, message: str
) -> StageStatus:
    """Return the status with this state; a long message is cut."""
    return status.model_copy(
        update={"state": state, "reason": reason, "message": truncate_message(message)}
    )
