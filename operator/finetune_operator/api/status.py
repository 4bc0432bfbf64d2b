"""The status of a FineTunePipeline, written by the operator.

`assess` reads back only what cannot be observed again: identities, attempts and their outcomes, counters, results,
`budgetBaseAttempt`, `earlierCosts`, `workspaceOutdated`, `cancelled`, `observedAnnotations` and `refusals`. Phase,
stage, progress, conditions, sums and every state are output for users and tools. Fields, reasons and states of another
version are kept. An unknown outcome of an attempt is an error: what it counts against is not known.
"""

from datetime import datetime
from enum import StrEnum
from typing import Annotated, TypeVar

from pydantic import Field, StringConstraints, WithJsonSchema

from finetune_operator.api.amounts import Amount
from finetune_operator.api.conditions import Condition, OpenEnum, Reason
from finetune_operator.api.costs import Costs, PipelineCosts
from finetune_operator.api.model_status import ModelStatus, ServerStatus
from finetune_operator.api.named_list import NamedList
from finetune_trainer.contract import (
    AnyResult,
    ExtensibleModel,
    ListMap,
    MaybeLossCurve,
    MaybeProgress,
)

# The kubelet cuts the termination message of a container at 4096 bytes, so every such message fits.
MESSAGE_LENGTH = 4096
Message = Annotated[str, StringConstraints(max_length=MESSAGE_LENGTH)]
StoredResult = Annotated[
    AnyResult,
    WithJsonSchema({"type": "object", "x-kubernetes-preserve-unknown-fields": True}),
]

# More would let the object grow without limit.
ATTEMPTS_KEPT = 10
"""Attempts per stage in the status, beside the newest of each node class."""


def truncate_message(text: str) -> str:
    """Return the text cut to the maximum length of a Message; the API server rejects a longer message."""
    if len(text) <= MESSAGE_LENGTH:
        return text
    # The mark has two characters and must fit, too.
    return text[: MESSAGE_LENGTH - 2] + " …"


class StageState(OpenEnum):
    """State of a stage."""

    PENDING = "Pending"
    QUEUED = "Queued"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    SKIPPED = "Skipped"


# Closed, unlike the other enums: the operator counts attempts by their outcome, and cannot count an unknown outcome.
class Outcome(StrEnum):
    """Outcome of an attempt."""

    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    """The program failed. Counts against maxFailures."""
    INTERRUPTED = "Interrupted"
    """The attempt was evicted or preempted, or its node was lost. Counts against maxInterruptions."""
    STOPPED = "Stopped"
    """Stopped on request: suspended, cancelled, or the spec changed. Counts against no budget."""


class AttemptStatus(ExtensibleModel):
    """One attempt of a stage, which is one Job."""

    number: int = Field(ge=1)
    """Number of the attempt, starting at 1. Never reused within a stage."""
    job: str
    """Name of the Job."""
    identity: str
    """Hash of everything that determines the attempt's result."""
    execution: str
    """Hash of how the attempt runs: resources, placement, image and environment."""
    outcome: Outcome = Outcome.RUNNING
    """Outcome of the attempt, or Running."""
    reason: Reason = Reason.PROGRESSING
    """Machine-readable reason of the outcome."""
    message: Message = ""
    """Termination message of the process, or what the operator observed."""
    exit_code: int | None = None
    """Exit code of the process. Absent if it was not observed."""
    stopping: Reason | None = None
    """Why the operator stopped the attempt. Absent if it did not."""
    stopped_after_seconds: float | None = None
    """Least running time of an attempt that was stopped for a deadline, by the operator's clock. Absent for others."""
    capacity: str | None = None
    """Capacity type of the attempt's nodes: Spot or OnDemand. Absent in a local run."""
    node_class: str | None = None
    """Name of the attempt's node class in the operator's configuration. Absent: any nodes of the capacity type."""
    node: str | None = None
    """Name of the node on which the pod ran. Of several pods, the node of the pod with index 0."""
    failed_node: str | None = None
    """Name of the node of the pod that ended the attempt, if it is another."""
    price: Amount | None = None
    """Price per hour of all pods of the attempt together, when the attempt began. Absent: not known."""
    on_demand_price: Amount | None = None
    """Price per hour of the same pods on on-demand nodes, when the attempt began. Absent: not known."""
    created_at: datetime | None = None
    """Time at which the Job was first observed."""
    started_at: datetime | None = None
    """Time at which the process started. With several pods, the time at which the last process started."""
    blocked_at: datetime | None = None
    """Time since which the attempt has waited for a person, for example for its image, a Secret or a volume, or since
    which its server has not been ready. Absent if it does not."""
    suspended_at: datetime | None = None
    """Time at which a suspension of the Job, for example by a queue, ended the process. Absent while a process runs."""
    resumed_at: datetime | None = None
    """Time at which a process started again after the last suspension. Absent: none has."""
    suspensions: int = 0
    """Number of suspensions of the Job that ended a process. Each is an interruption of the stage."""
    suspended_seconds: float = 0.0
    """Time between the end of a process by a suspension and the start of the next process, in seconds. It counts as no
    running time."""
    finished_at: datetime | None = None
    """Time at which the attempt ended."""
    start_step: int | None = None
    """Step at which the attempt began. Greater than 0 after a resume."""
    last_step: int | None = None
    """Last step that the attempt is known to have finished."""
    saved_step: int | None = None
    """Newest step of the attempt that is known to be durable. Absent for a stage without steps."""
    total_steps: int | None = None
    """Number of steps of the whole stage. Absent until known."""
    step_seconds: float | None = None
    """Mean duration of a step, in seconds."""
    lost_steps: int | None = None
    """Steps of this attempt that the next attempt had to repeat. Absent until known."""
    lost_seconds: float | None = None
    """Time that the lost steps had taken, in seconds."""
    seconds: float | None = None
    """Running time, in seconds. Absent while the attempt runs."""
    steps: int | None = None
    """Steps that the attempt has finished, lost steps included. Absent for a stage without steps."""
    cost: Amount | None = None
    """Price of the running time. Absent while the attempt runs, or if its price is not known."""
    lost_cost: Amount | None = None
    """Part of the cost that its interruption wasted: lost steps, and time without steps. Absent if not interrupted."""


class PlacementStatus(ExtensibleModel):
    """Where the newest attempt of a stage runs, and why."""

    capacity: str
    """Capacity type: Spot or OnDemand."""
    node_class: str | None = None
    """Name of the node class. Absent: any nodes of the capacity type."""
    cause: str
    """Why the operator chose these nodes, in CamelCase."""
    message: Message = ""
    """Why the operator chose these nodes, with the numbers that it compared."""


class Begun(ExtensibleModel):
    """What the first attempt of a stage began with.

    Later attempts go on with it, also after an upgrade. Another version compares an edit of the spec with it.
    """

    config: str
    """Config of the stage's process, as JSON: all values, defaults included."""
    image: str
    """Image of the stage's container. Later attempts use it if the operator's own trainer has other results."""
    program: str = ""
    """Hash of the program that the user runs in place of the trainer; empty without one."""


# Stages are a map by name in Python, and a list in JSON, so that a new stage changes no structure of the schema.
class StageStatus(ExtensibleModel):
    """Status of one stage."""

    state: StageState = StageState.PENDING
    """State of the stage."""
    reason: Reason = Reason.PROGRESSING
    """Machine-readable reason of the state."""
    message: Message = ""
    """Human-readable explanation of the state."""
    identity: str = ""
    """Name of the stage's result: the hash of its inputs when the stage was first asked for them."""
    inputs: str = ""
    """Hashes of everything that determines the result, as the version in observedVersion computes them."""
    results_version: int = 0
    """Results version of the trainer for which the identity was made. An upgrade of the operator keeps it."""
    begun: Begun | None = None
    """What the first attempt with this identity began with. Absent before it."""
    execution: str = ""
    """Hash of how the stage runs: resources, placement, image and environment."""
    attempts: Annotated[
        tuple[AttemptStatus, ...],
        Field(json_schema_extra={"x-kubernetes-list-type": "atomic"}),
    ] = ()
    """Ten attempts of the stage, oldest first, or the newest on each node class if these are more."""
    failures: int = 0
    """Number of failed attempts with this identity."""
    interruptions: int = 0
    """Number of interrupted attempts with this identity."""
    lost_steps: int = 0
    """Steps that had to be repeated, over all attempts with this identity."""
    lost_seconds: float = 0.0
    """Time that the lost steps had taken, in seconds."""
    active_seconds: float = 0.0
    """Running time of ended attempts with this identity since the last retry request, in seconds."""
    placement: PlacementStatus | None = None
    """Where the newest attempt runs, and why. Absent in a local run."""
    costs: Costs | None = None
    """Running time and money of all ended attempts, whatever their identity. Absent until an attempt has ended."""
    # Attempts leave the list. Without this sum, their costs could not be observed again.
    earlier_costs: Costs | None = None
    """Running time and money of the ended attempts that attempts no longer lists."""
    # A retry request does not reset the counters above. It moves their base.
    budget_base_attempt: int = 0
    """Attempts up to this number do not count for the retry limits, because of a retry request or a changed spec."""
    budget_base_failures: int = 0
    """Number of failed attempts that do not count for maxFailures."""
    budget_base_interruptions: int = 0
    """Number of interrupted attempts that do not count for maxInterruptions."""
    started_at: datetime | None = None
    """Time at which the first attempt started."""
    finished_at: datetime | None = None
    """Time at which the stage succeeded."""
    progress: MaybeProgress = None
    """Latest progress report of the current attempt, without its curve."""
    # Beside progress, which a new attempt empties: users want to see the curve most while they wait for a node.
    loss_curve: MaybeLossCurve = None
    """Loss of the whole training so far. Stays while the next attempt waits. Absent in stages without a loss."""
    result: StoredResult | None = None
    """Result of the stage: its digest, and what its process reports, such as loss, scores, published models or a
    server's URL. Absent until it succeeds."""
    model_digest: str | None = None
    """Digest of the base model in the latest result of prepare. Stays while prepare is repeated."""
    model_pin: str | None = None
    """Version of the base model at its store, in the latest result of prepare. Absent in other stages."""
    start_digest: str | None = None
    """Digest of the adapter that training starts from, in the latest result of prepare. Absent in other stages."""
    start_pin: str | None = None
    """Version at its store of the adapter that training starts from, in the latest result of prepare."""

    @property
    def failures_counted(self) -> int:
        """Return the failures that count against maxFailures."""
        return self.failures - self.budget_base_failures

    @property
    def interruptions_counted(self) -> int:
        """Return the interruptions that count against maxInterruptions."""
        return self.interruptions - self.budget_base_interruptions

    def counts(self, attempt: AttemptStatus) -> bool:
        """Return whether the attempt is newer than the last retry request or change of the spec."""
        return attempt.number > self.budget_base_attempt

    @property
    def last_attempt(self) -> AttemptStatus | None:
        """Return the newest attempt, running or ended, or None."""
        return self.attempts[-1] if self.attempts else None

    @property
    def running_attempt(self) -> AttemptStatus | None:
        """Return the attempt that is not known to have ended, or None. Only the newest attempt can be running."""
        last = self.last_attempt
        return last if last and last.outcome is Outcome.RUNNING else None


StagesByName = Annotated[dict[str, StageStatus], NamedList()]


class GateStatus(ExtensibleModel):
    """Comparison of a measured score with a gate of evaluate.gates."""

    task: str
    """Task of the gate."""
    metric: str
    """Metric of the gate."""
    operator: str
    """Operator of the gate."""
    against: str
    """What was compared: Value or Base."""
    value: float
    """Value of the gate."""
    score: float | None = None
    """Measured score. Absent if it was not measured or is not finite."""
    stderr: float | None = None
    """Standard error of the score. Absent if it is unknown or not finite."""
    base: float | None = None
    """Score of the base model on the same questions. Absent if it was not measured or is not finite."""
    difference_stderr: float | None = None
    """Standard error of the paired difference from the base model. Absent if it is unknown or not finite."""
    measured: bool = True
    """Whether there is a score to compare. False if the gate needs a number that was not measured."""
    passed: bool
    """Whether the score, or its difference from the base model's score, is on the right side by the margin of error."""
    message: Message
    """Human-readable comparison."""


class HandledAnnotations(ExtensibleModel):
    """Values of the annotations that the operator handled last."""

    retry: str | None = None
    """Last handled value of the retry annotation."""
    cancel: str | None = None
    """Last handled value of the cancel annotation."""
    adopt: str | None = None
    """Last handled value of the adopt annotation."""


class Refusal(ExtensibleModel):
    """A request of the operator that the API server refused, and that the operator repeats."""

    subject: str
    """What was to be created or changed: the name of an attempt's Job, or a field of the spec."""
    reason: Reason
    """Machine-readable reason of the refusal."""
    message: Message
    """Answer of the API server, and how to fix it."""


R = TypeVar("R")


class PipelineStatus(ExtensibleModel):
    """Observed state of the pipeline, written by the operator."""

    observed_generation: int = 0
    """Generation of the spec that this status describes."""
    observed_version: str = ""
    """Hash of the operator's code that turns a spec into inputs. Another operator reruns nothing because of it."""
    phase: str = "Pending"
    """One-word summary for users. The operator never reads it back."""
    stage: str = ""
    """Stage that is running, or at which the pipeline stopped."""
    progress: str = ""
    """Progress of the stage that the field stage names, in percent."""
    attempt: int = 0
    """Number of the newest attempt of the stage that the field stage names."""
    # The operator reads none of the conditions back. It keeps only their transition times.
    conditions: Annotated[tuple[Condition, ...], ListMap("type")] = ()
    """Conditions: Ready, Reconciling, Stalled, Finished, and a condition for each stage."""
    stages: StagesByName = Field(default_factory=dict)
    """Status of each stage. A result has a digest and what the process reports, such as loss, scores, published models
    or a server's URL."""
    gates: Annotated[
        tuple[GateStatus, ...],
        Field(json_schema_extra={"x-kubernetes-list-type": "atomic"}),
    ] = ()
    """Comparisons of the measured scores with evaluate.gates. Empty until evaluate is done."""
    gates_passed: bool | None = None
    """Whether all gates passed. Absent until evaluate is done, and without gates."""
    model: ModelStatus | None = None
    """The published model. Absent until push is done."""
    server: ServerStatus | None = None
    """The server that gets the requests. Absent until a server has answered the prompt."""
    interruptions: int = 0
    """Interrupted attempts of all stages."""
    lost_steps: int = 0
    """Steps that had to be repeated, over all stages."""
    lost_seconds: float = 0.0
    """Time that the lost steps of all stages had taken, in seconds."""
    costs: PipelineCosts | None = None
    """Running time and money of all ended attempts. Absent until an attempt with a known price has ended."""
    spent: str = ""
    """Sum of the costs of all ended attempts, with its currency, for people."""
    started_at: datetime | None = None
    """Time at which the first stage started."""
    finished_at: datetime | None = None
    """Time at which the pipeline finished, successfully or not."""
    workspace_outdated: bool | None = None
    """Whether the claim has to be deleted for an edit of the workspace. All stages run again if it is. Absent: no."""
    cancelled: bool = False
    """Whether the pipeline was cancelled and not retried since."""
    observed_annotations: HandledAnnotations = HandledAnnotations()
    """Values of the annotations that the operator handled last."""
    refusals: Annotated[tuple[Refusal, ...], ListMap("subject")] = ()
    """Requests that the API server refused and that the operator repeats."""

    def running_attempts(self) -> dict[str, AttemptStatus]:
        """Return the attempts that are not known to have ended, by stage."""
        running = {name: stage.running_attempt for name, stage in self.stages.items()}
        return {name: attempt for name, attempt in running.items() if attempt}

    def result(self, kind: type[R]) -> R | None:
        """Return the result of this kind, such as a PushResult; None if its stage has none yet."""
        for stage in self.stages.values():
            if isinstance(stage.result, kind):
                return stage.result
        return None
