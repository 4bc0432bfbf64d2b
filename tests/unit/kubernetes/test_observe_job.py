"""Observe a Job and its pod, classify the ending, and diagnose what blocks the attempt."""

import json
from datetime import UTC, datetime, timedelta

import pytest
from support.pods import a_job, a_pod, disrupted, job_condition, running, terminated, unschedulable, waiting

from finetune_operator.api.conditions import Reason
from finetune_operator.api.status import AttemptStatus, Outcome
from finetune_operator.core.endings import classify_ending
from finetune_operator.core.observation import JobState
from finetune_operator.core.pipeline import Key
from finetune_operator.kubernetes.cache import ResourceCache
from finetune_operator.kubernetes.translate.job import observe_job
from finetune_operator.kubernetes.translate.pod import Pod
from finetune_trainer.contract import Progress

NAME = "demo-train-a1"
NOW = datetime(2030, 1, 1, 0, 20, tzinfo=UTC)
ATTEMPT = AttemptStatus(number=1, job=NAME, identity="i", execution="e")
RESULT = {"stage": "train", "identity": "i", "digest": "d", "steps": 9, "loss": 1.0, "bestStep": 9, "tokens": 7}
DONE = json.dumps({"result": RESULT})
SAVED = json.dumps({"interruption": {"step": 40, "savedStep": 40}})
FAILED = job_condition("Failed", "BackoffLimitExceeded", "Job has reached the specified backoff limit")
BY_RULE = job_condition(
    "Failed", "PodFailurePolicy", "Pod team/x has condition DisruptionTarget matching FailJob rule at index 0"
)

GONE = {"deletionTimestamp": "2030-01-01T00:10:30Z"}

ENDINGS = {
    "complete with result": (job_condition("Complete"), terminated(0, DONE, "Completed"), {}, Outcome.SUCCEEDED, "", 0),
    "complete, pod not observed": (
        job_condition("Complete"),
        None,
        {},
        Outcome.INTERRUPTED,
        "before the result was read",
        None,
    ),
    "evicted, saved": (BY_RULE, terminated(75, SAVED), {}, Outcome.INTERRUPTED, "saved at step 40", 75),
    "evicted, killed": (BY_RULE, terminated(137), {}, Outcome.INTERRUPTED, "DisruptionTarget", 137),
    "evicted, pod not observed": (BY_RULE, None, {}, Outcome.INTERRUPTED, "DisruptionTarget", None),
    "out of memory": (FAILED, terminated(137, reason="OOMKilled"), {}, Outcome.FAILED, "raise resources.memory", 137),
    "internal error": (
        FAILED,
        terminated(70, json.dumps({"failure": {"message": "oh"}})),
        {},
        Outcome.FAILED,
        "oh",
        70,
    ),
    "foreign termination message": (FAILED, terminated(1, "Traceback: boo"), {}, Outcome.FAILED, "Traceback: boo", 1),
    "machine restarted": (FAILED, terminated(255, reason="Unknown"), {}, Outcome.INTERRUPTED, "lost track", 255),
    "node shutdown": (
        FAILED,
        terminated(143),
        {"status": {"reason": "Terminated", "message": "Pod was terminated in response to imminent node shutdown."}},
        Outcome.INTERRUPTED,
        "imminent node shutdown",
        143,
    ),
    "rejected by the kubelet": (
        FAILED,
        terminated(137),
        {"status": {"reason": "Evicted", "message": "Pod was rejected: The node had condition: [MemoryPressure]."}},
        Outcome.INTERRUPTED,
        "MemoryPressure",
        137,
    ),
    "evicted for ephemeral storage": (
        FAILED,
        terminated(137),
        {"status": {"reason": "Evicted", "message": "Container stage exceeded its local ephemeral storage limit."}},
        Outcome.FAILED,
        "killed",
        137,
    ),
    "pod deleted": (FAILED, terminated(143), GONE, Outcome.INTERRUPTED, "the pod was deleted on spot-1", 143),
    "pod deleted after a failure": (FAILED, terminated(65), GONE, Outcome.FAILED, "", 65),
    "killed, cause unknown": (FAILED, terminated(137), {}, Outcome.FAILED, "cause unknown", 137),
}


@pytest.mark.parametrize("case", ENDINGS.values(), ids=ENDINGS)
def test_ending_is_classified(case):
    condition, state, more, outcome, text, code = case
    pod = Pod(a_pod(state, phase="Failed", **more)) if state else None
    job = observe_job(NAME, a_job(condition), pod, NOW)
    ending = classify_ending(ATTEMPT, job)
    assert (ending.outcome, job.exit_code) == (outcome, code)
    assert text in ending.message


def test_disruption_names_the_cause_and_the_node():
    pod = Pod(a_pod(terminated(75), disrupted("EvictionByEvictionAPI", "Eviction API: evicting"), phase="Failed"))
    assert observe_job(NAME, a_job(FAILED), pod, NOW).disruption == (
        "EvictionByEvictionAPI on spot-1: Eviction API: evicting"
    )


def test_deleted_job_runs_until_its_pod_is_gone():
    cache = ResourceCache()
    cache.update_pod(a_pod(running()))
    pod = cache.pods["team", NAME]
    assert observe_job(NAME, None, pod, NOW).state is JobState.RUNNING
    assert cache.update_pod(a_pod(terminated(75, SAVED), phase="Failed"), gone=True) == Key("team", "demo")
    assert observe_job(NAME, None, cache.pods["team", NAME], NOW).exit_code == 75


def test_job_deleted_after_success_has_succeeded():
    pod = Pod(a_pod(terminated(0, DONE, "Completed"), phase="Succeeded"), gone=True)
    job = observe_job(NAME, None, pod, NOW)
    assert classify_ending(ATTEMPT, job).outcome is Outcome.SUCCEEDED


def test_deleted_job_without_evidence_is_none():
    assert observe_job(NAME, None, None, NOW) is None
    assert observe_job(NAME, None, Pod(a_pod(running()), gone=True), NOW) is None


BLOCKERS = {
    "quota": (None, "pods is forbidden: exceeded quota: team", Reason.WAITING_FOR_QUOTA, "quota is raised"),
    "policy": (
        None,
        'violates PodSecurity "restricted:latest"',
        Reason.POD_REFUSED,
        "Pod Security level does not admit",
    ),
    "no account": (None, 'serviceaccount "x" not found', Reason.DEPENDENCY_NOT_READY, "serviceAccountName"),
    "no node": (
        a_pod(None, unschedulable("0/3 nodes are available: 3 node(s) had untolerated taint(s)."), phase="Pending"),
        "",
        Reason.WAITING_FOR_CAPACITY,
        "untolerated taint",
    ),
    "no gpu": (
        a_pod(None, unschedulable("0/3 nodes are available: 3 Insufficient nvidia.com/gpu."), phase="Pending"),
        "",
        Reason.WAITING_FOR_CAPACITY,
        "no node has nvidia.com/gpu available: wait for other pods, or check that its device plugin runs",
    ),
    "no volume": (
        a_pod(None, unschedulable("pod has unbound immediate PersistentVolumeClaims"), phase="Pending"),
        "",
        Reason.VOLUME_NOT_READY,
        "kubectl describe pvc",
    ),
    "no image": (
        a_pod(waiting("ImagePullBackOff", 'Back-off pulling image "x"'), phase="Pending"),
        "",
        Reason.IMAGE_PULL_FAILED,
        "check the stage's image",
    ),
    "no secret": (
        a_pod(waiting("CreateContainerConfigError", 'secret "keys" not found'), phase="Pending"),
        "",
        Reason.SECRET_NOT_FOUND,
        "secretRefs",
    ),
    "no mount": (
        a_pod(waiting("ContainerCreating"), phase="Pending"),
        "MountVolume.SetUp failed for volume pvc-1",
        Reason.VOLUME_NOT_READY,
        "MountVolume",
    ),
    "lost node": (
        a_pod(running(), deletionTimestamp="2030-01-01T00:10:00Z"),
        "",
        Reason.NODE_LOST,
        "node spot-1 does not answer",
    ),
}


@pytest.mark.parametrize(("pod", "warning", "reason", "text"), BLOCKERS.values(), ids=BLOCKERS)
def test_blocker_has_the_reason_and_names_the_fix(pod, warning, reason, text):
    job = observe_job(NAME, a_job(), Pod(pod) if pod else None, NOW, warning=warning)
    assert job.blocker.reason is reason
    assert text in job.blocker.message


def test_starting_pod_has_no_blocker():
    assert observe_job(NAME, a_job(), Pod(a_pod(waiting("ContainerCreating"), phase="Pending")), NOW).blocker is None
    assert observe_job(NAME, a_job(), None, NOW).blocker is None
    assert observe_job(NAME, a_job(), Pod(a_pod(running())), NOW).blocker is None


def test_terminating_pod_in_its_grace_period_has_no_blocker():
    soon = (NOW + timedelta(seconds=10)).isoformat()
    assert observe_job(NAME, a_job(), Pod(a_pod(running(), deletionTimestamp=soon)), NOW).blocker is None


def test_relist_drops_missing_objects_and_keeps_pod_endings():
    cache = ResourceCache()
    pipeline = {"metadata": {"namespace": "team", "name": "demo"}}
    deleted = {"metadata": {"namespace": "team", "name": "gone"}}
    for one in (pipeline, deleted):
        cache.update_pipeline(one)
    cache.update_job(a_job())
    cache.update_pod(a_pod(terminated(75, SAVED), phase="Failed"))
    assert cache.replace(finetunepipelines=[pipeline]) == {Key("team", "demo")}
    assert cache.jobs == {}
    assert cache.pods["team", NAME].gone
    assert cache.pods["team", NAME].exit_code == 75
    cache.replace()
    assert cache.pods == {}


def test_older_version_of_a_pod_does_not_undo_its_end():
    cache = ResourceCache()
    cache.update_pod(a_pod(terminated(75, SAVED), phase="Failed"))
    cache.update_pod(a_pod(running()))
    assert cache.pods["team", NAME].exit_code == 75
    cache.update_pod(a_pod(running()), gone=True)
    cache.update_pod(a_pod(running()))
    pod = cache.pods["team", NAME]
    assert (pod.exit_code, pod.termination_message.interruption.saved_step, pod.gone) == (75, 40, True)


def test_older_version_of_a_pod_does_not_undo_its_rejection():
    cache = ResourceCache()
    cache.update_pod(a_pod(None, phase="Failed", status={"reason": "NodeAffinity", "message": "no"}))
    cache.update_pod(a_pod(None, phase="Pending"))
    assert cache.pods["team", NAME].finished
    assert cache.pods["team", NAME].disruption


def test_end_of_a_pod_is_kept_after_its_deletion_event():
    cache = ResourceCache()
    cache.update_pod(a_pod(running()), gone=True)
    cache.update_pod(a_pod(terminated(75, SAVED), phase="Failed"))
    pod = cache.pods["team", NAME]
    assert (pod.exit_code, pod.gone) == (75, True)


def test_younger_pod_of_a_job_counts():
    cache = ResourceCache()
    younger = a_pod(running())
    younger["metadata"] |= {"name": "younger", "creationTimestamp": "2030-01-01T00:01:00Z"}
    cache.update_pod(younger)
    cache.update_pod(a_pod(terminated(137)), gone=True)
    assert cache.pods["team", NAME].name == "younger"


def test_final_progress_wins_over_the_polled_progress():
    progress = {"stage": "train", "updatedAt": "2030-01-01T00:00:00Z", "step": 41, "startStep": 7}
    message = json.dumps({"interruption": {"step": 41, "savedStep": 41}, "progress": progress})
    polled = Progress(stage="train", updated_at=datetime(2030, 1, 1, tzinfo=UTC), step=30)
    job = observe_job(
        NAME, a_job(job_condition("Failed")), Pod(a_pod(terminated(75, message), phase="Failed")), NOW, progress=polled
    )
    assert (job.progress.step, job.progress.start_step) == (41, 7)
    without = observe_job(
        NAME, a_job(job_condition("Failed")), Pod(a_pod(terminated(75, SAVED), phase="Failed")), NOW, progress=polled
    )
    assert without.progress == polled
