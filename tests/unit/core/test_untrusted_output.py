"""What a process says of itself goes into the status, and an API server must be able to keep that."""

import json
import math
from datetime import UTC, datetime

import pytest
from support.scenario import RESULTS, Scenario

from finetune_operator.api.status import PipelineStatus, StageStatus
from finetune_trainer.contract import Progress, TerminationMessage

LEAST = {"stage": "train", "updatedAt": "2030-01-01T00:00:00Z", "step": 3}
FIGURES = ("loss", "validationLoss", "tokensPerSecond", "stepSeconds", "etaSeconds")
COUNTS = ("total", "startStep", "savedStep")


def said(**more) -> Progress:
    return Progress.model_validate_json(json.dumps({**LEAST, **more}))


def told(status) -> str:
    """Write it as it is sent: an API server reads no NaN, and no whole number beyond 64 bits."""
    text = json.dumps(status.model_dump(mode="json", by_alias=True, exclude_none=True), allow_nan=False)

    def whole(digits):
        assert abs(int(digits)) < 2**63
        return int(digits)

    json.loads(text, parse_int=whole)
    return text


@pytest.mark.parametrize("name", FIGURES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "nan", "inf", "-Infinity", 1e300])
def test_a_figure_that_is_no_number_is_left_out_and_the_rest_stays(name, value):
    found = said(**{name: value, "note": "validating"})
    assert name not in told(found)
    assert (found.step, found.note) == (3, "validating")


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [2**63, -(2**70), 10**300])
def test_a_count_that_no_api_server_can_keep_is_left_out(name, value):
    assert name not in told(said(**{name: value}))


def test_a_time_without_a_zone_is_taken_for_utc():
    found = said(updatedAt="2030-01-01T00:00:00")
    assert found.updated_at == datetime(2030, 1, 1, tzinfo=UTC)
    assert '"2030-01-01T00:00:00Z"' in told(found)


def test_a_time_with_another_zone_is_said_in_utc():
    assert '"2029-12-31T18:30:00Z"' in told(said(updatedAt="2030-01-01T00:00:00+05:30"))


def test_long_texts_are_cut():
    found = said(note="x" * (256 << 10), stage="y" * 5000)
    assert (len(found.note), len(found.stage)) == (256, 256)


@pytest.mark.parametrize(
    "progress", [{**LEAST, "step": 2**70}, {"step": 1}, {**LEAST, "updatedAt": "0001-01-01T00:00:00+14:00"}]
)
def test_progress_that_is_none_takes_no_result_along(progress):
    result = {"stage": "train", "identity": "i", "digest": "d", **RESULTS["train"]}
    message = TerminationMessage.model_validate_json(json.dumps({"result": result, "progress": progress}))
    assert message.progress is None
    assert message.result


def test_a_result_with_a_number_that_nobody_could_keep_is_none():
    result = {"stage": "train", "identity": "i", "digest": "d", **RESULTS["train"], "tokens": 2**64}
    with pytest.raises(ValueError, match="larger than"):
        TerminationMessage.model_validate({"result": result})


def test_an_interruption_at_a_step_beyond_all_bounds_is_still_one():
    message = TerminationMessage.model_validate({"interruption": {"step": 2**70, "savedStep": 5}})
    assert message.interruption
    assert (message.interruption.step, message.interruption.saved_step) == (None, 5)


def test_a_status_that_holds_such_progress_already_can_be_read():
    status = {"stages": {"train": {"progress": {**LEAST, "step": 2**62}}}}
    assert PipelineStatus.model_validate(status).stages["train"] == StageStatus()


def test_what_is_made_of_the_largest_numbers_can_be_kept_as_well():
    scenario = Scenario().run_before("train")
    for start in (0, -(10**15), -(10**15)):
        job = scenario.start("train")
        scenario.cluster.progress(job, step=10**15, start_step=start, step_seconds=1e15)
        scenario.reconcile_until_stable()
        scenario.lose_node(job)
        scenario.reconcile_until_stable()
    assert scenario.start("train")
    assert scenario.status.lost_steps
    told(scenario.status)
