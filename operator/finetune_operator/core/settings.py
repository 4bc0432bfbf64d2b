"""Settings of the operator, made by the platform team and the same for all pipelines."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

from finetune_operator.api.placement import PlacementDefaults

VLLM_IMAGE = "vllm/vllm-openai:v0.11.0"


@dataclass(frozen=True)
class Settings:
    """Default images, placement, timeouts and backoff."""

    trainer_image: str = "finetune-trainer"
    """Image of stages that name none."""
    engine_images: Mapping[str, str] = field(default_factory=lambda: {"vllm": VLLM_IMAGE})
    """Engine -> image of servers that name none, for engines that the trainer's image does not contain."""
    placement_defaults: PlacementDefaults = field(default_factory=PlacementDefaults)
    """Meaning of spot, on-demand and the pools on this cluster."""
    grace_period: timedelta = timedelta(seconds=30)
    """Time from SIGTERM to SIGKILL."""
    base_backoff: timedelta = timedelta(seconds=10)
    """Delay after the first failure of a stage. It doubles with each failure. Interruptions are retried immediately."""
    max_backoff: timedelta = timedelta(minutes=10)
    """Upper limit of the backoff."""
    poll_interval: timedelta = timedelta(minutes=5)
    """Interval between two reconciles of a pipeline with a running attempt, if no event triggers one earlier."""
    until: str | None = None
    """Last stage to start, for `finetune run --until`. None: all stages."""

    def image_of(self, engine: str | None) -> str:
        """Return the default image of a stage, or of the server with this engine."""
        return self.engine_images.get(engine or "", self.trainer_image)

    def backoff(self, failures: int) -> timedelta:
        """Return the delay before the next attempt after this number of failures."""
        doublings = max(0, min(failures - 1, 30))  # 30, because a float overflows; max_backoff is less
        return min(self.base_backoff * float(2**doublings), self.max_backoff)
