"""The attempt that a drill evicts, and when a drill is refused; pure."""

from dataclasses import dataclass

from finetune_cli.exit_codes import ready_message
from finetune_operator.api.conditions import Reason
from finetune_operator.api.spec import STAGES
from finetune_operator.api.status import AttemptStatus, StageState, StageStatus
from finetune_operator.core.pipeline import Pipeline
from finetune_operator.errors import ClusterError

SERVERS = frozenset(stage.name for stage in STAGES if stage.runs_server)


class Refused(ClusterError):
    """Nothing was evicted. The message says why, and what the user can do."""


@dataclass(frozen=True)
class Target:
    """A running attempt that may be evicted."""

    pipeline: str
    stage: str
    attempt: AttemptStatus
    interruptions: int
    """Interruptions of the stage so far that count against its budget."""
    max_interruptions: int
    kill: bool
    """Whether the process gets no time to save."""

    def announce(self, what: str, grace: str) -> str:
        """Return what the drill does to `what`, for example a pod, and what it counts as; `grace`: its time."""
        limit = f"{self.max_interruptions} (spec.{self.stage}.maxInterruptions)"
        budget = f"interruption {self.interruptions + 1} of {limit}"
        work = f"attempt {self.attempt.number} of {self.stage} in {self.pipeline}"
        if self.kill:
            saved = self.attempt.saved_step
            lost = (
                ""
                if saved is None
                else f" Steps after step {saved}, the last one known to be saved, may be lost."
            )
            return f"This kills {what}: {work}. It gets {grace}, then SIGKILL.{lost} It counts as {budget}."
        return f"This evicts {what}: {work}. It gets SIGTERM, {grace} to save, then SIGKILL. It counts as {budget}."


def choose_target(pipeline: Pipeline, stage: str | None, *, kill: bool) -> Target:
    """Return the running attempt of a stage, or of the one that runs; raises Refused where there is none to evict."""
    name = stage or _running_stage(pipeline)
    if name in SERVERS:
        raise Refused(
            f"{name} is a server: it has no work to save, so a drill would show nothing; name another stage"
        )
    spec, status = pipeline.spec.stage(name), pipeline.status.stages.get(name)
    if spec is None or status is None:
        raise Refused(
            f"{name} is not a stage of {pipeline.key}, or has not been looked at by the operator yet"
        )
    attempt = status.running_attempt
    if attempt is None or status.state is not StageState.RUNNING:
        raise Refused(f"{name} is {_state(status)}; only a stage that is Running can be evicted")
    if attempt.stopping:
        raise Refused(f"{name} is being stopped already ({attempt.stopping})")
    if status.interruptions_counted >= spec.max_interruptions:
        raise Refused(_exhausted(name, status.interruptions_counted, spec.max_interruptions))
    return Target(
        str(pipeline.key), name, attempt, status.interruptions_counted, spec.max_interruptions, kill
    )


def _running_stage(pipeline: Pipeline) -> str:
    """Return the stage that runs or waits to run, a server only where it is the only one; raises Refused without."""
    running = pipeline.status.running_attempts()
    names = [name for name in running if name not in SERVERS] or list(running)
    if names:
        return names[0]
    state = ": ".join(filter(None, (pipeline.status.phase, ready_message(pipeline.status))))
    raise Refused(f"nothing of {pipeline.key} runs, so there is nothing to evict; it is {state}")


def _state(status: StageStatus) -> str:
    reason = "" if status.reason is Reason.PROGRESSING else status.reason
    return ": ".join(filter(None, (status.state, reason, status.message)))


def _exhausted(name: str, counted: int, limit: int) -> str:
    fix = "raise maxInterruptions, or run `finetune retry`, which counts from zero"
    return (
        f"{name} has had {counted} interruptions, and spec.{name}.maxInterruptions is {limit}: "
        f"number {counted + 1} would end the pipeline with RetriesExhausted; {fix}"
    )
