"""Forecast: the planned action of each stage and its reason, before anything runs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from finetune_cli.exit_codes import BELOW_GATE
from finetune_cli.manifest.fields import PATHS_OF_CONFIG_FIELDS
from finetune_operator.api.spec import STAGES
from finetune_operator.api.stages.base import StageSpec
from finetune_operator.api.status import StageState
from finetune_operator.core.adoption import is_from_other_version, with_adopted
from finetune_operator.core.assess import assess
from finetune_operator.core.assessment import PipelineAssessment, StageAssessment
from finetune_operator.core.durations import format_duration
from finetune_operator.core.identity import EXECUTION_FIELDS, PROGRAM_FIELDS
from finetune_operator.core.observation import Observation
from finetune_operator.core.pipeline import Pipeline
from finetune_trainer.contract import TrainConfig

PlannedAction = Literal["reuse", "run", "resume", "skip", "blocked"]
"""`blocked`: the stage neither has a result nor starts; it has failed, is suspended or waits for such a stage."""
Plan = tuple[PlannedAction, str]
"""Action and reason."""
# A reason is one line of a terminal.
MAX_CHANGES = 3
"""So many changed fields are named; the rest is counted."""


@dataclass(frozen=True)
class Forecast:
    """The planned action of one stage."""

    stage: str
    action: PlannedAction
    reason: str
    identity: str = ""


@dataclass(frozen=True)
class KeptWork:
    """Work of an earlier attempt that the stage would reuse or resume from."""

    action: Literal["reuse", "resume"]
    reason: str


FindKeptWork = Callable[[str, StageAssessment], KeptWork | None]
"""Returns the kept work of a stage, given its name and assessment; None if there is none."""


@dataclass(frozen=True)
class PipelineForecast:
    """The planned actions of all stages, in their order, and what they start from."""

    stages: list[Forecast]
    assessment: PipelineAssessment
    """The state of all stages, if the edit were applied now."""

    @property
    def notes(self) -> list[str]:
        """Facts that the actions alone do not show: a gate that closes after what depends on it is done."""
        closed = [gate.message for gate in self.assessment.gates if not gate.passed]
        if not closed:
            return []
        note = (
            f"a gate is closed, so the exit code is {BELOW_GATE}: {'; '.join(closed)}"
        )
        # A result under an earlier gate is kept: closing a gate undoes no published model.
        kept = [
            forecast.stage
            for forecast in self.stages
            if forecast.action == "reuse" and self._depends_on_gates(forecast.stage)
        ]
        if kept:
            note += f"; done under an earlier gate: {', '.join(kept)}"
        return [note]

    def _depends_on_gates(self, stage: str) -> bool:
        spec = self.assessment.stages[stage].spec
        return getattr(spec, "when", "") == "GatesPassed"


def forecast(
    before: Pipeline | None,
    after: Pipeline,
    observed: Observation,
    now: datetime,
    find_kept_work: FindKeptWork,
) -> PipelineForecast:
    """Return the planned action of every stage if `after` replaced `before`."""
    old: Mapping[str, StageAssessment] = {}
    if before:
        old = assess(before, observed, now).stages
        if is_from_other_version(before):
            # This version adopts the stages before the edit.
            adopted = {name: stage.status for name, stage in old.items()}
            after = with_adopted(after, adopted)
    assessment = assess(after, observed, now)
    forecasts: list[Forecast] = []
    for name, stage in assessment.stages.items():
        action, reason = _plan_stage(
            name,
            stage,
            old.get(name),
            forecasts,
            suspended=after.spec.suspend,
            find_kept_work=find_kept_work,
        )
        forecasts.append(Forecast(name, action, reason, stage.status.identity))
    return PipelineForecast(forecasts, assessment)


def _plan_stage(
    name: str,
    stage: StageAssessment,
    old: StageAssessment | None,
    earlier: Sequence[Forecast],
    *,
    suspended: bool,
    find_kept_work: FindKeptWork,
) -> Plan:
    """Return action and reason of one stage; `earlier` holds the forecasts of the stages before it."""
    settled = _settled(stage)
    if settled:
        return settled
    if suspended:
        return "blocked", "spec.suspend is true"
    needs: tuple[str, ...] = ()
    if stage.spec:
        needs = stage.spec.needs
    blocked = _stages_with(earlier, "blocked")
    for need in needs:
        if need in blocked:
            return "blocked", f"waits for {need}"
    running = _running(stage)
    if running:
        return "run", running
    started = _stages_with(earlier, "run", "resume")
    rerun = [need for need in needs if need in started]
    kept = find_kept_work(name, stage)
    return _start(name, stage, old, rerun, kept)


def _stages_with(forecasts: Sequence[Forecast], *actions: PlannedAction) -> set[str]:
    return {forecast.stage for forecast in forecasts if forecast.action in actions}


def _settled(now: StageAssessment) -> Plan | None:
    """Return action and reason of a stage that will not start a process; None for other stages."""
    match now.status.state:
        case StageState.SUCCEEDED:
            return "reuse", f"already done{_duration(now.status.active_seconds)}"
        case StageState.SKIPPED:
            return "skip", now.status.message
        case StageState.FAILED:
            return (
                "blocked",
                f"failed: {now.status.message}; `finetune retry` starts it again",
            )
        case StageState.PENDING | StageState.QUEUED | StageState.RUNNING:
            return None


def _running(now: StageAssessment) -> str:
    """Return the reason for a stage whose current attempt already runs the new spec; empty for other stages."""
    status = now.status
    attempt = status.running_attempt
    if attempt is None or attempt.stopping:
        return ""
    # Another identity or execution: the operator stops this attempt and starts a new one.
    if attempt.identity != status.identity or attempt.execution != status.execution:
        return ""
    state = "waiting"
    if status.state is StageState.RUNNING:
        state = "running"
    reason = f"attempt {attempt.number} is {state}"
    if status.message:
        reason += f": {status.message}"
    return reason


def _start(
    name: str,
    now: StageAssessment,
    old: StageAssessment | None,
    rerun: list[str],
    kept: KeptWork | None,
) -> Plan:
    if kept is not None and kept.action == "reuse":
        return "reuse", kept.reason
    reason = _start_reason(name, now, old, rerun)
    if kept is None:
        return "run", reason
    return kept.action, f"{reason}; {kept.reason}"


def _duration(seconds: float) -> str:
    if not seconds:
        return ""
    return f", took {format_duration(seconds)}"


def _start_reason(
    name: str, now: StageAssessment, old: StageAssessment | None, rerun: list[str]
) -> str:
    """Return why a stage starts: its own changed fields that matter, and the needed stage that runs before it.

    A field that changes neither the result nor how the stage runs, such as the threshold of a gate, is no reason.
    """
    if old is None or old.config is None or not old.status.identity:
        # Without an earlier config there is nothing to compare.
        if rerun:
            return f"after {rerun[-1]}"
        return "not run yet"
    has_other_result = now.status.identity != old.status.identity
    reasons = _changed_fields(name, now, old, rerun, has_other_result=has_other_result)
    if rerun:
        has_run = old.status.attempts or old.status.result
        if has_run:
            reasons.append(f"{rerun[-1]} runs again")
        else:
            reasons.append(f"after {rerun[-1]}")
    if reasons:
        return ", ".join(reasons)
    # The identity covers the digests of sources, which are no fields.
    if has_other_result:
        return "a source has changed"
    if old.status.attempts:
        return "not finished yet"
    return "not run yet"


def _changed_fields(
    name: str,
    now: StageAssessment,
    old: StageAssessment,
    rerun: list[str],
    *,
    has_other_result: bool,
) -> list[str]:
    """Return the changes that are a reason to start, MAX_CHANGES of them and the number of the others."""
    changes: list[str] = []
    if has_other_result:
        changes += _result_changes(name, now, old)
    starts_anyway = bool(rerun) or has_other_result
    runs_server = now.spec is not None and now.spec.runs_server
    # A changed image or node does not rerun a stage that has a result. It is the reason only for a stage that starts
    # without another one, and for a server, which is replaced.
    if runs_server or not starts_anyway:
        changes += _execution_changes(name, now.spec, old.spec)
    shown = list(dict.fromkeys(changes))
    if len(shown) > MAX_CHANGES:
        shown[MAX_CHANGES:] = [f"{len(shown) - MAX_CHANGES} more"]
    return shown


def _result_changes(
    name: str, now: StageAssessment, old: StageAssessment
) -> Iterator[str]:
    """Yield the changes of fields that determine the stage's result, by their paths in the manifest."""
    new_config = _result_fields(now)
    old_config = _result_fields(old)
    for key in sorted({*new_config, *old_config}):
        path = PATHS_OF_CONFIG_FIELDS.get(key, f"{name}.{key}")
        if key == "recipe":
            # The fields of a recipe are the fields of the stage itself.
            path = f"spec.{name}"
        yield from _changes(path, new_config.get(key), old_config.get(key))
    if now.spec is None or old.spec is None:
        return
    # Only a program of the user makes the pod a part of the result.
    if now.spec.pod.command or old.spec.pod.command:
        new_program = _program(now.spec)
        yield from _changes(f"spec.{name}.pod", new_program, _program(old.spec))


def _program(spec: StageSpec) -> dict[str, Any]:
    return spec.pod.model_dump(
        mode="json", exclude_none=True, include={*PROGRAM_FIELDS}
    )


def _result_fields(stage: StageAssessment) -> dict[str, Any]:
    """Return the config without its identity, and without the results of earlier stages, which are no fields."""
    config = stage.config
    if config is None:
        return {}
    excluded = {"identity", "stage", *config.non_identity_fields}
    excluded |= {kind.name for kind in STAGES}
    # Known when prepare is done.
    excluded |= {"model_digest", "model_pin", "start_digest", "start_pin"}
    if stage.spec and stage.spec.runs_server:
        # Fields of the published model: push names its own changes.
        excluded |= {"model", "location", "digest"}
    if isinstance(config, TrainConfig):
        config = _with_default_blocks(config)
    return config.model_dump(
        mode="json", by_alias=True, exclude_none=True, exclude=excluded
    )


def _with_default_blocks(config: TrainConfig) -> TrainConfig:
    """Return the config with the defaults of absent blocks, so that writing a default is no change."""
    recipe = config.recipe
    blocks: dict[str, Any] = {"lora": recipe.adapter, "dpo": recipe.preference}
    if recipe.start_from:
        # The adapter that training starts from decides its own settings.
        blocks["lora"] = recipe.lora
    return config.model_copy(update={"recipe": recipe.model_copy(update=blocks)})


def _execution_changes(
    name: str, now: StageSpec | None, old: StageSpec | None
) -> Iterator[str]:
    """Yield the changes of fields that determine how the stage runs: nodes, resources, image, environment."""
    fields = {*EXECUTION_FIELDS}
    if now:
        fields |= {*now.non_identity_fields}
    yield from _changes(
        f"spec.{name}", _set_fields(now, fields), _set_fields(old, fields)
    )


def _set_fields(spec: StageSpec | None, fields: set[str]) -> dict[str, Any]:
    if spec is None:
        return {}
    return spec.model_dump(
        mode="json", by_alias=True, exclude_none=True, include=fields
    )


def _changes(path: str, new: Any, old: Any) -> Iterator[str]:
    if new == old:
        return
    inner_changes: list[str] = []
    if type(new) is type(old):
        after = _children(new)
        before = _children(old)
        for part in sorted({*after, *before}):
            inner_changes += _changes(
                f"{path}{part}", after.get(part), before.get(part)
            )
    if inner_changes:
        yield from inner_changes
    else:
        # A plain value, or a list whose entries only changed places.
        yield f"{path}: {_format(old)} → {_format(new)}"


def _children(value: Any) -> dict[str, Any]:
    """Return the contents of an object or a list of objects, by their paths in it; nothing for other values."""
    if isinstance(value, dict):
        return {f".{key}": inner for key, inner in value.items()}
    if isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
        # By name where entries have names: an inserted entry then changes no other entry.
        return {
            f"[{entry.get('name', number)}]": entry
            for number, entry in enumerate(value)
        }
    return {}


def _format(value: Any) -> str:
    if value is None:
        return "absent"
    return str(value)
