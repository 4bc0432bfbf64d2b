"""The observed state of a pipeline's Jobs and servers: facts, no decisions."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from finetune_operator.api.conditions import NEEDS_PERSON, Reason
from finetune_operator.api.defaults import NO_DEFAULTS, Defaults
from finetune_trainer.contract import Progress, TerminationMessage

ROOM = frozenset({Reason.WAITING_FOR_CAPACITY, Reason.WAITING_FOR_QUOTA})
"""Reasons of a wait for nodes or quota, which end when other workloads do."""


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
class PodFault:
    """What ended a process, or kept it from starting, besides the process itself."""

    reason: Reason
    message: str
    interrupts: bool = False
    """Whether it is no failure of the stage, so that it counts as an interruption."""


@dataclass(frozen=True)
class ObservedJob:
    """The Job of one attempt, and the latest observed state of its process."""

    name: str
    state: JobState
    created_at: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    exit_code: int | None = None
    """Exit code of the process. 128 + signal if a signal ended it, as in a shell."""
    disruption: str | None = None
    """Evidence of a disruption: evicted, preempted, node lost."""
    out_of_memory: bool = False
    memory_limit: str = ""
    """Memory limit of the container, as a Kubernetes quantity. Empty: it has none."""
    stage: str = ""
    """Name of the stage, if the cluster knows it."""
    message: TerminationMessage | None = None
    """Termination message of the process, if it could be read."""
    progress: Progress | None = None
    blocker: Blocker | None = None
    """Why its process has not started or cannot end, if known."""
    node: str = ""
    """Name of the node of its pod; empty before it is scheduled. Of several pods, that with index 0."""
    unschedulable_since: datetime | None = None
    """Time since which no node accepts its pod, or one of them. None: a node does, or it is not known."""
    incomplete_since: datetime | None = None
    """Time since which some of its pods have nodes and others have none. None: all of them have, or none."""
    pod: str = ""
    """Which of several pods has ended it, such as pod 3. Empty: its only pod, or all alike."""
    fault: PodFault | None = None
    """What ended its process or kept it from starting, if it has a reason of its own."""
    outlived_since: datetime | None = None
    """Time since which its process has ended, while other containers of its pod have not. None: neither, or both."""
    sidecar: str = ""
    """Which other container of its pod has failed, if a process may have failed because of it."""
    failed_node: str = ""
    """Name of the node of the pod that ended it; empty if it has not failed."""
    lost_since: datetime | None = None
    """Time since which the node of one of its pods counts as lost. None: no node does."""
    suspended_since: datetime | None = None
    """Time since which the Job is suspended and none of its processes is left. None: it is not."""
    resumed_at: datetime | None = None
    """Time at which its last suspension ended. None: it was never suspended, or still is."""
    unready: bool = False
    """Whether it is a server whose process runs and that is not ready."""
    awaits_probe: bool = False
    """Whether it is a server that is ready and has not been probed yet."""

    @property
    def needs_person(self) -> bool:
        """Whether its process cannot start until a person has mended something."""
        if self.state is not JobState.WAITING or self.blocker is None:
            return False
        return self.blocker.reason in NEEDS_PERSON and not self.awaits_room

    @property
    def awaits_room(self) -> bool:
        """Whether its process starts when nodes or quota are free, without a person."""
        if self.state is not JobState.WAITING or self.blocker is None:
            return False
        # A node in the zone of the volume may come without people.
        is_zonal = self.unschedulable_since and "affinity" in self.blocker.message
        return bool(is_zonal) or self.blocker.reason in ROOM

    @property
    def live(self) -> bool:
        """Whether one of its processes may still run."""
        return self.state in {JobState.WAITING, JobState.RUNNING}


@dataclass(frozen=True)
class ObservedServer:
    """A server that an attempt started and that keeps running after it."""

    stage: str
    current: bool
    """Whether the server receives the traffic of the stage."""
    problem: Blocker | None = None
    """Why the server does not answer now. None: it answers."""
    replicas: int | None = None
    """Number of replicas that it is asked for. None: not known."""
    pods: int = 0
    """Number of its pods."""


@dataclass(frozen=True)
class ClaimUser:
    """Another pipeline with the same claim, or a Job that an earlier pipeline left behind."""

    name: str
    """Name of the pipeline."""
    writing: bool
    """Whether a Job or a pod of it that mounts the claim has not ended."""
    recorded: bool = False
    """Whether its status has a running attempt: its Job may appear at any time."""
    finished: bool = False
    seniority: tuple[str, str] = ("", "")
    """Creation time and uid: the smaller is older."""


@dataclass(frozen=True)
class ClaimChange:
    """A change of the claim that an edit of the pipeline requires."""

    field: str
    """The field of the pipeline's spec that requires it."""
    patch: Mapping[str, Any]
    """JSON merge patch of the claim."""


@dataclass(frozen=True)
class ObservedWorkspace:
    """The claim of the pipeline, and who else uses it."""

    claim: str = ""
    """Name of the claim."""
    missing: bool = False
    """Whether the operator has yet to create the claim."""
    gone: bool = False
    """Whether the claim does not exist any more, by an answer of the API server."""
    deleting: bool = False
    """Whether the claim is being deleted. It exists until the last pod that mounts it is deleted, ended or not."""
    outdated: bool = False
    """Whether the user has to delete the claim, because Kubernetes cannot change it to what the spec asks for."""
    blocker: Blocker | None = None
    """Why no stage can use the claim."""
    warning: Blocker | None = None
    """Why the claim differs from the spec, if stages can use it anyway."""
    changes: tuple[ClaimChange, ...] = ()
    """Changes that bring the claim to what the spec asks for."""
    seniority: tuple[str, str] = ("", "")
    """The pipeline's own, to compare with the other users."""
    users: tuple[ClaimUser, ...] = ()
    read_results: frozenset[str] = frozenset()
    """STAGE/IDENTITY of each result in it that a pipeline of the namespace reads by its path."""


@dataclass(frozen=True)
class Observation:
    """Everything that a cluster observes of one pipeline."""

    jobs: Mapping[str, ObservedJob] = field(default_factory=dict)
    """Every Job of the pipeline, whether or not the status has an attempt of it."""
    servers: Mapping[str, ObservedServer] = field(default_factory=dict)
    """Job -> the server that it started, on a cluster that supports servers."""
    source_digests: Mapping[str, str] = field(default_factory=dict)
    """URI -> content digest, for sources that can change in place and that this cluster can read."""
    machine_failures: Collection[str] = frozenset()
    """Jobs that failed because of the machine itself, where no other machine can take over: a person must act first."""
    keeps_images: bool = True
    """Whether a later attempt can run the image of an earlier attempt. A local run has the installed trainer only."""
    has_service: bool = False
    """Whether the pipeline's own Service exists."""
    service_blocker: Blocker | None = None
    """Why no server can get requests: the Service belongs to another owner."""
    workspace: ObservedWorkspace = ObservedWorkspace()
    defaults: Defaults = NO_DEFAULTS
    """Defaults of the namespace."""
    defaults_blocker: Blocker | None = None
    """Why they cannot be used. No attempt starts without them: it might run where it must not."""
