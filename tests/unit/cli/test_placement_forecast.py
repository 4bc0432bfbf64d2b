"""Where stages would run and what they would cost: the lines of `finetune plan --placement`, and the words of costs."""

from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.operator.scenario import START, UID, Scenario, a_pipeline

from finetune_cli.diagnostics import UsageError
from finetune_cli.forecast.forecast import forecast
from finetune_cli.forecast.placement import placement_lines, read_placement
from finetune_cli.output.costs import attempt_cost, attempt_place, cost_lines
from finetune_operator.api.costs import PipelineCosts
from finetune_operator.api.placement import PlacementDefaults
from finetune_operator.api.status import (
    AttemptStatus,
    Outcome,
    PipelineStatus,
    PlacementStatus,
    StageStatus,
)
from finetune_operator.core.attempts.costs import with_costs
from finetune_operator.core.observation import Observation
from finetune_operator.core.pipeline import Key, Pipeline

SPOT = {"name": "spot", "capacity": "Spot", "price": "0.80"}
ON_DEMAND = {
    "name": "cpu",
    "capacity": "OnDemand",
    "price": "3.10",
    "priceDate": "2029-12-31",
}


def expected(seconds: int) -> dict[str, Any]:
    return {"placement": {"expectedSeconds": seconds}}


def lines(
    defaults: PlacementDefaults | None,
    status: PipelineStatus | None = None,
    **spec: Any,
) -> list[str]:
    pipeline = Pipeline(
        Key("team", "demo"), UID, 1, a_pipeline(**spec), status or PipelineStatus()
    )
    planned = forecast(None, pipeline, Observation(), START, lambda _name, _stage: None)
    return list(placement_lines(planned, pipeline.spec, defaults, START))


def write(path: Path, content: object) -> str:
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return str(path)


@pytest.mark.parametrize("key", ["placement", ""])
def test_placement_is_read_from_values_or_alone(tmp_path, key):
    placement = {"nodeClasses": [SPOT], "currency": "EUR", "priceConfigMap": "prices"}
    defaults = read_placement(
        write(tmp_path / "values.yaml", {key: placement} if key else placement)
    )
    assert (defaults.currency, defaults.node_classes[0].price) == (
        "EUR",
        Decimal("0.80"),
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("- a", "must be the values of the operator's chart"),
        ("placement:", "must be the values of the operator's chart"),
        ("a: [", "cannot be read"),
        (
            {"placement": {"nodeClasses": [{**SPOT, "price": "-1"}]}},
            r"placement\.nodeClasses\[0\]\.price",
        ),
        ({"placement": {"nodeClass": []}}, "placement.nodeClass"),
    ],
)
def test_wrong_placement_file_is_refused_by_name(tmp_path, content, message):
    with pytest.raises(UsageError, match=f"--placement .*{message}"):
        read_placement(write(tmp_path / "values.yaml", content))


def test_missing_placement_file_is_refused_by_name(tmp_path):
    with pytest.raises(UsageError, match=r"none\.yaml: cannot be read"):
        read_placement(str(tmp_path / "none.yaml"))


def test_costs_of_the_stages_with_a_duration_are_summed():
    defaults = PlacementDefaults.model_validate({"nodeClasses": [SPOT, ON_DEMAND]})
    train, total = lines(defaults, prepare=expected(3600), train=expected(4 * 3600))
    assert train == (
        "train: Spot (spot): 0.80 against 3.10 USD an hour on OnDemand, 0.05 interruptions of Spot an hour cost 4m30s"
        " each: expected 3.21 USD against 12.40 USD"
    )
    assert total == (
        "expected cost 6.31 USD, against 15.50 USD on OnDemand; without evaluate, push, deploy, whose price or"
        " duration is not known"
    )


def test_no_cost_is_expected_where_no_price_is_known():
    assert lines(PlacementDefaults(), train=expected(4 * 3600)) == []


def test_without_the_file_the_message_of_the_operator_is_shown():
    placement = PlacementStatus(
        capacity="Spot", cause="LowerCost", message="Spot (a): costs less"
    )
    assert (
        lines(None, PipelineStatus(stages={"train": StageStatus(placement=placement)}))
        == []
    )
    queued = (
        Scenario(a_pipeline())
        .reconcile_until_stable()
        .stage("train")
        .model_copy(update={"placement": placement})
    )
    assert lines(None, PipelineStatus(stages={"train": queued})) == [
        "train: Spot (a): costs less"
    ]


def attempt(**fields: Any) -> AttemptStatus:
    return AttemptStatus(number=1, job="j", identity="i", execution="e", **fields)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, ""),
        ({"capacity": "OnDemand"}, ""),
        ({"capacity": "OnDemand", "node_class": "h100"}, " on OnDemand (h100)"),
        ({"capacity": "Spot"}, " on Spot"),
        (
            {"capacity": "Spot", "node_class": "a", "price": Decimal("0.8")},
            " on Spot (a) at 0.80 an hour",
        ),
    ],
)
def test_place_of_an_attempt_says_what_is_known(fields, text):
    assert attempt_place(attempt(**fields)) == text


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, ""),
        ({"cost": Decimal("1.2"), "outcome": Outcome.RUNNING}, ""),
        ({"cost": Decimal("1.2")}, "cost 1.20"),
        (
            {"cost": Decimal("1.2"), "lost_cost": Decimal("0.304")},
            "cost 1.20, 0.30 of it lost",
        ),
    ],
)
def test_cost_of_an_attempt_is_that_of_an_ended_one(fields, text):
    assert attempt_cost(attempt(**{"outcome": Outcome.INTERRUPTED, **fields})) == text


def test_costs_without_a_price_are_running_time():
    times = {
        "started_at": START,
        "finished_at": START + timedelta(minutes=90),
        "outcome": Outcome.SUCCEEDED,
    }
    stage = with_costs(StageStatus(attempts=(attempt(**times),)))
    assert list(cost_lines(PipelineStatus(stages={"train": stage}))) == [
        "1h30m of running time in 1 attempt"
    ]


def test_costs_are_said_with_what_was_saved_and_lost():
    amounts = {
        "spent": "4.04",
        "lost": "0.5",
        "onDemand": "13.24",
        "saved": "9.20",
        "currency": "USD",
    }
    costs = PipelineCosts.model_validate(
        {"attempts": 5, "unpriced": 2, "seconds": 7200, **amounts}
    )
    (line,) = cost_lines(PipelineStatus(costs=costs))
    assert line == (
        "spent 4.04 USD in 2h; 13.24 USD on OnDemand, 9.20 USD saved; 0.50 USD lost to interruptions;"
        " the price of 2 attempts is not known"
    )
