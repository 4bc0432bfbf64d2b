"""The nodes on which the stages of a forecast would run, and their costs: for `finetune plan`."""

from collections.abc import Iterator, Mapping
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from finetune_cli.diagnostics import UsageError
from finetune_cli.forecast.forecast import PipelineForecast
from finetune_operator.api.placement import ON_DEMAND, PlacementDefaults
from finetune_operator.api.spec import PipelineSpec
from finetune_operator.core.attempts.costs import amount_text
from finetune_operator.core.capacity.choice import CapacityChoice
from finetune_operator.core.capacity.decision import Decision
from finetune_operator.kubernetes.translate.api_errors import describe_first_error

STARTING = frozenset({"run", "resume"})


def read_placement(path: str) -> PlacementDefaults:
    """Read the operator's placement: the values of its chart, or their `placement` alone. Raises UsageError."""
    try:
        content: Any = yaml.safe_load(Path(path).read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"--placement {path}: cannot be read: {error}") from error
    placement = None
    if isinstance(content, dict):
        placement = content.get("placement", content)
    if not isinstance(placement, dict):
        raise UsageError(
            f"--placement {path}: must be the values of the operator's chart, or their `placement`"
        )
    # priceConfigMap mounts a file into the operator's pod: it is a value of the chart only.
    fields = {key: value for key, value in placement.items() if key != "priceConfigMap"}
    try:
        return PlacementDefaults.model_validate(fields)
    except ValidationError as error:
        problem = describe_first_error(error, observed=True)
        raise UsageError(f"--placement {path}: placement.{problem}") from error


def placement_lines(
    planned: PipelineForecast,
    spec: PipelineSpec,
    defaults: PlacementDefaults | None,
    now: datetime,
) -> Iterator[str]:
    """Yield the choice for each stage that would start, and the expected cost.

    Without the operator's placement, yield what the operator has written into the status.
    """
    statuses = {name: stage.status for name, stage in planned.assessment.stages.items()}
    starting = [
        forecast.stage
        for forecast in planned.stages
        if forecast.action in STARTING and spec.stage(forecast.stage)
    ]
    if defaults is None:
        for name in starting:
            written = statuses[name].placement
            if written and written.message:
                yield f"{name}: {written.message}"
        return
    choices: dict[str, CapacityChoice] = {}
    for name in starting:
        stage = spec.stage(name)
        if stage:
            choices[name] = CapacityChoice(spec, stage, statuses, defaults, now)
    for name, choice in choices.items():
        if choice.placement.message:
            yield f"{name}: {choice.placement.message}"
    yield from _total(choices, defaults.currency)


def _total(choices: Mapping[str, CapacityChoice], currency: str) -> Iterator[str]:
    """Yield the sum of the expected costs of the stages whose price and duration are known."""
    spent = Decimal()
    on_demand = Decimal()
    unknown = []
    for name, choice in choices.items():
        costs = None
        if choice.duration:
            costs = _expected(choice.decision)
        if costs is None:
            unknown.append(name)
            continue
        spent += costs[0]
        on_demand += costs[1]
    if len(unknown) == len(choices):
        return
    line = f"expected cost {amount_text(spent, currency)}"
    line += f", against {amount_text(on_demand, currency)} on OnDemand"
    if unknown:
        line += f"; without {', '.join(unknown)}, whose price or duration is not known"
    yield line


def _expected(decision: Decision) -> tuple[Decimal, Decimal] | None:
    """Return the expected cost of a stage, and its cost on on-demand nodes; None without prices."""
    chosen = decision.spot
    if decision.capacity == ON_DEMAND:
        chosen = decision.on_demand
    # The expected cost is infinite if the stage is interrupted so often that it would not finish.
    if chosen is None or not chosen.cost.is_finite():
        return None
    on_demand = chosen.cost
    if decision.on_demand:
        on_demand = decision.on_demand.cost
    return chosen.cost, on_demand
