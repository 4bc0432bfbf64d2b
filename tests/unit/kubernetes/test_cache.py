"""The pipelines that a change wakes, and the deleted pods that the cache keeps."""

import pytest
from support.operator.cached_training import (
    DEMO,
    JOB,
    LATER,
    NOW,
    OTHER,
    SAVED,
    end_attempt,
    pod_status,
    sharing,
    training,
)
from support.operator.cluster_objects import (
    cache_of,
    job_of,
    pipeline_object,
    pod_of,
    running_status,
)
from support.operator.pods import (
    job_condition,
    running,
    terminated,
    unschedulable,
    waiting,
)

from finetune_operator.core.pipeline import Key
from finetune_operator.kubernetes.cache.cache import (
    CLAIMS,
    EVENTS,
    JOBS,
    PIPELINES,
    PODS,
)
from finetune_operator.kubernetes.cache.change import NO_CHANGE, Change, Urgency
from finetune_operator.kubernetes.pipeline_object import parse_pipeline

COMPLETE = job_condition("Complete")
FAILED = job_condition("Failed")


def test_new_pipeline_and_an_edit_are_urgent():
    cache = cache_of()
    assert cache.update(PIPELINES, pipeline_object(version=1)) == NOW
    assert cache.update(PIPELINES, pipeline_object(version=2, generation=2)) == NOW
    annotated = pipeline_object(
        version=3, generation=2, annotations={"finetune.dev/retry": "1"}
    )
    assert cache.update(PIPELINES, annotated) == NOW


def test_change_that_is_not_read_wakes_no_pipeline():
    cache = training()
    job = job_of(version=10)
    pod = pod_of(state=running(), version=11)
    job["status"]["active"] = 1
    pod["status"]["qosClass"] = "Burstable"
    job["metadata"]["labels"] = {"team": "x"}
    foreign = pipeline_object(
        version=12, status=running_status(JOB), annotations={"argocd/sync": "x"}
    )
    changes = [
        cache.update(kind, result)
        for kind, result in ((JOBS, job), (PODS, pod), (PIPELINES, foreign))
    ]
    assert {change.urgency for change in changes} == {Urgency.NEVER}


@pytest.mark.parametrize("kind", [JOBS, PIPELINES])
def test_watch_event_of_the_own_write_is_no_change(kind):
    cache = training()
    written = {
        JOBS: job_of("demo", "evaluate", version=10),
        PIPELINES: pipeline_object(version=10),
    }[kind]
    cache.update(kind, written)
    assert cache.update(kind, written) == NO_CHANGE


def test_written_status_is_kept_parsed():
    cache = training()
    answer = pipeline_object(version=30, status=running_status(JOB))
    pipeline = parse_pipeline(answer)
    cache.note_written(pipeline, answer)
    assert cache.pipelines.get(("team", "demo")).parsed is pipeline


def test_written_status_older_than_the_cache_is_dropped():
    cache = training()
    cache.update(PIPELINES, pipeline_object(version=40, generation=2))
    answer = pipeline_object(version=30)
    cache.note_written(parse_pipeline(answer), answer)
    known = cache.pipelines.get(("team", "demo"))
    assert known.generation == 2
    assert known.parsed is None


STARTS = {
    "pending": (None, LATER),
    "creating": (waiting("ContainerCreating"), LATER),
    "running": (running(), LATER),
    "no image": (waiting("ImagePullBackOff", "no"), NOW),
    "succeeded": (terminated(0, "{}", "Completed"), NOW),
    "failed": (terminated(1), NOW),
}


@pytest.mark.parametrize(("state", "change"), STARTS.values(), ids=STARTS)
def test_pod_is_urgent_when_the_operator_acts_on_it(state, change):
    cache = cache_of(
        finetunepipelines=[pipeline_object(status=running_status(JOB))], jobs=[job_of()]
    )
    assert cache.update(PODS, pod_of(state=state, version=5)) == change


def test_unschedulable_pod_is_urgent_once():
    cache = training()
    pod = pod_of(version=10) | {
        "metadata": pod_of(version=10, name="second")["metadata"]
    }
    pod["status"] |= {"phase": "Pending", "conditions": [unschedulable("0/3 nodes")]}
    assert cache.update(PODS, pod) == NOW
    pod["metadata"]["resourceVersion"] = "11"
    pod["status"]["conditions"][0]["lastTransitionTime"] = "2030-01-01T00:00:00Z"
    assert cache.update(PODS, pod) == LATER


def succeed(cache, version=10):
    pod = pod_of(
        state=terminated(0, "{}", "Completed"), phase="Succeeded", version=version
    )
    return cache.update(PODS, pod_status(pod, "Succeeded"))


def test_complete_job_after_its_pods_success_wakes_nobody():
    cache = training()
    assert succeed(cache) == NOW
    assert cache.is_over(cache.jobs.get(("team", JOB)))
    assert cache.writers("team", "demo-workspace") == []
    end_attempt(cache)
    assert (
        cache.update(JOBS, job_of("demo", "train", COMPLETE, version=21)) == NO_CHANGE
    )


def test_complete_job_is_urgent_while_its_attempt_runs():
    cache = training()
    succeed(cache)
    assert cache.update(JOBS, job_of("demo", "train", COMPLETE, version=21)) == NOW


@pytest.mark.parametrize("ending", ["complete", "failed", "deleted"])
def test_ended_job_wakes_the_pipeline_that_waits_for_the_claim(ending):
    cache = sharing()
    if ending == "deleted":
        change = cache.remove(JOBS, job_of(version=10))
    else:
        change = cache.update(
            JOBS,
            job_of(
                "demo",
                "train",
                COMPLETE if ending == "complete" else FAILED,
                version=10,
            ),
        )
    assert change == Change((DEMO, OTHER), Urgency.NOW)


def test_deletion_of_an_ended_job_wakes_nobody():
    cache = sharing()
    cache.update(JOBS, job_of("demo", "train", FAILED, version=10))
    end_attempt(cache)
    assert cache.remove(JOBS, job_of(version=21)) == NO_CHANGE


def test_new_job_does_not_wake_the_waiting_pipeline():
    cache = sharing()
    assert cache.update(JOBS, job_of("demo", "evaluate", version=10)) == NOW


@pytest.mark.parametrize("gone", [True, False])
def test_ended_pod_wakes_the_pipeline_that_waits_for_the_claim(gone):
    cache = sharing()
    if gone:
        change = cache.remove(PODS, pod_of(state=running(), version=10))
    else:
        change = cache.update(
            PODS, pod_status(pod_of(state=terminated(1), version=10), "Failed")
        )
    assert change == Change((DEMO, OTHER), Urgency.NOW)


def test_deleted_pipeline_wakes_the_one_that_waits_for_the_claim():
    cache = sharing()
    assert cache.remove(PIPELINES, pipeline_object(version=10)) == Change(
        (DEMO, OTHER), Urgency.NOW
    )


FINISHED = {"finishedAt": "2030-01-01T00:00:00Z"}
FREEING = {
    "finished": ({"status": running_status(JOB) | FINISHED}, True),
    "attempt ended": ({"status": running_status(JOB, outcome="Interrupted")}, True),
    "deleting": (
        {"status": running_status(JOB), "deletionTimestamp": "2030-01-01T00:00:00Z"},
        True,
    ),
    "another claim": ({"status": running_status(JOB), "claim": "mine"}, True),
    "progress": ({"status": running_status(JOB) | {"progress": "4%"}}, False),
}


@pytest.mark.parametrize(("changes", "freed"), FREEING.values(), ids=FREEING)
def test_written_status_wakes_the_pipeline_whose_turn_it_is(changes, freed):
    cache = sharing()
    answer = pipeline_object(version=30, **changes)
    assert cache.note_written(parse_pipeline(answer), answer) == (
        (OTHER,) if freed else ()
    )


def in_line(count):
    """Return a cache in which this many younger pipelines wait for the claim of the training."""
    cache = training()
    for number in range(count):
        younger = pipeline_object(
            f"p{number:03}",
            version=1,
            claim="demo-workspace",
            creationTimestamp=f"2031-{number:03}",
        )
        cache.update(PIPELINES, younger)
    return cache


def test_end_of_a_stage_wakes_no_younger_pipeline_in_line():
    cache = in_line(200)
    job = job_of("demo", "train", job_condition("Complete"), version=10)
    assert cache.update(JOBS, job).keys == (DEMO,)


def test_end_of_a_pipeline_wakes_the_next_in_line_only():
    cache = in_line(200)
    ended = running_status(JOB, outcome="Succeeded") | FINISHED
    answer = pipeline_object(version=30, status=ended)
    first = Key("team", "p000")
    assert cache.note_written(parse_pipeline(answer), answer) == (first,)
    suspended = pipeline_object(
        "p000", version=31, claim="demo-workspace", creationTimestamp="2031-000"
    )
    suspended["spec"]["suspend"] = True
    change = cache.update(PIPELINES, suspended)
    assert change.keys == (first, Key("team", "p001"))


def test_recorded_attempt_in_line_is_woken_wherever_it_is():
    """Two leaders may have recorded it: its Job is to be created as soon as the claim is free."""
    cache = in_line(3)
    recorded = pipeline_object(
        "p002",
        version=5,
        claim="demo-workspace",
        creationTimestamp="2031-002",
        status=running_status("p002-train-a1"),
    )
    cache.update(PIPELINES, recorded)
    ended = running_status(JOB, outcome="Succeeded") | FINISHED
    answer = pipeline_object(version=30, status=ended)
    keys = cache.note_written(parse_pipeline(answer), answer)
    assert set(keys) == {Key("team", "p000"), Key("team", "p002")}


# A complete list, after a watch has missed events.


# Warning events.


def warning(message, time="2030-01-01T00:00:00Z", kind="Job", name=JOB, **more):
    involved = {"namespace": "team", "kind": kind, "name": name}
    return {
        "metadata": {},
        "type": "Warning",
        "involvedObject": involved,
        "message": message,
        "lastTimestamp": time,
    } | more


def test_newest_warning_is_kept_and_wakes_its_pipeline_later():
    cache = training()
    assert cache.update(EVENTS, warning("quota")) == LATER
    assert cache.update(EVENTS, warning("older", "2029-01-01T00:00:00Z")) == NO_CHANGE
    assert cache.warning("team", "Job", JOB) == "quota"
    assert cache.update(EVENTS, warning("newer", "2030-01-01T00:01:00Z")) == LATER
    assert cache.warning("team", "Job", JOB) == "newer"


def test_other_events_wake_nobody():
    cache = training()
    assert cache.update(EVENTS, warning("x", type="Normal")) == NO_CHANGE
    assert cache.warning("team", "Job", JOB) == ""
    assert cache.update(EVENTS, warning("x", kind="Node", name="spot-1")) == NO_CHANGE
    assert cache.remove(EVENTS, warning("x")) == NO_CHANGE


def test_number_of_warnings_is_limited(monkeypatch):
    monkeypatch.setattr(
        "finetune_operator.kubernetes.cache.warning_events.WARNINGS_KEPT", 2
    )
    cache = training()
    for name in "abc":
        cache.update(EVENTS, warning("x", name=name))
    assert [cache.warning("team", "Job", name) for name in "abc"] == ["", "x", "x"]


def test_deleted_claim_wakes_its_pipeline():
    meta = {
        "namespace": "team",
        "name": "demo-workspace",
        "uid": "c",
        "resourceVersion": "1",
    }
    claim = {
        "metadata": {**meta, "annotations": {"finetune.dev/workspace-of": "demo"}},
        "spec": {},
    }
    cache = cache_of(persistentvolumeclaims=[claim])
    later = {**claim, "metadata": {**claim["metadata"], "resourceVersion": "2"}}
    assert cache.remove(CLAIMS, later) == NOW


def test_deleted_claim_has_no_lost_jobs():
    cache = cache_of(finetunepipelines=[pipeline_object("demo")], jobs=[job_of("demo")])
    cache.remove(JOBS, job_of("demo", version=2))
    assert cache.lost_jobs("team", "demo-workspace") == ("demo-train-a1",)
    meta = {"namespace": "team", "name": "demo-workspace", "resourceVersion": "3"}
    cache.remove(CLAIMS, {"metadata": meta})
    assert cache.lost_jobs("team", "demo-workspace") == ()


def test_pod_of_a_deleted_pipeline_is_forgotten():
    """A foreground deletion deletes the pod first, while the status still has its attempt."""
    cache = training()
    cache.update(
        PODS, pod_status(pod_of(state=terminated(75, SAVED), version=10), "Failed")
    )
    cache.remove(PODS, pod_of(version=11))
    cache.remove(PIPELINES, pipeline_object(version=12))
    assert list(cache.all_pods()) == []


def test_finished_pipeline_keeps_no_parsed_object():
    cache = training()
    answer = pipeline_object(
        version=30, status={"finishedAt": "2030-01-01T00:00:00Z", "phase": "Succeeded"}
    )
    cache.note_written(parse_pipeline(answer), answer)
    known = cache.pipelines.get(("team", "demo"))
    assert known.finished is True
    assert known.parsed is None
    assert known.phase == "Succeeded"
