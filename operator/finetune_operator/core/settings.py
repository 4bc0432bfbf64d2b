"""What whoever runs the operator decides, and no pipeline."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

from finetune_operator.api.placement import PlacementDefaults

VLLM_IMAGE = "vllm/vllm-openai:v0.11.0"


@dataclass(frozen=True)
class Settings:
    """How patient the operator is and what it starts by default."""

    trainer_image: str = "finetune-trainer"
    """Used where a stage names no image."""
    engine_images: Mapping[str, str] = field(default_factory=lambda: {"vllm": VLLM_IMAGE})
    """Used where a server names no image and its engine is not in the trainer's."""
    placement_defaults: PlacementDefaults = field(default_factory=PlacementDefaults)
    """What spot, on-demand and a stage's pool mean on this cluster."""
    grace_period: timedelta = timedelta(seconds=30)
    """From SIGTERM to SIGKILL."""
    base_backoff: timedelta = timedelta(seconds=10)
    """From the first failure of a stage to its next attempt; doubles with each. An interruption waits for nothing."""
    max_backoff: timedelta = timedelta(minutes=10)
    """The most that doubling leads to."""
    poll_interval: timedelta = timedelta(minutes=5)
    """How long a pipeline with running work is left alone when nothing is heard of it."""
    until: str | None = None
    """The last stage to start; None: all. For `finetune run --until`."""

    def image_of(self, engine: str | None) -> str:
        """Give the image of a stage, or of the server that it starts."""
        return self.engine_images.get(engine or "", self.trainer_image)

    def backoff(self, failures: int) -> timedelta:
        """Give the wait before the attempt that follows so many failures."""
        doublings = max(0, min(failures - 1, 30))
        return min(self.base_backoff * float(2**doublings), self.max_backoff)
