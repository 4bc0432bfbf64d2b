"""What the cache asks of many pipelines at once: here, which stage of a pipeline waits, and since when."""

from datetime import UTC, datetime

import pytest
from support.cluster_objects import pipeline_object

from finetune_operator.kubernetes.cached_pipeline import WaitingStage, trim_pipeline


def at(minute):
    return f"2030-01-01T00:{minute:02}:00Z"


def waiting(state="Pending", reason="WaitingForQuota", **status):
    stages = [{"name": "prepare", "state": "Succeeded"}, {"name": "train", "state": state, "reason": reason}]
    found = pipeline_object(creationTimestamp=at(1), status={"stage": "train", "stages": stages, **status})
    return trim_pipeline(found).waiting


def since(minute):
    return datetime(2030, 1, 1, 0, minute, tzinfo=UTC).timestamp()


@pytest.mark.parametrize("state", ["Pending", "Queued"])
def test_stage_whose_process_has_not_started_waits(state):
    assert waiting(state) == WaitingStage("train", "WaitingForQuota", since(1))


@pytest.mark.parametrize("state", ["Running", "Succeeded", "Failed", "Skipped", "Invented", None])
def test_stage_in_another_state_does_not_wait(state):
    assert waiting(state) is None


def test_finished_pipeline_does_not_wait():
    assert waiting(finishedAt=at(2)) is None


def test_suspended_pipeline_does_not_wait():
    found = pipeline_object(status={"stage": "train", "stages": [{"name": "train", "state": "Pending"}]})
    found["metadata"]["creationTimestamp"] = at(1)
    assert trim_pipeline(found).waiting
    found["spec"]["suspend"] = True
    assert trim_pipeline(found).waiting is None


def test_wait_begins_with_the_last_change():
    """An edit restarts a finished pipeline, and its conditions change then."""
    stages = [
        {"name": "train", "state": "Queued", "reason": "Retrying", "attempts": [{"finishedAt": at(7)}]},
        {"name": "prepare", "state": "Succeeded", "attempts": [{"createdAt": at(3), "finishedAt": at(5)}]},
    ]
    assert waiting(stages=stages).since == since(7)
    assert waiting(stages=stages, conditions=[{"lastTransitionTime": at(9)}]).since == since(9)


@pytest.mark.parametrize(
    "status",
    [
        {"stages": "none"},
        {"stages": ["train"]},
        {"stage": ["train"]},
        {"stage": "invented"},
        {"stages": [{"name": "invented", "state": "Pending"}], "stage": "invented"},
    ],
    ids=str,
)
def test_malformed_status_shows_no_waiting_stage(status):
    assert waiting(**status) is None


@pytest.mark.parametrize("time", ["soon", 7, None, ["2030"], "0001-01-01T00:00:00+23:00"])
def test_malformed_times_are_ignored(time):
    assert waiting(conditions=[{"lastTransitionTime": time}, "none"]).since == since(1)
