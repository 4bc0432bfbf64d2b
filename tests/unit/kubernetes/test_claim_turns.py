"""Two pipelines with one claim: whose turn it is; and the refusals of the API server in their status."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from support.operator.cluster_objects import (
    job_of,
    pod_of,
    running_status,
)
from support.operator.pods import job_condition, running
from support.operator.shared_claim import CLAIMS, FINETUNE, JOBS_PATH, SharedClaim

from finetune_operator.controller.worker import process
from finetune_operator.controller.workqueue import WorkQueue
from finetune_operator.core.pipeline import Key
from finetune_operator.core.settings import Settings
from finetune_operator.kubernetes.cache.cache import (
    JOBS,
    PIPELINES,
    PODS,
)
from finetune_operator.kubernetes.translate.api_errors import ApiError

FINISHED = {"finishedAt": "2030-01-02T00:00:00Z"}
INTERRUPTED = '{"interruption": {"step": 4, "savedStep": 4}}'


@pytest.fixture
def sharing():
    return SharedClaim()


def test_older_waiting_pipeline_takes_precedence(sharing):
    sharing.reconcile("younger")
    assert sharing.reason("younger") == "WorkspaceInUse"
    assert sharing.writers == []
    assert (
        "the workspace of the pipeline older, which has not finished"
        in sharing.message("younger")
    )
    sharing.reconcile("older")
    assert sharing.writers == ["older"]


def test_running_pipeline_keeps_the_claim_from_an_older_one(sharing):
    sharing.submit("older", "2030", **FINISHED)
    sharing.reconcile("younger")
    sharing.submit("older", "2030")  # after a retry it is unfinished again
    sharing.reconcile("older")
    assert sharing.reason("older") == "WorkspaceInUse"
    assert sharing.writers == ["younger"]


def test_ended_job_frees_the_claim_once_its_attempt_has_ended(sharing):
    """While its status has the attempt as running, another leader may still create its Job."""
    sharing.submit("older", "2030", **FINISHED)
    sharing.reconcile("younger")
    sharing.submit("older", "2030")
    sharing.end_job("younger")
    sharing.reconcile("older")
    assert sharing.reason("older") == "WorkspaceInUse"
    sharing.reconcile("younger", base_interruption_backoff=timedelta(hours=1))
    assert Key("team", "older") in sharing.queue
    sharing.reconcile("older")
    assert sharing.writers == ["older", "younger"]


def test_recorded_attempt_holds_the_claim_before_its_job_exists(sharing):
    sharing.submit(
        "younger", "2031", **running_status("younger-prepare-a1", stage="prepare")
    )
    sharing.reconcile("older")
    assert sharing.reason("older") == "WorkspaceInUse"
    assert sharing.writers == []


def test_server_of_another_pipeline_does_not_hold_the_claim(sharing):
    sharing.submit(
        "younger", "2031", **running_status("younger-deploy-a1", stage="deploy")
    )
    sharing.reconcile("older")
    assert sharing.writers == ["older"]


def test_of_two_recorded_attempts_the_older_pipeline_goes_first(sharing):
    """Two leaders have recorded them at the same moment."""
    recorded = {}
    for name, created in (("older", "2030"), ("younger", "2031")):
        alone = SharedClaim()
        other = {"older": "younger", "younger": "older"}[name]
        alone.submit(other, created, **FINISHED)
        alone.reconcile(name)
        recorded[name] = alone.api.objects[f"{FINETUNE}/{name}"]["status"]
    sharing.submit("older", "2030", **recorded["older"])
    sharing.submit("younger", "2031", **recorded["younger"])
    sharing.reconcile("younger")
    assert sharing.writers == []
    sharing.reconcile("older")
    assert sharing.writers == ["older"]
    sharing.reconcile("younger")
    assert sharing.writers == ["older"]


@pytest.mark.parametrize("left", ["Job", "pod", "pod without its Job"])
def test_deleted_pipeline_of_the_same_name_holds_the_claim(sharing, left):
    job = job_of(
        "older",
        "prepare",
        claim="shared",
        ownerReferences=[{"kind": "FineTunePipeline", "uid": "earlier"}],
    )
    pod = pod_of("older", "prepare", running(), claim="shared")
    if left != "pod without its Job":
        sharing.cache.update(JOBS, job)
    if left != "Job":
        sharing.cache.update(PODS, pod)
    sharing.reconcile("older")
    assert sharing.reason("older") == "WorkspaceInUse"
    assert sharing.writers == []
    assert "the pipeline older, which still has a running Job" in sharing.message(
        "older"
    )
    sharing.cache.remove(
        PODS, pod | {"metadata": {**pod["metadata"], "resourceVersion": "900"}}
    )
    sharing.cache.remove(
        JOBS, job | {"metadata": {**job["metadata"], "resourceVersion": "900"}}
    )
    sharing.reconcile("older")
    assert sharing.writers == ["older"]


PODS_PATH = "/api/v1/namespaces/team/pods"


@pytest.mark.parametrize("known", [False, True])
def test_pod_that_no_watch_has_shown_holds_the_claim(sharing, known):
    """The watch of pods may be behind the watch of Jobs, which shows that the Job was deleted."""
    earlier = [{"kind": "FineTunePipeline", "uid": "earlier"}]
    job = job_of("older", "prepare", claim="shared", ownerReferences=earlier)
    pod = sharing.api.put(
        f"{PODS_PATH}/left",
        pod_of("older", "prepare", running(), claim="shared", name="left"),
    )
    sharing.cache.update(JOBS, job)
    if known:
        sharing.cache.update(PODS, pod)
    sharing.cache.remove(
        JOBS, job | {"metadata": {**job["metadata"], "resourceVersion": "900"}}
    )
    sharing.reconcile("older")
    assert sharing.reason("older") == "WorkspaceInUse"
    assert sharing.writers == []
    sharing.cache.remove(
        PODS, pod | {"metadata": {**pod["metadata"], "resourceVersion": "901"}}
    )
    sharing.reconcile("older")
    assert sharing.writers == ["older"]
    assert sharing.api.reads.count(PODS_PATH) == (not known)


def test_unseen_pod_of_its_own_deleted_job_holds_the_claim(sharing):
    """The status does not have the Job's createdAt yet, so the attempt itself is not looked for."""
    sharing.submit("younger", "2031", **FINISHED)
    sharing.reconcile("older")
    [path] = [
        path for path in sharing.api.objects if path.startswith(f"{JOBS_PATH}/older-")
    ]
    job = sharing.api.objects.pop(path)
    meta: dict[str, Any] = {
        "name": "left",
        "labels": {"batch.kubernetes.io/job-name": job["metadata"]["name"]},
    }
    owner = {
        "kind": "Job",
        "name": job["metadata"]["name"],
        "uid": job["metadata"]["uid"],
        "controller": True,
    }
    pod = pod_of(
        "older", "prepare", running(), claim="shared", ownerReferences=[owner], **meta
    )
    sharing.api.put(f"{PODS_PATH}/left", pod)
    sharing.cache.remove(
        JOBS, job | {"metadata": {**job["metadata"], "resourceVersion": "900"}}
    )
    sharing.reconcile("older")
    assert sharing.writers == []


def test_deleted_job_that_had_ended_costs_no_read(sharing):
    job = job_of("older", "prepare", job_condition("Complete"), claim="shared")
    sharing.cache.update(JOBS, job)
    sharing.cache.remove(
        JOBS, job | {"metadata": {**job["metadata"], "resourceVersion": "900"}}
    )
    sharing.reconcile("older")
    assert PODS_PATH not in sharing.api.reads
    assert sharing.writers == ["older"]


def test_concurrent_reconciles_create_one_job(sharing):
    sharing.submit("older", "2030", **FINISHED)
    replace_status = sharing.api.replace
    queue = WorkQueue()

    async def replace_slowly(path, body):
        await asyncio.sleep(0.01)
        return await replace_status(path, body)

    async def both():
        sharing.api.replace = replace_slowly
        keys = (Key("team", "younger"), Key("team", "older"))
        await asyncio.gather(
            *(process(key, queue, sharing.cluster, Settings()) for key in keys)
        )

    asyncio.run(both())
    assert len(sharing.writers) == 1


def test_finished_pipeline_enqueues_the_waiting_one(sharing):
    sharing.reconcile("older")
    sharing.reconcile("younger")
    sharing.queue.clear()
    annotated = sharing.api.objects[f"{FINETUNE}/older"]
    annotated["metadata"] |= {"annotations": {"finetune.dev/cancel": "now"}}
    sharing.cache.update(PIPELINES, sharing.api.put(f"{FINETUNE}/older", annotated))
    sharing.reconcile("older")
    [job] = sharing.cache.jobs.entries
    sharing.cache.jobs.remove(job, version=10**6)
    sharing.reconcile("older")
    assert sharing.reason("older") == "Cancelled"
    assert sharing.queue == [Key("team", "younger")]
    sharing.reconcile("younger")
    assert sharing.writers == ["younger"]


def test_pipeline_far_down_the_line_looks_seldom(sharing):
    """It is woken when it is the next; until then it only reports for whom it waits."""
    for number in range(30):
        sharing.submit(f"p{number:02}", f"20{40 + number}")
    sharing.api.reads.clear()
    waits = {name: sharing.reconcile(name).requeue_after for name in ("p00", "p29")}
    poll = Settings().poll_interval
    assert waits == {"p00": 2 * poll, "p29": 10 * poll}
    assert [path for path in sharing.api.reads if CLAIMS in path] == []


def test_missing_claim_of_the_user_is_told_and_found_later(sharing):
    claim = sharing.api.objects.pop(f"{CLAIMS}/shared")
    result = sharing.reconcile("older")
    assert sharing.reason("older") == "VolumeNotReady"
    assert sharing.writers == []
    assert "has no claim shared: create it" in sharing.message("older")
    assert result.requeue_after == Settings().poll_interval
    sharing.api.put(f"{CLAIMS}/shared", claim)
    sharing.reconcile("older")
    assert sharing.writers == ["older"]


# Refusals of the API server, which are kept in the status.


def refuse_jobs(sharing, message):
    sharing.api.rejected_creates["/jobs/"] = ApiError(403, message, "Forbidden")


def test_refused_job_is_told_and_its_first_message_kept(sharing):
    """Some policies word each refusal anew; a new message would change the status at every reconcile."""
    refuse_jobs(sharing, "exceeded quota: request 1")
    assert sharing.reconcile("older").refusals
    assert sharing.reason("older") == "WaitingForQuota"
    assert "exceeded quota: request 1" in sharing.message("older")
    version = sharing.api.version
    for attempt in (2, 3):
        refuse_jobs(sharing, f"exceeded quota: request {attempt}")
        assert sharing.reconcile("older").refusals
    assert (sharing.api.version, "request 1" in sharing.message("older")) == (
        version,
        True,
    )


def test_refusal_of_another_reason_replaces_the_first(sharing):
    refuse_jobs(sharing, "exceeded quota: x")
    sharing.reconcile("older")
    refuse_jobs(sharing, "denied by policy")
    sharing.reconcile("older")
    assert (
        sharing.reason("older"),
        "denied by policy" in sharing.message("older"),
    ) == (
        "PodRefused",
        True,
    )


def test_refusal_is_cleared_when_the_request_succeeds(sharing):
    refuse_jobs(sharing, "exceeded quota: x")
    sharing.reconcile("older")
    sharing.api.rejected_creates.clear()
    assert not sharing.reconcile("older").refusals
    status = sharing.api.objects[f"{FINETUNE}/older"]["status"]
    assert status.get("refusals", []) == []
    assert sharing.reason("older") == "Progressing"
    assert sharing.writers == ["older"]


def test_refusal_survives_a_restart_of_the_operator(sharing):
    refuse_jobs(sharing, "exceeded quota: request 1")
    sharing.reconcile("older")
    sharing.restart()
    refuse_jobs(sharing, "exceeded quota: request 2")
    sharing.reconcile("older")
    assert "request 1" in sharing.message("older")


def test_lost_answer_that_freed_the_claim_wakes_the_next():
    """The conflict of the repeated write reads the server; the watch event is no news after that."""
    sharing = SharedClaim()
    sharing.reconcile("older")
    path = f"{FINETUNE}/older"
    written = sharing.api.put(path, {**sharing.api.objects[path], "status": FINISHED})
    asyncio.run(sharing.cluster._refresh(Key("team", "older")))
    assert Key("team", "younger") in sharing.queue
    assert sharing.cache.update(PIPELINES, written).keys == ()
