"""Forecast: the planned action of each stage and its reason, before anything runs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from finetune_cli.exit_codes import BELOW_GATE
from finetune_cli.fields import PATHS_OF_CONFIG_FIELDS
from finetune_operator.api.spec import STAGES
from finetune_operator.api.stages.base import StageSpec
from finetune_operator.api.status import Outcome, StageState
from finetune_operator.core.assess import PipelineAssessment, StageAssessment, assess
from finetune_operator.core.durations import format_duration
from finetune_operator.core.identity import EXECUTION_FIELDS, PROGRAM_FIELDS
from finetune_operator.core.observation import Observation
from finetune_operator.core.pipeline import Pipeline
from finetune_trainer.contract import TrainConfig

PlannedAction = Literal["reuse", "run", "resume", "skip", "blocked"]
"""`blocked`: the stage neither has a result nor starts; it has failed, is suspended or waits for such a stage."""
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


@dataclass(frozen=True)
class PipelineForecast:
    """The planned actions of all stages, in their order, and what they start from."""

    stages: list[Forecast]
    assessment: PipelineAssessment
    """The state of all stages, if the edit were applied now."""

    @property
    def notes(self) -> list[str]:
        """What the actions alone do not show: a gate that closes after what depends on it is done."""
        closed = [gate.message for gate in self.assessment.gates if not gate.passed]
        done = [one.stage for one in self.stages if one.action == "reuse"]
        depends = [
            name
            for name in done
            if getattr(self.assessment.stages[name].spec, "when", "") == "GatesPassed"
        ]
        if not closed:
            return []
        kept = f"; done under an earlier gate: {', '.join(depends)}" if depends else ""
        return [f"a gate is closed, so the exit code is {BELOW_GATE}: {'; '.join(closed)}{kept}"]


def forecast(
    before: Pipeline | None,
    after: Pipeline,
    observed: Observation,
    now: datetime,
    find_kept_work: FindKeptWork,
) -> PipelineForecast:
    """Return the planned action of every stage if `after` replaced `before`."""
    assessment = assess(after, observed, now)
    old = assess(before, observed, now).stages if before else {}
    forecasts: list[Forecast] = []
    for name in assessment.stages:
        action, why = _plan_stage(
            name,
            assessment,
            old.get(name),
            forecasts,
            suspended=after.spec.suspend,
            find_kept_work=find_kept_work,
        )
        forecasts.append(Forecast(name, action, why, assessment.stages[name].status.identity))
    return PipelineForecast(forecasts, assessment)


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
    name: str,
    now: StageAssessment,
    old: StageAssessment | None,
    rerun: list[str],
    kept: KeptWork | None,
) -> tuple[PlannedAction, str]:
    why = _start_reason(name, now, old, rerun)
    if kept is None:
        return "run", why
    return kept.action, kept.reason if kept.action == "reuse" else f"{why}; {kept.reason}"


def _duration(seconds: float) -> str:
    return f", took {format_duration(seconds)}" if seconds else ""


def _start_reason(
    name: str, now: StageAssessment, old: StageAssessment | None, rerun: list[str]
) -> str:
    """Return why a stage starts: its own changed fields that matter, and the needed stage that runs before it.

    A field that changes neither the result nor how the stage runs, such as the threshold of a gate, is no reason.
    """
    if old is None or old.config is None or not old.status.identity:
        return f"after {rerun[-1]}" if rerun else "not run yet"
    other_result = _has_other_identity(now, old)
    causes = list(_result_changes(name, now, old) if other_result else ())
    if not (rerun or other_result) or (now.spec and now.spec.runs_server):
        causes += _execution_changes(name, now.spec, old.spec)
    shown = list(dict.fromkeys(causes))
    if len(shown) > MAX_CHANGES:
        shown[MAX_CHANGES:] = [f"{len(shown) - MAX_CHANGES} more"]
    if rerun:
        has_run = old.status.attempts or old.status.result
        shown.append(f"{rerun[-1]} runs again" if has_run else f"after {rerun[-1]}")
    if shown:
        return ", ".join(shown)
    return (
        "a source has changed"
        if other_result
        else "not finished yet"
        if old.status.attempts
        else "not run yet"
    )


def _has_other_identity(now: StageAssessment, old: StageAssessment) -> bool:
    return now.status.identity != old.status.identity


def _result_changes(name: str, now: StageAssessment, old: StageAssessment) -> Iterator[str]:
    """Yield the changes of fields that determine the stage's result, by their paths in the manifest."""
    new_config, old_config = _result_fields(now), _result_fields(old)
    for key in sorted({*new_config, *old_config}):
        path = (
            f"spec.{name}" if key == "recipe" else PATHS_OF_CONFIG_FIELDS.get(key, f"{name}.{key}")
        )
        yield from _changes(path, new_config.get(key), old_config.get(key))
    if now.spec and old.spec and (now.spec.pod.command or old.spec.pod.command):
        yield from _changes(f"spec.{name}.pod", _program(now.spec), _program(old.spec))


def _program(spec: StageSpec) -> dict[str, Any]:
    return spec.pod.model_dump(mode="json", exclude_none=True, include={*PROGRAM_FIELDS})


def _result_fields(stage: StageAssessment) -> dict[str, Any]:
    """Return the config without its identity, and without those of the stages before, which are no fields."""
    if stage.config is None:
        return {}
    excluded = {
        "identity",
        "stage",
        *(kind.name for kind in STAGES),
        *stage.config.non_identity_fields,
    }
    excluded |= {
        "model_digest",
        "model_pin",
        "start_digest",
        "start_pin",
    }  # known when prepare is done
    if stage.spec and stage.spec.runs_server:
        excluded |= {
            "model",
            "location",
            "digest",
        }  # of the published model: push names its own changes
    config = stage.config
    if isinstance(config, TrainConfig):  # an absent block is that of the defaults
        lora = config.recipe.lora if config.recipe.start_from else config.recipe.adapter
        blocks = {"lora": lora, "dpo": config.recipe.preference}
        config = config.model_copy(update={"recipe": config.recipe.model_copy(update=blocks)})
    return config.model_dump(mode="json", by_alias=True, exclude_none=True, exclude=excluded)


def _execution_changes(name: str, now: StageSpec | None, old: StageSpec | None) -> Iterator[str]:
    """Yield the changes of fields that determine how the stage runs: nodes, resources, image, environment."""
    fields = {*EXECUTION_FIELDS, *(now.non_identity_fields if now else ())}
    yield from _changes(f"spec.{name}", _set_fields(now, fields), _set_fields(old, fields))


def _set_fields(spec: StageSpec | None, fields: set[str]) -> dict[str, Any]:
    return (
        spec.model_dump(mode="json", by_alias=True, exclude_none=True, include=fields)
        if spec
        else {}
    )


def _changes(path: str, new: Any, old: Any) -> Iterator[str]:
    if new == old:
        return
    inner, before = _children(new), _children(old)
    found: list[str] = []
    if type(new) is type(old):
        for part in sorted({*inner, *before}):
            found += _changes(f"{path}{part}", inner.get(part), before.get(part))
    yield from found or [
        f"{path}: {_format(old)} → {_format(new)}"
    ]  # also entries that only changed places


def _children(value: Any) -> dict[str, Any]:
    """Return what an object or a list of objects contains, by its path in it; nothing for other values."""
    if isinstance(value, dict):
        return {f".{key}": inner for key, inner in value.items()}
    if isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
        return {f"[{entry.get('name', number)}]": entry for number, entry in enumerate(value)}
    return {}


def _format(value: Any) -> str:
    return "absent" if value is None else str(value)
