"""The record of an eviction: when the work was durable, when the next attempt came, and what was lost; pure."""

from dataclasses import dataclass, field
from typing import Any

from finetune_cli.drill.cost import cost_of
from finetune_cli.drill.target import DrillTarget
from finetune_operator.api.status import (
    AttemptStatus,
    Outcome,
    PipelineStatus,
    StageState,
    StageStatus,
)
from finetune_trainer.contract import Progress

# The operator writes the status of a running attempt only now and then, so the step is seen first.
SETTLE_SECONDS = 15.0
"""How long the status may take to have the lost steps after the next step was seen."""
# Running: the operator has not seen the end of the attempt yet.
ENDED_WELL = frozenset({Outcome.RUNNING, Outcome.INTERRUPTED})


@dataclass(frozen=True)
class Look:
    """The observations of one look at the pipeline."""

    seconds: float
    """Since the eviction, by this machine's clock."""
    status: PipelineStatus
    ended: bool = False
    """Whether no process of the evicted attempt is left."""
    next_job: bool = False
    """Whether the Job of a later attempt exists."""
    progress: Progress | None = None
    """Progress of the later attempt, if it could be read."""
    problem: str = ""
    """Why nothing more will happen."""


@dataclass
class Drill:
    """One eviction, and what was seen after it."""

    target: DrillTarget
    step: int | None = None
    """Step that the attempt had reached just before the eviction."""
    evicted: bool = False
    over: bool = False
    problem: str = ""
    """Why the drill is not over, or how the stage did not survive it; empty otherwise."""
    seconds: dict[str, float] = field(default_factory=dict)
    """`durable`, `nextJob` and `nextStep`, as far as they were seen: seconds since the eviction."""
    attempt: AttemptStatus | None = None
    """The evicted attempt as the status has it now."""
    following: AttemptStatus | None = None
    """The newest attempt after it."""
    next_step: int | None = None
    resumed_at: int | None = None
    cost: dict[str, str] = field(default_factory=dict)

    def record(self, look: Look) -> bool:
        """Record the observations of a look; return whether the drill is over."""
        stage = look.status.stages.get(self.target.stage, StageStatus())
        self._record_attempts(look, stage)
        has_outcome = (
            self.attempt is not None and self.attempt.outcome is not Outcome.RUNNING
        )
        # The first look that sees a moment is its time: later looks see it, too.
        if look.ended or has_outcome:
            self.seconds.setdefault("durable", look.seconds)
        if look.next_job:
            self.seconds.setdefault("nextJob", look.seconds)
        self._record_progress(look)
        complete = self._is_complete(look, stage)
        self.problem = self._find_problem(stage)
        if not self.problem and not complete:
            self.problem = look.problem
        self.over = complete or bool(self.problem)
        return self.over

    @property
    def lost_steps(self) -> int | None:
        """Steps that the next attempt had to repeat, by the newest step that is known; None: not known yet."""
        in_status = None
        known_steps = []
        if self.step is not None:
            known_steps.append(self.step)
        if self.attempt:
            in_status = self.attempt.lost_steps
            if self.attempt.last_step is not None:
                known_steps.append(self.attempt.last_step)
        if self.resumed_at is None or not known_steps:
            return in_status
        # The status may have an older step than this command has seen, so its number may be too small.
        return max(in_status or 0, max(known_steps) - self.resumed_at, 0)

    def _record_attempts(self, look: Look, stage: StageStatus) -> None:
        evicted = self.target.attempt.number
        for attempt in stage.attempts:
            if attempt.number == evicted:
                self.attempt = attempt
                self.cost = cost_of(look.status, attempt)
            elif attempt.number > evicted:
                self.following = attempt

    def _record_progress(self, look: Look) -> None:
        progress = look.progress
        # Without a start step, the process has not decided yet from which step it resumes.
        if progress is None or progress.start_step is None:
            return
        if self.resumed_at is None:
            self.resumed_at = progress.start_step
        if progress.step > progress.start_step and self.next_step is None:
            self.next_step = progress.step
            self.seconds["nextStep"] = look.seconds

    def _find_problem(self, stage: StageStatus) -> str:
        evicted = self.attempt
        if evicted and evicted.outcome not in ENDED_WELL:
            problem = f"the attempt was not interrupted, but {evicted.outcome.lower()}"
            if evicted.message:
                problem += f": {evicted.message}"
            return problem
        if stage.state is StageState.FAILED:
            return f"{self.target.stage} failed: {stage.reason}: {stage.message}"
        later = self.following
        if later is None or self.next_step is not None:
            return ""
        if later.outcome in {Outcome.RUNNING, Outcome.SUCCEEDED}:
            return ""
        return f"attempt {later.number} ended before its first step, {later.outcome.lower()}: {later.message}"

    def _is_complete(self, look: Look, stage: StageStatus) -> bool:
        # A short stage may succeed before a step of its next attempt was seen.
        if stage.state is StageState.SUCCEEDED:
            return True
        if self.next_step is None:
            return False
        has_lost_steps = (
            self.attempt is not None and self.attempt.lost_steps is not None
        )
        waited = look.seconds - self.seconds["nextStep"]
        return has_lost_steps or waited > SETTLE_SECONDS

    def as_json(self) -> dict[str, Any]:
        """Return the record by its names in JSON; unknown values are absent."""
        evicted = self.attempt or self.target.attempt
        next_attempt = None
        if self.following:
            next_attempt = self.following.number
        values: dict[str, Any] = {
            "pipeline": self.target.pipeline,
            "stage": self.target.stage,
            "attempt": evicted.number,
            "kill": self.target.kill,
            "complete": self.over and not self.problem,
            "problem": self.problem or None,
            "outcome": evicted.outcome,
            "step": self.step,
            "lastStep": evicted.last_step,
            "savedStep": evicted.saved_step,
            "lostSteps": self.lost_steps,
            "lostSeconds": evicted.lost_seconds,
            "seconds": {
                name: round(seconds, 2) for name, seconds in self.seconds.items()
            },
            "nextAttempt": next_attempt,
            "resumedAtStep": self.resumed_at,
            "nextStep": self.next_step,
            "cost": self.cost or None,
        }
        return {name: value for name, value in values.items() if value is not None}
