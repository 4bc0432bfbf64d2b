"""What the cache keeps of a pipeline: which stage waits, its running Jobs, and what a user changed."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from support.operator.cluster_objects import cache_of, pipeline_object, running_status
from support.operator.pipeline_objects import stored_object
from support.operator.placements import (
    FULL,
    GPU,
    H100,
    end_stopped,
    settings,
    training,
    wait_until_moved,
)
from support.operator.scenario import START, Scenario, a_pipeline, merged

from finetune_operator.api.conditions import Reason
from finetune_operator.api.status import StageState
from finetune_operator.core.observation import Blocker
from finetune_operator.core.report import unreadable_status
from finetune_operator.kubernetes.cache.pipeline import WaitingStage, trim_pipeline
from finetune_operator.kubernetes.pipeline_object import parse_pipeline


def at(minute):
    return f"2030-01-01T00:{minute:02}:00Z"


def waiting(state="Pending", reason="WaitingForQuota", **status):
    stages = [
        {"name": "prepare", "state": "Succeeded"},
        {"name": "train", "state": state, "reason": reason},
    ]
    result = pipeline_object(
        creationTimestamp=at(1), status={"stage": "train", "stages": stages, **status}
    )
    return trim_pipeline(result).waiting


def since(minute):
    return datetime(2030, 1, 1, 0, minute, tzinfo=UTC).timestamp()


@pytest.mark.parametrize("state", ["Pending", "Queued"])
def test_stage_whose_process_has_not_started_waits(state):
    assert waiting(state) == WaitingStage("train", "WaitingForQuota", since(1))


@pytest.mark.parametrize(
    "state", ["Running", "Succeeded", "Failed", "Skipped", "Invented", None]
)
def test_stage_in_another_state_does_not_wait(state):
    assert waiting(state) is None


def test_running_stage_waits_while_its_node_does_not_answer():
    scenario = Scenario(a_pipeline()).run_before("train")
    job = scenario.start("train")
    assert waiting_in(scenario) is None
    scenario.cluster.update_job(
        job, blocker=Blocker(Reason.NODE_LOST, "node n does not answer")
    )
    scenario.reconcile_until_stable()
    assert scenario.stage("train").state is StageState.RUNNING
    assert waiting_in(scenario) == WaitingStage("train", "NodeLost", None)
    scenario.edit(suspend=True)
    assert waiting_in(scenario) == WaitingStage("train", "NodeLost", None)


def test_finished_pipeline_does_not_wait():
    assert waiting(finishedAt=at(2)) is None


def test_suspended_pipeline_does_not_wait():
    result = pipeline_object(
        status={
            "stage": "train",
            "stages": [{"name": "train", "state": "Pending"}],
        }
    )
    result["metadata"]["creationTimestamp"] = at(1)
    assert trim_pipeline(result).waiting
    result["spec"]["suspend"] = True
    assert trim_pipeline(result).waiting is None


@pytest.mark.parametrize("stalled", [True, False], ids=["malformed", "of a newer CRD"])
def test_unreadable_pipeline_does_not_wait(stalled):
    """Its stages belong to an earlier spec, and so does their reason."""
    before = stored_object(Scenario(a_pipeline()).reconcile_until_stable())
    trimmed = trim_pipeline(before)
    assert trimmed.waiting
    assert trimmed.waiting.stage == "prepare"
    assert trimmed.unreadable is False
    result = merged(
        before,
        {"status": unreadable_status("train: no", 1, START, "", stalled=stalled)},
    )
    assert result["status"]["stages"] == before["status"]["stages"]
    assert (trim_pipeline(result).waiting, trim_pipeline(result).unreadable) == (
        None,
        True,
    )


@pytest.mark.parametrize(
    "conditions", ["none", [None], [{}], [{"type": ["Ready"]}]], ids=str
)
def test_malformed_conditions_are_not_unreadable(conditions):
    result = pipeline_object(status={"conditions": conditions})
    assert not trim_pipeline(result).unreadable


def test_wait_begins_with_the_last_change():
    """An edit restarts a finished pipeline, and its conditions change then."""
    stages = [
        {
            "name": "train",
            "state": "Queued",
            "attempts": [
                {
                    "startedAt": at(6),
                    "finishedAt": at(7),
                }
            ],
        },
        {
            "name": "prepare",
            "state": "Succeeded",
            "attempts": [
                {
                    "startedAt": at(3),
                    "finishedAt": at(5),
                }
            ],
        },
    ]
    assert waiting(stages=stages).since == since(7)
    assert waiting(
        stages=stages, conditions=[{"lastTransitionTime": at(9)}]
    ).since == since(9)


def waiting_in(scenario):
    """Return the stage that waits, by the status that the operator has written."""
    return trim_pipeline(stored_object(scenario)).waiting


def release(scenario):
    """Find nodes for only some pods of the newest attempt, until it gives them up and the next attempt begins."""
    job = scenario.attempt("train").job
    now = scenario.cluster.now
    scenario.cluster.update_job(
        job, blocker=FULL, incomplete_since=now, unschedulable_since=now
    )
    while not scenario.cluster.jobs[job].asked_to_stop:
        scenario.after(60).reconcile_until_stable()
    end_stopped(scenario)
    scenario.after(scenario.requeue_after.total_seconds()).reconcile_until_stable()


def test_wait_of_several_nodes_includes_released_attempts():
    """An attempt gives up its nodes after at most 20 minutes, and requests them again, for ever."""
    train = {"pod": GPU, "nodes": 2, "placement": {"capacity": "OnDemand"}}
    spec = a_pipeline(workspace={"accessMode": "ReadWriteMany"}, train=train)
    scenario = Scenario(spec, settings=settings(H100[1])).run_before("train")
    began = scenario.cluster.now
    for number in (2, 3, 4):
        release(scenario)
        assert (
            scenario.attempt("train").number,
            scenario.attempt("train").started_at,
        ) == (
            number,
            None,
        )
        assert waiting_in(scenario).since == began.timestamp()
    assert scenario.cluster.now - began > timedelta(minutes=50)


def test_wait_includes_attempts_on_node_classes_that_are_full():
    scenario = training(("b", "Spot", "0.90"), *H100)
    began = scenario.cluster.now
    for _ in range(2):
        assert wait_until_moved(scenario)
    assert scenario.attempt("train").number == 3
    assert waiting_in(scenario) == WaitingStage(
        "train", "Progressing", began.timestamp()
    )


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


@pytest.mark.parametrize(
    "time", ["soon", 7, None, ["2030"], "0001-01-01T00:00:00+23:00"]
)
def test_malformed_times_are_ignored(time):
    assert waiting(conditions=[{"lastTransitionTime": time}, "none"]).since == since(1)


@pytest.mark.parametrize(
    ("changes", "differs"),
    [
        ({}, False),
        ({"status": {"phase": "Failed"}}, False),
        ({"annotations": {"other": "x"}}, False),
        ({"annotations": {"finetune.dev/cancel": ""}}, True),
        ({"generation": 2}, True),
        ({"uid": "new"}, True),
        ({"deletionTimestamp": "2030-01-01T00:00:00Z"}, True),
    ],
    ids=str,
)
def test_only_what_a_user_changes_makes_pipelines_differ(changes, differs):
    before = cache_of(finetunepipelines=[pipeline_object()]).pipelines.get(
        ("team", "demo")
    )
    after = cache_of(
        finetunepipelines=[pipeline_object(version=2, **changes)]
    ).pipelines.get(("team", "demo"))
    assert before
    assert after
    assert after.differs(before) is differs
    assert not before.differs(replace(before, parsed=parse_pipeline(pipeline_object())))


@pytest.mark.parametrize(
    "status",
    [
        {"stages": {}},
        {"stages": [None]},
        {"stages": [{"name": "train", "attempts": "x"}]},
        {"stages": [{"name": "train", "attempts": [None]}]},
        {"stages": [{"name": "train", "attempts": [{"outcome": "Exploded"}]}]},
    ],
    ids=str,
)
def test_malformed_status_has_no_running_job(status):
    known = cache_of(finetunepipelines=[pipeline_object(status=status)]).pipelines.get(
        ("team", "demo")
    )
    assert known
    assert known.running_jobs == frozenset()
    assert known.writing is False


def test_server_stage_does_not_write_to_the_claim():
    status = running_status("demo-deploy-a1", stage="deploy")
    known = cache_of(finetunepipelines=[pipeline_object(status=status)]).pipelines.get(
        ("team", "demo")
    )
    assert known
    assert known.running_jobs == frozenset({"demo-deploy-a1"})
    assert known.writing is False


@pytest.mark.parametrize("finished", [False, True])
def test_object_is_kept_once_as_text_or_parsed(finished):
    """A finished pipeline is kept as text, which is smaller; of another the parsed object is there already."""
    status = {"finishedAt": "2030-01-01T00:00:00Z"} if finished else {}
    raw = merged(pipeline_object(version=9), {"status": status})
    pipeline = parse_pipeline(raw)
    cache = cache_of()
    cache.note_written(pipeline, raw)
    trimmed = cache.pipelines.get(("team", "demo"))
    assert trimmed
    assert (trimmed.parsed is None) == finished
    assert bool(trimmed.text) == finished
    read = trimmed.parsed or parse_pipeline(trimmed.content())
    assert read.spec == pipeline.spec
    assert read.status == pipeline.status
