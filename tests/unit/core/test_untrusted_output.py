"""Output of a stage's process ends up in the status, so the API server must be able to store it."""

import json
import math
from datetime import UTC, datetime

import pytest
from support.operator.scenario import RESULTS, Scenario

from finetune_operator.api.status import PipelineStatus, StageStatus
from finetune_trainer.contract import Progress, TerminationMessage

MINIMAL = {"stage": "train", "updatedAt": "2030-01-01T00:00:00Z", "step": 3}
FLOATS = ("loss", "validationLoss", "tokensPerSecond", "stepSeconds", "etaSeconds")
INTEGERS = ("total", "startStep", "savedStep")


def parse_progress(**fields) -> Progress:
    return Progress.model_validate_json(json.dumps({**MINIMAL, **fields}))


def to_json(status) -> str:
    """Return the JSON that is sent. An API server accepts no NaN and no integer beyond 64 bits."""
    text = json.dumps(
        status.model_dump(mode="json", by_alias=True, exclude_none=True),
        allow_nan=False,
    )

    def parse_int64(digits):
        assert abs(int(digits)) < 2**63
        return int(digits)

    json.loads(text, parse_int=parse_int64)
    return text


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, "nan", "inf", "-Infinity", 1e300]
)
def test_non_finite_number_in_progress_is_dropped(name, value):
    progress = parse_progress(**{name: value, "note": "validating"})
    assert name not in to_json(progress)
    assert progress.step == 3
    assert progress.note == "validating"


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [2**63, -(2**70), 10**300])
def test_integer_beyond_64_bits_in_progress_is_dropped(name, value):
    assert name not in to_json(parse_progress(**{name: value}))


def test_time_without_zone_is_read_as_utc():
    progress = parse_progress(updatedAt="2030-01-01T00:00:00")
    assert progress.updated_at == datetime(2030, 1, 1, tzinfo=UTC)
    assert '"2030-01-01T00:00:00Z"' in to_json(progress)


def test_time_with_zone_is_converted_to_utc():
    assert '"2029-12-31T18:30:00Z"' in to_json(
        parse_progress(updatedAt="2030-01-01T00:00:00+05:30")
    )


def test_long_texts_in_progress_are_truncated():
    progress = parse_progress(note="x" * (256 << 10), stage="y" * 5000)
    assert len(progress.note) == 256
    assert len(progress.stage) == 256


@pytest.mark.parametrize(
    "progress",
    [
        {**MINIMAL, "step": 2**70},
        {"step": 1},
        {**MINIMAL, "updatedAt": "0001-01-01T00:00:00+14:00"},
    ],
)
def test_invalid_progress_keeps_the_result(progress):
    result = {"stage": "train", "identity": "i", "digest": "d", **RESULTS["train"]}
    message = TerminationMessage.model_validate_json(
        json.dumps({"result": result, "progress": progress})
    )
    assert message.progress is None
    assert message.result


def test_result_with_oversized_number_is_rejected():
    result = {
        "stage": "train",
        "identity": "i",
        "digest": "d",
        **RESULTS["train"],
        "tokens": 2**64,
    }
    with pytest.raises(ValueError, match="larger than"):
        TerminationMessage.model_validate({"result": result})


def test_interruption_with_oversized_step_stays_valid():
    message = TerminationMessage.model_validate(
        {"interruption": {"step": 2**70, "savedStep": 5}}
    )
    assert message.interruption
    assert message.interruption.step is None
    assert message.interruption.saved_step == 5


def test_status_with_invalid_progress_is_readable():
    status = {
        "stages": [
            {
                "name": "train",
                "progress": {**MINIMAL, "step": 2**62},
            }
        ]
    }
    assert PipelineStatus.model_validate(status).stages["train"] == StageStatus()


def test_sums_of_the_largest_numbers_are_storable():
    scenario = Scenario().run_before("train")
    for start in (0, -(10**15), -(10**15)):
        job = scenario.start("train")
        scenario.cluster.progress(job, step=10**15, start_step=start, step_seconds=1e15)
        scenario.reconcile_until_stable()
        scenario.lose_node(job)
        scenario.reconcile_until_stable()
    assert scenario.start("train")
    assert scenario.status.lost_steps
    to_json(scenario.status)
