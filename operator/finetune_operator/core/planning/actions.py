"""The actions that a plan is made of, in the order in which they are executed. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import get_args

from finetune_operator.api.conditions import Reason
from finetune_operator.core.job_template import JobTemplate
from finetune_operator.core.observation import ClaimChange
from finetune_operator.core.workspace import WORKSPACE


@dataclass(frozen=True)
class StopJob:
    """Stop the Job as an eviction would. Does nothing if the Job is stopping or gone already."""

    name: str
    reason: Reason


@dataclass(frozen=True)
class ReplaceLost:
    """Delete a Job with pods on lost nodes, and these pods by force, although their processes may still run."""

    job: str


@dataclass(frozen=True)
class DeleteJob:
    """Delete a Job that has ended, with its pod."""

    name: str


@dataclass(frozen=True)
class DeleteService:
    """Delete the Service: no server is left that could get its requests."""


@dataclass(frozen=True)
class ChangeWorkspace:
    """Change the claim to what the spec asks for."""

    change: ClaimChange


@dataclass(frozen=True)
class ProbeServer:
    """Send a prompt to the server of this attempt, which is ready."""

    job: str


@dataclass(frozen=True)
class SwitchTraffic:
    """Send the traffic of the stage to the server of this attempt, and to no other."""

    stage: str
    job: str


@dataclass(frozen=True)
class ScaleServer:
    """Change the number of replicas of a running server, in place."""

    job: str
    replicas: int


@dataclass(frozen=True)
class CreateWorkspace:
    """Create the claim."""

    storage_class: str | None = None
    """Storage class of a claim whose pipeline names none. None: the cluster's default."""


@dataclass(frozen=True)
class CreateJob:
    """Create the Job. Does nothing if a Job of this name exists already, because names are deterministic."""

    job: JobTemplate


@dataclass(frozen=True)
class DeletePipeline:
    """Delete the pipeline, because its ttlSecondsAfterFinished has passed and whenExpired is Delete."""


Action = (
    StopJob
    | ReplaceLost
    | DeleteService
    | ChangeWorkspace
    | ProbeServer
    | SwitchTraffic
    | ScaleServer
    | CreateWorkspace
    | CreateJob
    | DeleteJob
    | DeletePipeline
)
ORDER = get_args(Action)
"""The order of execution: what stops, then what starts (the claim before the Job that mounts it), then what tidies."""


def subject_of(action: Action) -> str:
    """Return what a refusal of the action is about: an attempt's Job, or a field of the spec."""
    match action:
        case (
            StopJob(name, _)
            | DeleteJob(name)
            | ReplaceLost(name)
            | ProbeServer(name)
            | SwitchTraffic(_, name)
            | ScaleServer(name, _)
        ):
            return name
        case CreateJob(job):
            return job.name
        case ChangeWorkspace(change):
            return change.field
        case CreateWorkspace():
            return WORKSPACE
        case DeleteService():
            return "service"
        case DeletePipeline():
            return "ttlSecondsAfterFinished"


def in_order(actions: Iterable[Action]) -> tuple[Action, ...]:
    """Return the actions in the order of their execution."""
    return tuple(sorted(actions, key=lambda action: ORDER.index(type(action))))


def writes_to_claim(actions: Iterable[Action]) -> bool:
    """Return whether a Job is created that writes to the claim, which has one writer at a time."""
    return any(
        isinstance(action, CreateJob) and not action.job.serving for action in actions
    )
