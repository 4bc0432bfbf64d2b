"""What would be done, stage by stage, and why: said before anything runs."""

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

PlannedAction = Literal["reuse", "run", "resume", "skip", "stay"]
DISTANT = ("image", "resources", "placement")
"""What a stage says to a cluster and a laptop cannot obey."""


@dataclass(frozen=True)
class Forecast:
    """One stage."""

    stage: str
    action: PlannedAction
    why: str
    identity: str = ""


@dataclass(frozen=True)
class KeptWork:
    """What an earlier attempt left of a stage's work."""

    action: Literal["reuse", "resume"]
    words: str


FindKeptWork = Callable[[str, StageAssessment], KeptWork | None]


def forecast(
    before: Pipeline | None, after: Pipeline, observed: Observation, now: datetime, keeps: FindKeptWork
) -> list[Forecast]:
    """Say of every stage what becomes of it where `before` gives way to `after`; `keeps` knows the workspace."""
    view = assess(after, observed, now)
    old = assess(before, observed, now).stages if before else {}
    found: list[Forecast] = []
    for name in view.stages:
        doing, why = _of_stage(name, view, old.get(name), found, suspended=after.spec.suspend, keeps=keeps)
        found.append(Forecast(name, doing, why, view.stages[name].status.identity))
    return found


def _of_stage(
    name: str,
    view: PipelineAssessment,
    old: StageAssessment | None,
    found: Sequence[Forecast],
    *,
    suspended: bool,
    keeps: FindKeptWork,
) -> tuple[PlannedAction, str]:
    stage = view.stages[name]
    if settled := _settled(stage):
        return settled
    needs = stage.spec.needs if stage.spec else ()
    stays = [need for need in needs if need in _forecast_stage(found, "stay")]
    if held := "spec.suspend is true" if suspended else f"waits for {stays[0]}" if stays else "":
        return "stay", held
    if running := _running(stage):
        return "run", running
    again = [need for need in needs if need in _forecast_stage(found, "run", "resume")]
    return _to_do(name, stage, old, again, keeps(name, stage))


def _forecast_stage(found: Sequence[Forecast], *doing: PlannedAction) -> set[str]:
    return {one.stage for one in found if one.action in doing}


def _settled(now: StageAssessment) -> tuple[PlannedAction, str] | None:
    """Tell the stage that will not start a process."""
    match now.status.state:
        case StageState.SUCCEEDED:
            return "reuse", f"done already{_took(now.status.active_seconds)}"
        case StageState.SKIPPED:
            return "skip", now.status.message
        case StageState.FAILED:
            return "stay", f"failed: {now.status.message}; `finetune retry` starts it again"
        case StageState.PENDING | StageState.QUEUED | StageState.RUNNING:
            return None


def _running(now: StageAssessment) -> str:
    """Tell of the attempt that is running and what it should be."""
    last = now.status.last_attempt
    if last is None or last.outcome is not Outcome.RUNNING or last.stopping:
        return ""
    if (last.identity, last.execution) != (now.status.identity, now.status.execution):
        return ""
    words = now.status.message and f": {now.status.message}"
    return f"attempt {last.number} is {'running' if now.status.state is StageState.RUNNING else 'waiting'}{words}"


def _to_do(
    name: str, now: StageAssessment, old: StageAssessment | None, again: list[str], kept: KeptWork | None
) -> tuple[PlannedAction, str]:
    why = _why(name, now, old, again)
    if kept is None:
        return "run", why
    return kept.action, kept.words if kept.action == "reuse" else f"{why}; {kept.words}"


def _took(seconds: float) -> str:
    return f", took {seconds:.0f} s" if seconds else ""


def _why(name: str, now: StageAssessment, old: StageAssessment | None, waits_for: list[str]) -> str:
    if old is None or old.config is None or not old.status.identity:
        return f"after {waits_for[-1]}" if waits_for else "not run yet"
    if changes := list(_changes(f"spec.{name}", _own_changes(now.spec), _own_changes(old.spec))):
        return ", ".join(changes[:3]) + (f" and {len(changes) - 3} more" if len(changes) > 3 else "")  # noqa: PLR2004
    if waits_for:
        return f"{waits_for[-1]} is run again" if old.status.attempts or old.status.result else f"after {waits_for[-1]}"
    return "a source has changed" if now.status.identity != old.status.identity else "not finished yet"


def _own_changes(spec: StageSpec | None) -> dict[str, Any]:
    return spec.model_dump(mode="json", by_alias=True, exclude_none=True) if spec else {}


def _changes(path: str, new: Any, old: Any) -> Iterator[str]:
    if isinstance(new, dict) and isinstance(old, dict):
        for key in sorted({*new, *old}):
            yield from _changes(f"{path}.{key}", new.get(key), old.get(key))
    elif new != old:
        yield f"{path}: {_said(old)} → {_said(new)}"


def _said(value: Any) -> str:
    return "absent" if value is None else str(value)


def without_effect(spec: PipelineSpec) -> list[str]:
    """Name the fields that were written for a cluster and change nothing on a laptop."""
    stages = spec.stages().items()
    return [f"spec.{name}.{field}" for name, stage in stages for field in DISTANT if field in stage.model_fields_set]
