"""What a card is made of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from finetune_operator.api.status import AttemptStatus, PipelineStatus, StageStatus
from finetune_operator.core.pipeline import Pipeline
from finetune_trainer.contract.metric_rows import Row
from finetune_trainer.contract.sample_rows import SampleRow


@dataclass(frozen=True)
class RunRecord:
    """A pipeline with its status, and what its training has left in files."""

    pipeline: Pipeline
    rows: Sequence[Row] = ()
    """Metrics of each step. None on a cluster: the status has a curve of few points."""
    samples: Sequence[SampleRow] = ()
    """Texts that training generated, by ascending step."""
    base_errors: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Task and metric -> standard error of the base model's score. The status has none of the base model."""
    folders: Mapping[str, str] = field(default_factory=dict)
    """URI of a published model, or of the base model -> its folder on this machine."""
    serve_commands: Sequence[str] = ()
    """Commands that serve the model, or that lead to its server."""
    reproduce_command: str = ""
    """Command that runs the manifest again."""
    at: datetime | None = None
    """Time up to which running attempts are drawn. Without it, they are drawn without an end."""
    version: str = ""
    """Version of the program that makes the card."""

    @property
    def name(self) -> str:
        """Name of the pipeline."""
        return self.pipeline.key.name

    @property
    def status(self) -> PipelineStatus:
        """Status of the pipeline."""
        return self.pipeline.status

    def stage(self, name: str) -> StageStatus:
        """Return the status of a stage; an empty status if it has none."""
        return self.status.stages.get(name, StageStatus())


def current_attempts(stage: StageStatus) -> list[AttemptStatus]:
    """Return the attempts of the result that the stage has now; others were made before the manifest was edited."""
    return [attempt for attempt in stage.attempts if attempt.identity == stage.identity]
