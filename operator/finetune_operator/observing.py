"""What was seen of a pipeline's children: facts, no judgement."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from finetune_trainer.contract import Progress, TerminationMessage


class JobState(StrEnum):
    """What the Job object says; Complete and Failed only once no process of it is left."""

    WAITING = "Waiting"
    """Made, but its process has not started."""
    RUNNING = "Running"
    COMPLETE = "Complete"
    FAILED = "Failed"


@dataclass(frozen=True)
class JobSeen:
    """One attempt's Job and the last that was seen of its process."""

    name: str
    state: JobState
    started_at: datetime | None = None
    finished_at: datetime | None = None
    exit_code: int | None = None
    """Of the process, as a shell gives it: 128 + signal where a signal ended it."""
    disruption: str | None = None
    """Evidence that its node or its right to run was taken: evicted, preempted, node lost."""
    out_of_memory: bool = False
    message: TerminationMessage | None = None
    """What the process left behind, where it could be read."""
    progress: Progress | None = None
    waiting_for: str = ""
    """Why its process has not started, where that is known."""


@dataclass(frozen=True)
class Observed:
    """All that a cluster can see of one pipeline."""

    jobs: Mapping[str, JobSeen] = field(default_factory=dict)
    contents: Mapping[str, str] = field(default_factory=dict)
    """URI -> digest of what lies behind it, for sources that can change in place and that this cluster can read."""
