"""Forecast: the planned action of each stage and its reason, before anything runs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from finetune_operator.api.spec import PipelineSpec
from finetune_operator.api.stages.base import StageSpec
from finetune_operator.api.status import Outcome, StageState
from finetune_operator.core.assess import PipelineAssessment, StageAssessment, assess
from finetune_operator.core.observation import Observation
from finetune_operator.core.pipeline import Pipeline

PlannedAction = Literal["reuse", "run", "resume", "skip", "blocked"]
"""`blocked`: the stage neither has a result nor starts; it has failed, is suspended or waits for such a stage."""
CLUSTER_ONLY_FIELDS = ("image", "resources", "placement")
"""Fields of a stage that have no effect in a run on this machine."""
MAX_CHANGES = 3
"""So many changed fields are named; the rest is counted."""


@dataclass(frozen=True)
class Forecast:
    """The planned action of one stage."""

    stage: str
    action: PlannedAction
    why: str
    identity: str = ""


@dataclass(frozen=True)
class KeptWork:
    """Work of an earlier attempt that the stage would reuse or resume from."""

    action: Literal["reuse", "resume"]
    reason: str


FindKeptWork = Callable[[str, StageAssessment], KeptWork | None]
"""Returns the kept work of a stage, given its name and assessment; None where there is none."""


def forecast(
    before: Pipeline | None, after: Pipeline, observed: Observation, now: datetime, find_kept_work: FindKeptWork
) -> list[Forecast]:
    """Return the planned action of every stage if `after` replaced `before`, in the order of the stages."""
    assessment = assess(after, observed, now)
    old = assess(before, observed, now).stages if before else {}
    forecasts: list[Forecast] = []
    for name in assessment.stages:
        action, why = _plan_stage(
            name, assessment, old.get(name), forecasts, suspended=after.spec.suspend, find_kept_work=find_kept_work
        )
        forecasts.append(Forecast(name, action, why, assessment.stages[name].status.identity))
    return forecasts


def _plan_stage(
    name: str,
    assessment: PipelineAssessment,
    old: StageAssessment | None,
    earlier: Sequence[Forecast],
    *,
    suspended: bool,
    find_kept_work: FindKeptWork,
) -> tuple[PlannedAction, str]:
    """Return action and reason of one stage; `earlier` holds the forecasts of the stages before it."""
    stage = assessment.stages[name]
    if settled := _settled(stage):
        return settled
    needs = stage.spec.needs if stage.spec else ()
    blocked = [need for need in needs if need in _stages_with(earlier, "blocked")]
    if why := "spec.suspend is true" if suspended else f"waits for {blocked[0]}" if blocked else "":
        return "blocked", why
    if running := _running(stage):
        return "run", running
    rerun = [need for need in needs if need in _stages_with(earlier, "run", "resume")]
    return _start(name, stage, old, rerun, find_kept_work(name, stage))


def _stages_with(forecasts: Sequence[Forecast], *actions: PlannedAction) -> set[str]:
    return {one.stage for one in forecasts if one.action in actions}


def _settled(now: StageAssessment) -> tuple[PlannedAction, str] | None:
    """Return action and reason of a stage that will not start a process; None for the others."""
    match now.status.state:
        case StageState.SUCCEEDED:
            return "reuse", f"already done{_duration(now.status.active_seconds)}"
        case StageState.SKIPPED:
            return "skip", now.status.message
        case StageState.FAILED:
            return "blocked", f"failed: {now.status.message}; `finetune retry` starts it again"
        case StageState.PENDING | StageState.QUEUED | StageState.RUNNING:
            return None


def _running(now: StageAssessment) -> str:
    """Return the reason for a stage whose current attempt already runs the new spec; empty for the others."""
    last = now.status.last_attempt
    if last is None or last.outcome is not Outcome.RUNNING or last.stopping:
        return ""
    if (last.identity, last.execution) != (now.status.identity, now.status.execution):
        return ""
    detail = now.status.message and f": {now.status.message}"
    return f"attempt {last.number} is {'running' if now.status.state is StageState.RUNNING else 'waiting'}{detail}"


def _start(
    name: str, now: StageAssessment, old: StageAssessment | None, rerun: list[str], kept: KeptWork | None
) -> tuple[PlannedAction, str]:
    why = _start_reason(name, now, old, rerun)
    if kept is None:
        return "run", why
    return kept.action, kept.reason if kept.action == "reuse" else f"{why}; {kept.reason}"


def _duration(seconds: float) -> str:
    return f", took {seconds:.0f} s" if seconds else ""


def _start_reason(name: str, now: StageAssessment, old: StageAssessment | None, rerun: list[str]) -> str:
    """Return why a stage starts: its own changed fields first, then the needed stages that run before it."""
    if old is None or old.config is None or not old.status.identity:
        return f"after {rerun[-1]}" if rerun else "not run yet"
    if changes := list(_changes(f"spec.{name}", _set_fields(now.spec), _set_fields(old.spec))):
        more = f" and {len(changes) - MAX_CHANGES} more" if len(changes) > MAX_CHANGES else ""
        return ", ".join(changes[:MAX_CHANGES]) + more
    if rerun:
        return f"{rerun[-1]} runs again" if old.status.attempts or old.status.result else f"after {rerun[-1]}"
    return "a source has changed" if now.status.identity != old.status.identity else "not finished yet"


def _set_fields(spec: StageSpec | None) -> dict[str, Any]:
    return spec.model_dump(mode="json", by_alias=True, exclude_none=True) if spec else {}


def _changes(path: str, new: Any, old: Any) -> Iterator[str]:
    if isinstance(new, dict) and isinstance(old, dict):
        for key in sorted({*new, *old}):
            yield from _changes(f"{path}.{key}", new.get(key), old.get(key))
    elif new != old:
        yield f"{path}: {_format(old)} → {_format(new)}"


def _format(value: Any) -> str:
    return "absent" if value is None else str(value)


def without_effect(spec: PipelineSpec) -> list[str]:
    """Return the paths of the fields that the manifest sets and that only a cluster uses."""
    return [
        f"spec.{name}.{field}"
        for name, stage in spec.stages().items()
        for field in CLUSTER_ONLY_FIELDS
        if field in stage.model_fields_set
    ]
