"""Where the stages of a forecast would run, and what they would cost: for `finetune plan`."""

from collections.abc import Iterator, Mapping
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from finetune_cli.diagnostics import UsageError
from finetune_cli.forecast import PipelineForecast
from finetune_operator.api.placement import ON_DEMAND, PlacementDefaults
from finetune_operator.api.spec import PipelineSpec
from finetune_operator.core.auto import Decision
from finetune_operator.core.capacity import CapacityChoice
from finetune_operator.core.costs import amount_text
from finetune_operator.kubernetes.translate.api_errors import describe_first_error

STARTING = frozenset({"run", "resume"})


def read_placement(path: str) -> PlacementDefaults:
    """Read the operator's placement: the values of its chart, or their `placement` alone. Raises UsageError."""
    try:
        content: Any = yaml.safe_load(Path(path).read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"--placement {path}: cannot be read: {error}") from error
    placement = content.get("placement", content) if isinstance(content, dict) else None
    if not isinstance(placement, dict):
        raise UsageError(
            f"--placement {path}: must be the values of the operator's chart, or their `placement`"
        )
    found = {
        key: value for key, value in placement.items() if key != "priceConfigMap"
    }  # a file of the operator's pod
    try:
        return PlacementDefaults.model_validate(found)
    except ValidationError as error:
        raise UsageError(
            f"--placement {path}: placement.{describe_first_error(error, observed=True)}"
        ) from error


def placement_lines(
    planned: PipelineForecast, spec: PipelineSpec, defaults: PlacementDefaults | None, now: datetime
) -> Iterator[str]:
    """Yield the choice for each stage that would start, and the expected cost.

    Without the operator's placement, yield what the operator has written into the status.
    """
    stages = planned.assessment.stages
    starting = {
        one.stage: stage
        for one in planned.stages
        if one.action in STARTING
        if (stage := spec.stage(one.stage))
    }
    if defaults is None:
        found = ((name, stages[name].status.placement) for name in starting)
        yield from (
            f"{name}: {placement.message}"
            for name, placement in found
            if placement and placement.message
        )
        return
    statuses = {name: stage.status for name, stage in stages.items()}
    choices = {
        name: CapacityChoice(spec, stage, statuses, defaults, now)
        for name, stage in starting.items()
    }
    yield from (
        f"{name}: {one.placement.message}" for name, one in choices.items() if one.placement.message
    )
    yield from _total(choices, defaults.currency)


def _total(choices: Mapping[str, CapacityChoice], currency: str) -> Iterator[str]:
    """Yield the sum of the expected costs of those stages whose price and duration are known."""
    expected = {
        name: _expected(choice.decision) for name, choice in choices.items() if choice.duration
    }
    known = {name: costs for name, costs in expected.items() if costs}
    if not known:
        return
    spent = amount_text(sum((mine for mine, _ in known.values()), Decimal()), currency)
    on_demand = amount_text(sum((other for _, other in known.values()), Decimal()), currency)
    others = [name for name in choices if name not in known]
    without = (
        f"; without {', '.join(others)}, whose price or duration is not known" if others else ""
    )
    yield f"expected cost {spent}, against {on_demand} on OnDemand{without}"


def _expected(decision: Decision) -> tuple[Decimal, Decimal] | None:
    """Return the expected cost of a stage, and its cost on on-demand nodes; None without prices."""
    mine = decision.on_demand if decision.capacity == ON_DEMAND else decision.spot
    if mine is None or not mine.cost.is_finite():
        return None
    return mine.cost, decision.on_demand.cost if decision.on_demand else mine.cost
