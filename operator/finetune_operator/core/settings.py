"""Settings of the operator, made by the platform team and the same for all pipelines."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta

from finetune_operator.api.conditions import TROUBLESHOOTING_URL
from finetune_operator.api.defaults import NO_DEFAULTS, Defaults
from finetune_operator.api.placement import PlacementDefaults
from finetune_operator.api.stages.pod import Pod, PodDefaults

VLLM_IMAGE = "vllm/vllm-openai:v0.11.0"


@dataclass(frozen=True)
class Settings:
    """Default images, placement, timeouts and backoff."""

    trainer_image: str = "finetune-trainer"
    """Image of stages with devices that name none."""
    trainer_cpu_image: str = "finetune-trainer-cpu"
    """Image of stages without devices that name none: the trainer's without CUDA."""
    engine_images: Mapping[str, str] = field(
        default_factory=lambda: {"VLLM": VLLM_IMAGE}
    )
    """Engine -> image of servers that name none, for engines that the trainer's image does not contain."""
    defaults: Defaults = NO_DEFAULTS
    """Fields for a pipeline, if neither the pipeline nor its namespace sets them."""
    job_defaults: PodDefaults = field(default_factory=PodDefaults)
    """Labels and annotations below all others, of the pods of stages that end: a server's pod has none of them."""
    placement_defaults: PlacementDefaults | None = field(
        default_factory=PlacementDefaults
    )
    """Meaning of spot, on-demand and the pools on this cluster. None: on one machine, which has no such nodes."""
    sets_user: bool = True
    """Whether pods name their user, group and group of volumes; else the cluster chooses them, as OpenShift does."""
    grace_period: timedelta = timedelta(seconds=30)
    """Time from SIGTERM to SIGKILL."""
    base_backoff: timedelta = timedelta(seconds=10)
    """Delay after the first failure of a stage. It doubles with each failure."""
    max_backoff: timedelta = timedelta(minutes=10)
    """Upper limit of the backoff."""
    base_interruption_backoff: timedelta = timedelta(seconds=1)
    """Delay after an interruption before the attempt made a new durable step. It doubles with each one in a row. After
    an interruption with a new durable step there is none."""
    max_interruption_backoff: timedelta = timedelta(minutes=5)
    """Upper limit of that delay."""
    poll_interval: timedelta = timedelta(minutes=5)
    """Interval between two reconciles of a pipeline with a running attempt, if no event triggers one earlier."""
    replace_lost_after: timedelta | None = None
    """Time after which an attempt on a lost node is replaced, if its old process can publish nothing. None: never."""
    write_delay: timedelta = timedelta()
    """Time after the start of an attempt before its progress is worth a write of the status."""
    job_history: int = 2
    """Ended Jobs of each stage that are kept. A finished pipeline keeps one."""
    troubleshooting_url: str = TROUBLESHOOTING_URL
    """Address of docs/guides/troubleshooting.md, to which messages link. Empty: they name `finetune explain`."""
    until: str | None = None
    """Last stage to start, for `finetune run --until`. None: all stages."""

    def below(self, namespace: Defaults) -> "Settings":
        """Return the settings in which the defaults of a namespace override the defaults of the operator."""
        return replace(self, defaults=namespace.over(self.defaults))

    def image_of(self, engine: str | None, pod: Pod) -> str:
        """Return the default image of a stage with this pod, or of the server with this engine."""
        trainer = self.trainer_image if pod.may_have_devices else self.trainer_cpu_image
        return self.engine_images.get(engine or "", trainer)

    def backoff(self, failures: int) -> timedelta:
        """Return the delay before the next attempt after this number of failures."""
        return _doubled(self.base_backoff, failures, self.max_backoff)

    def interruption_backoff(self, fruitless: int) -> timedelta:
        """Return the delay before the next attempt after so many interruptions in a row without a new durable step."""
        return _doubled(
            self.base_interruption_backoff, fruitless, self.max_interruption_backoff
        )


def _doubled(base: timedelta, times: int, limit: timedelta) -> timedelta:
    """Return the base, doubled each time after the first, up to the limit; zero for no time."""
    if times <= 0:
        return timedelta()
    doublings = min(times - 1, 30)  # 30, because a float overflows; the limit is less
    return min(base * float(2**doublings), limit)
