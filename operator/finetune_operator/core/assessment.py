"""The current state of a pipeline and its stages, as `assess` returns it."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from finetune_operator.api.stages.base import StageSpec
from finetune_operator.api.status import GateStatus, StageState, StageStatus
from finetune_operator.core.observation import Blocker, Observation, ObservedServer
from finetune_trainer.contract import StageConfig

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
