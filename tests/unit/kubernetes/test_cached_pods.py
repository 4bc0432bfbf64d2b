"""The pods that the cache keeps, and what a list removes."""

from datetime import datetime, timedelta

import pytest
from support.operator.cached_training import (
    DEMO,
    JOB,
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
    pod_of,
)
from support.operator.pods import (
    ENDED,
    running,
    terminated,
)

from finetune_operator.kubernetes.cache.cache import (
    JOBS,
    PIPELINES,
    PODS,
)
from finetune_operator.kubernetes.cache.change import NO_CHANGE, Change, Urgency


def test_end_of_a_deleted_pod_is_kept_while_its_attempt_runs():
    cache = training()
    cache.update(
        PODS, pod_status(pod_of(state=terminated(75, SAVED), version=10), "Failed")
    )
    cache.remove(PODS, pod_of(state=running(), version=11))
    [pod] = cache.pods_of("team", JOB)
    assert (
        pod.gone,
        pod.exit_code,
        pod.termination_message.interruption.saved_step,
    ) == (
        True,
        75,
        40,
    )
    end_attempt(cache)
    assert cache.pods_of("team", JOB) == []


@pytest.mark.parametrize("hours", [-3, 3])
def test_end_beside_a_sidecar_is_timed_by_the_operators_clock(hours):
    """A node's clock that is ahead would let the sidecar hold the stage, and its nodes, for hours."""
    cache = training()
    seen = datetime.fromisoformat(ENDED) - timedelta(hours=hours)
    cache.clock = lambda: seen
    ended = pod_of(state=terminated(0), version=10)
    cache.update(PODS, pod_status(ended, "Running"))
    cache.clock = lambda: seen + timedelta(minutes=1)
    later = pod_of(state=terminated(0), version=11)
    cache.update(PODS, pod_status(later, "Running"))
    [pod] = cache.pods_of("team", JOB)
    assert pod.outlived_since == seen


def test_finished_pod_of_an_ended_attempt_is_not_kept():
    cache = training()
    end_attempt(cache)
    cache.update(PODS, pod_status(pod_of(state=terminated(1), version=30), "Failed"))
    assert cache.pods_of("team", JOB) == []


def test_running_pod_outlasts_the_end_of_its_attempt():
    """Its process still writes to the claim."""
    cache = training()
    end_attempt(cache)
    assert cache.pods_of("team", JOB)[0].started_at
    assert len(cache.writers("team", "demo-workspace")) == 2


def test_late_version_of_a_deleted_pod_is_dropped():
    cache = training()
    cache.remove(PODS, pod_of(state=terminated(75), version=11))
    assert cache.update(PODS, pod_of(state=running(), version=10)) == NO_CHANGE
    assert cache.pods_of("team", JOB)[0].gone


def test_younger_pod_of_a_job_counts():
    cache = training()
    created = "2030-01-01T00:01:00Z"
    younger = pod_of(
        state=running(), version=10, name="younger", uid="u2", creationTimestamp=created
    )
    cache.update(PODS, younger)
    cache.remove(PODS, pod_of(state=terminated(137), version=11))
    assert cache.pods_of("team", JOB)[0].name == "younger"


@pytest.mark.parametrize(
    "meta",
    [
        {"ownerReferences": []},
        {
            "ownerReferences": [
                {"kind": "ReplicaSet", "name": JOB, "uid": "x", "controller": True}
            ]
        },
        {"annotations": {}},
        {"labels": {}},
    ],
    ids=["no owner", "another controller", "no pipeline", "no label"],
)
def test_pod_of_another_program_is_not_kept(meta):
    cache = cache_of(jobs=[job_of()])
    assert (
        cache.update(PODS, pod_of(state=terminated(0, "{}"), version=5, **meta))
        == NO_CHANGE
    )
    assert len(cache.pods) == 0


def test_pod_with_another_jobs_uid_does_not_end_the_job():
    cache = training()
    forged = pod_of(state=terminated(0, "{}"), version=10, name="forged", uid="u2")
    forged["metadata"]["ownerReferences"][0]["uid"] = "another"
    cache.update(PODS, pod_status(forged, "Succeeded"))
    assert not cache.is_over(cache.jobs.get(("team", JOB)))


def test_sweep_removes_what_the_list_does_not_have():
    cache = sharing()
    assert list(cache.sweep(JOBS, set(), 10, None)) == [
        Change((DEMO, OTHER), Urgency.NOW)
    ]
    assert len(cache.jobs) == 0
    assert list(cache.sweep(PIPELINES, {("team", "other")}, 10, "team")) == [
        Change((DEMO, OTHER), Urgency.NOW)
    ]
    assert list(cache.sweep(PIPELINES, set(), 10, "elsewhere")) == []


def test_sweep_keeps_the_end_of_a_missing_pod():
    cache = training()
    cache.update(
        PODS, pod_status(pod_of(state=terminated(75, SAVED), version=10), "Failed")
    )
    list(cache.sweep(PODS, set(), 20, None))
    [pod] = cache.pods_of("team", JOB)
    assert (pod.gone, pod.exit_code) == (True, 75)
    assert list(cache.sweep(PODS, set(), 30, None)) == [], "it is swept once"


def test_sweep_of_a_running_pod_wakes_the_waiting_pipeline():
    cache = sharing()
    assert list(cache.sweep(PODS, set(), 20, None)) == [
        Change((DEMO, OTHER), Urgency.NOW)
    ]
    assert cache.pods_of("team", JOB)[0].gone


def test_sweep_spares_objects_newer_than_the_list():
    cache = training()
    assert list(cache.sweep(JOBS, set(), 1, None)) == []
    assert len(cache.jobs) == 1
