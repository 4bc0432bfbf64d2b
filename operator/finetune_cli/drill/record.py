"""What is seen after an eviction: when the work was durable, when the next attempt came, and what was lost; pure."""

from dataclasses import dataclass, field
from typing import Any

from finetune_cli.drill.cost import cost_of
from finetune_cli.drill.target import Target
from finetune_operator.api.status import (
    AttemptStatus,
    Outcome,
    PipelineStatus,
    StageState,
    StageStatus,
)
from finetune_trainer.contract import Progress

SETTLE_SECONDS = 15.0
"""How long the status may take to tell the lost steps after the next step was seen."""
ENDED_WELL = frozenset({Outcome.RUNNING, Outcome.INTERRUPTED})


@dataclass(frozen=True)
class Look:
    """What one look at the pipeline found."""

    seconds: float
    """Since the eviction, by this machine's clock."""
    status: PipelineStatus
    ended: bool = False
    """Whether no process of the evicted attempt is left."""
    next_job: bool = False
    """Whether the Job of a later attempt exists."""
    progress: Progress | None = None
    """Progress of that attempt, where it could be read."""
    problem: str = ""
    """Why nothing more will happen."""


@dataclass
class Drill:
    """One eviction, and what was seen after it."""

    target: Target
    step: int | None = None
    """Step that the attempt had reached just before the eviction."""
    evicted: bool = False
    over: bool = False
    problem: str = ""
    """Why the drill is not over, or how the stage did not survive it; empty otherwise."""
    seconds: dict[str, float] = field(default_factory=dict)
    """`durable`, `nextJob` and `nextStep`, as far as they were seen: seconds since the eviction."""
    attempt: AttemptStatus | None = None
    """The evicted attempt as the status tells it now."""
    following: AttemptStatus | None = None
    """The newest attempt after it."""
    next_step: int | None = None
    resumed_at: int | None = None
    cost: dict[str, str] = field(default_factory=dict)

    def record(self, look: Look) -> bool:
        """Record what a look found; return whether the drill is over."""
        stage = look.status.stages.get(self.target.stage, StageStatus())
        self._record_attempts(look, stage)
        if look.ended or (self.attempt and self.attempt.outcome is not Outcome.RUNNING):
            self.seconds.setdefault("durable", look.seconds)
        if look.next_job:
            self.seconds.setdefault("nextJob", look.seconds)
        self._record_progress(look)
        complete = self._is_complete(look, stage)
        self.problem = self._find_problem(stage) or ("" if complete else look.problem)
        self.over = complete or bool(self.problem)
        return self.over

    @property
    def lost_steps(self) -> int | None:
        """Steps that the next attempt had to repeat, by the newest step that is known; None: not known yet."""
        told = self.attempt.lost_steps if self.attempt else None
        if self.resumed_at is None:
            return told
        last = [
            step
            for step in (self.step, self.attempt.last_step if self.attempt else None)
            if step is not None
        ]
        return max(told or 0, max(last) - self.resumed_at, 0) if last else told

    def _record_attempts(self, look: Look, stage: StageStatus) -> None:
        for attempt in stage.attempts:
            if attempt.number == self.target.attempt.number:
                self.attempt, self.cost = attempt, cost_of(look.status, attempt)
            elif attempt.number > self.target.attempt.number:
                self.following = attempt

    def _record_progress(self, look: Look) -> None:
        progress = look.progress
        if progress is None or progress.start_step is None:
            return
        if self.resumed_at is None:
            self.resumed_at = progress.start_step
        if progress.step > progress.start_step and self.next_step is None:
            self.next_step, self.seconds["nextStep"] = progress.step, look.seconds

    def _find_problem(self, stage: StageStatus) -> str:
        if self.attempt and self.attempt.outcome not in ENDED_WELL:
            message = f": {self.attempt.message}" if self.attempt.message else ""
            return f"the attempt was not interrupted, but {self.attempt.outcome.lower()}{message}"
        if stage.state is StageState.FAILED:
            return f"{self.target.stage} failed: {stage.reason}: {stage.message}"
        later = self.following
        if (
            later
            and later.outcome not in {Outcome.RUNNING, Outcome.SUCCEEDED}
            and self.next_step is None
        ):
            return f"attempt {later.number} ended before its first step, {later.outcome.lower()}: {later.message}"
        return ""

    def _is_complete(self, look: Look, stage: StageStatus) -> bool:
        if stage.state is StageState.SUCCEEDED:
            return True
        if self.next_step is None:
            return False
        settled = self.attempt is not None and self.attempt.lost_steps is not None
        return settled or look.seconds - self.seconds["nextStep"] > SETTLE_SECONDS

    def as_json(self) -> dict[str, Any]:
        """Return what was seen, by its names in JSON; what is not known is absent."""
        ended, later = self.attempt or self.target.attempt, self.following
        found: dict[str, Any] = {
            "pipeline": self.target.pipeline,
            "stage": self.target.stage,
            "attempt": ended.number,
            "kill": self.target.kill,
            "complete": self.over and not self.problem,
            "problem": self.problem or None,
            "outcome": ended.outcome,
            "step": self.step,
            "lastStep": ended.last_step,
            "savedStep": ended.saved_step,
            "lostSteps": self.lost_steps,
            "lostSeconds": ended.lost_seconds,
            "seconds": {name: round(value, 2) for name, value in self.seconds.items()},
            "nextAttempt": later and later.number,
            "resumedAtStep": self.resumed_at,
            "nextStep": self.next_step,
            "cost": self.cost or None,
        }
        return {name: value for name, value in found.items() if value is not None}
