"""What was seen of a pipeline's children: facts, no judgement."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from finetune_operator.api.conditions import Reason
from finetune_trainer.contract import Progress, TerminationMessage


class JobState(StrEnum):
    """What the Job object says; Complete and Failed only once no process of it is left."""

    WAITING = "Waiting"
    """Made, but its process has not started."""
    RUNNING = "Running"
    COMPLETE = "Complete"
    FAILED = "Failed"


@dataclass(frozen=True)
class Blocker:
    """Why something does not go on, and how to mend it."""

    reason: Reason
    message: str


@dataclass(frozen=True)
class ObservedJob:
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
    blocker: Blocker | None = None
    """Why its process has not started, or cannot end, where that is known."""


@dataclass(frozen=True)
class ObservedServer:
    """What an attempt started that is to go on running after it."""

    stage: str
    current: bool
    """Whether requests are sent to it."""
    problem: Blocker | None = None
    """Why it does not answer just now."""


@dataclass(frozen=True)
class Observation:
    """All that a cluster can see of one pipeline."""

    jobs: Mapping[str, ObservedJob] = field(default_factory=dict)
    blocked: Mapping[str, Blocker] = field(default_factory=dict)
    """Job -> why the cluster did not let it be made; it is going to be tried again."""
    servers: Mapping[str, ObservedServer] = field(default_factory=dict)
    """Job -> the server it started, on a cluster that keeps servers."""
    source_digests: Mapping[str, str] = field(default_factory=dict)
    """URI -> digest of what lies behind it, for sources that can change in place and that this cluster can read."""
    workspace_blocker: Blocker | None = None
    """Why the workspace is not what is asked for, where it can be worked on all the same."""
