"""The attempt that a drill evicts, and when a drill is refused; pure."""

from dataclasses import dataclass

from finetune_cli.outcome import ready_message
from finetune_operator.api.conditions import Reason
from finetune_operator.api.spec import STAGES
from finetune_operator.api.status import (
    AttemptStatus,
    PipelineStatus,
    StageState,
    StageStatus,
)
from finetune_operator.core.pipeline import Pipeline
from finetune_operator.errors import ClusterError

# Stages without work to save: an eviction only starts another server.
SERVERS = frozenset(stage.name for stage in STAGES if stage.runs_server)


class Refused(ClusterError):
    """Nothing was evicted. The message says why, and what the user can do."""


@dataclass(frozen=True)
class DrillTarget:
    """A running attempt that may be evicted."""

    pipeline: str
    stage: str
    attempt: AttemptStatus
    interruptions: int
    """Interruptions of the stage so far that count against its budget."""
    max_interruptions: int
    kill: bool
    """Whether the process gets no time to save."""

    def announce(self, process: str, grace: str) -> str:
        """Return the announcement of an eviction.

        `process` is a pod or a process in words, and `grace` the time that it gets.
        """
        limit = f"{self.max_interruptions} (spec.{self.stage}.maxInterruptions)"
        budget = f"It counts as interruption {self.interruptions + 1} of {limit}."
        work = f"attempt {self.attempt.number} of {self.stage} in {self.pipeline}"
        if not self.kill:
            steps = f"It gets SIGTERM, {grace} to save, then SIGKILL."
            return f"This evicts {process}: {work}. {steps} {budget}"
        steps = f"It gets {grace}, then SIGKILL."
        saved = self.attempt.saved_step
        if saved is not None:
            steps += f" Steps after step {saved}, the last step known to be saved, may be lost."
        return f"This kills {process}: {work}. {steps} {budget}"

    def later_attempt(self, status: PipelineStatus) -> AttemptStatus | None:
        """Return the newest attempt of the stage after the evicted attempt, or None."""
        stage = status.stages.get(self.stage)
        if stage is None or stage.last_attempt is None:
            return None
        if stage.last_attempt.number <= self.attempt.number:
            return None
        return stage.last_attempt


def choose_target(pipeline: Pipeline, stage: str | None, *, kill: bool) -> DrillTarget:
    """Return the running attempt of a stage, by default of the running stage; raises Refused if there is none."""
    name = stage or _running_stage(pipeline)
    if name in SERVERS:
        raise Refused(
            f"{name} is a server: it has no work to save, so a drill would show nothing; name another stage"
        )
    spec = pipeline.spec.stage(name)
    status = pipeline.status.stages.get(name)
    if spec is None or status is None:
        raise Refused(
            f"{name} not found in {pipeline.key}; the operator may not have reconciled it yet"
        )
    attempt = status.running_attempt
    # A queued attempt has no process.
    if attempt is None or status.state is not StageState.RUNNING:
        raise Refused(
            f"{name} is {_state(status)}; only a stage that is Running can be evicted"
        )
    if attempt.stopping:
        raise Refused(f"{name} is being stopped already ({attempt.stopping})")
    counted = status.interruptions_counted
    limit = spec.max_interruptions
    # One more interruption would end the pipeline, and a drill must not.
    if counted >= limit:
        raise Refused(_exhausted(name, counted, limit))
    return DrillTarget(
        pipeline=str(pipeline.key),
        stage=name,
        attempt=attempt,
        interruptions=counted,
        max_interruptions=limit,
        kill=kill,
    )


def _running_stage(pipeline: Pipeline) -> str:
    """Return the stage that runs or waits to run, a server only if nothing else runs; raises Refused without."""
    running = list(pipeline.status.running_attempts())
    for name in running:
        if name not in SERVERS:
            return name
    if running:
        return running[0]
    status = pipeline.status
    state = _with_colons(status.phase, ready_message(status))
    raise Refused(
        f"nothing of {pipeline.key} runs, so there is nothing to evict; it is {state}"
    )


def _state(status: StageStatus) -> str:
    if status.reason is Reason.PROGRESSING:
        return _with_colons(status.state, status.message)
    return _with_colons(status.state, status.reason, status.message)


def _with_colons(*parts: str) -> str:
    return ": ".join(part for part in parts if part)


def _exhausted(name: str, counted: int, limit: int) -> str:
    fix = "raise maxInterruptions, or run `finetune retry`, which counts from zero"
    return (
        f"{name} has had {counted} interruptions, and spec.{name}.maxInterruptions is {limit}: "
        f"number {counted + 1} would end the pipeline with RetriesExhausted; {fix}"
    )
