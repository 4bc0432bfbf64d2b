"""The observed state of a pipeline's Jobs and servers: facts, no decisions."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from finetune_operator.api.conditions import Reason
from finetune_trainer.contract import Progress, TerminationMessage


class JobState(StrEnum):
    """State of a Job. Complete and Failed imply that none of its processes is left."""

    WAITING = "Waiting"
    """Created, but its process has not started."""
    RUNNING = "Running"
    COMPLETE = "Complete"
    FAILED = "Failed"


@dataclass(frozen=True)
class Blocker:
    """Why an object makes no progress, and how to fix it."""

    reason: Reason
    message: str


@dataclass(frozen=True)
class ObservedJob:
    """The Job of one attempt, and the latest observed state of its process."""

    name: str
    state: JobState
    started_at: datetime | None = None
    finished_at: datetime | None = None
    exit_code: int | None = None
    """Exit code of the process. 128 + signal if a signal ended it, as in a shell."""
    disruption: str | None = None
    """Evidence of a disruption: evicted, preempted, node lost."""
    out_of_memory: bool = False
    message: TerminationMessage | None = None
    """Termination message of the process, if it could be read."""
    progress: Progress | None = None
    blocker: Blocker | None = None
    """Why its process has not started or cannot end, if known."""


@dataclass(frozen=True)
class ObservedServer:
    """A server that an attempt started and that keeps running after it."""

    stage: str
    current: bool
    """Whether the server receives the traffic of the stage."""
    problem: Blocker | None = None
    """Why the server does not answer now. None: it answers."""


@dataclass(frozen=True)
class Observation:
    """Everything that a cluster observes of one pipeline."""

    jobs: Mapping[str, ObservedJob] = field(default_factory=dict)
    blocked: Mapping[str, Blocker] = field(default_factory=dict)
    """Job -> why the cluster rejected its creation. The operator retries it."""
    servers: Mapping[str, ObservedServer] = field(default_factory=dict)
    """Job -> the server that it started, on a cluster that supports servers."""
    source_digests: Mapping[str, str] = field(default_factory=dict)
    """URI -> content digest, for sources that can change in place and that this cluster can read."""
    workspace_blocker: Blocker | None = None
    """Why the workspace differs from the spec, if stages can use it anyway."""
