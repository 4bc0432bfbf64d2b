"""A Job and its pod, as they are in an API server, become the outcome that a person would give."""

import json
from datetime import UTC, datetime, timedelta

import pytest
from support.pods import a_job, a_pod, disrupted, ended, over, running, unschedulable, waiting

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
FAILED = over("Failed", "BackoffLimitExceeded", "Job has reached the specified backoff limit")
BY_RULE = over(
    "Failed", "PodFailurePolicy", "Pod team/x has condition DisruptionTarget matching FailJob rule at index 0"
)

GONE = {"deletionTimestamp": "2030-01-01T00:10:30Z"}

ENDINGS = {
    "a completed job with its result": (over("Complete"), ended(0, DONE, "Completed"), {}, Outcome.SUCCEEDED, "", 0),
    "a completed job whose pod nobody saw": (over("Complete"), None, {}, Outcome.INTERRUPTED, "before anybody", None),
    "an eviction that saved": (BY_RULE, ended(75, SAVED), {}, Outcome.INTERRUPTED, "saved at step 40", 75),
    "an eviction that killed": (BY_RULE, ended(137), {}, Outcome.INTERRUPTED, "DisruptionTarget", 137),
    "an eviction whose pod nobody saw": (BY_RULE, None, {}, Outcome.INTERRUPTED, "DisruptionTarget", None),
    "memory": (FAILED, ended(137, reason="OOMKilled"), {}, Outcome.FAILED, "raise resources.memory", 137),
    "a bug": (FAILED, ended(70, json.dumps({"failure": {"message": "oh"}})), {}, Outcome.FAILED, "oh", 70),
    "somebody else's words": (FAILED, ended(1, "Traceback: boo"), {}, Outcome.FAILED, "Traceback: boo", 1),
    "a machine that was restarted": (FAILED, ended(255, reason="Unknown"), {}, Outcome.INTERRUPTED, "lost sight", 255),
    "a node that shut down": (
        FAILED,
        ended(143),
        {"status": {"reason": "Terminated", "message": "Pod was terminated in response to imminent node shutdown."}},
        Outcome.INTERRUPTED,
        "imminent node shutdown",
        143,
    ),
    "a kubelet that started under pressure": (
        FAILED,
        ended(137),
        {"status": {"reason": "Evicted", "message": "Pod was rejected: The node had condition: [MemoryPressure]."}},
        Outcome.INTERRUPTED,
        "MemoryPressure",
        137,
    ),
    "too much on the node's disk": (
        FAILED,
        ended(137),
        {"status": {"reason": "Evicted", "message": "Container stage exceeded its local ephemeral storage limit."}},
        Outcome.FAILED,
        "killed",
        137,
    ),
    "kubectl delete pod": (FAILED, ended(143), GONE, Outcome.INTERRUPTED, "somebody deleted its pod on spot-1", 143),
    "deleted, but it had failed before": (FAILED, ended(65), GONE, Outcome.FAILED, "", 65),
    "killed, by nobody knows whom": (FAILED, ended(137), {}, Outcome.FAILED, "nothing says by whom", 137),
}  # fmt: skip


@pytest.mark.parametrize("case", ENDINGS.values(), ids=ENDINGS)
def test_how_an_attempt_ended(case):
    condition, state, more, outcome, words, code = case
    pod = Pod(a_pod(state, phase="Failed", **more)) if state else None
    seen = observe_job(NAME, a_job(condition), pod, NOW)
    end = classify_ending(ATTEMPT, seen)
    assert (end.outcome, seen.exit_code) == (outcome, code)
    assert words in end.message


def test_the_pod_tells_who_evicted_it_and_where():
    pod = Pod(a_pod(ended(75), disrupted("EvictionByEvictionAPI", "Eviction API: evicting"), phase="Failed"))
    assert observe_job(NAME, a_job(FAILED), pod, NOW).disruption == (
        "EvictionByEvictionAPI on spot-1: Eviction API: evicting"
    )


def test_a_job_that_was_deleted_runs_until_its_pod_is_gone():
    books = ResourceCache()
    books.update_pod(a_pod(running()))
    alive = books.pods["team", NAME]
    assert observe_job(NAME, None, alive, NOW).state is JobState.RUNNING
    assert books.update_pod(a_pod(ended(75, SAVED), phase="Failed"), gone=True) == Key("team", "demo")
    assert observe_job(NAME, None, books.pods["team", NAME], NOW).exit_code == 75


def test_a_job_that_was_deleted_when_it_had_just_finished_has_finished():
    pod = Pod(a_pod(ended(0, DONE, "Completed"), phase="Succeeded"), gone=True)
    seen = observe_job(NAME, None, pod, NOW)
    assert classify_ending(ATTEMPT, seen).outcome is Outcome.SUCCEEDED


def test_a_job_that_is_gone_with_all_that_anybody_knew_is_none():
    assert observe_job(NAME, None, None, NOW) is None
    assert observe_job(NAME, None, Pod(a_pod(running()), gone=True), NOW) is None


WAITINGS = {
    "quota": (None, "pods is forbidden: exceeded quota: team", Reason.WAITING_FOR_QUOTA, "quota grows"),
    "policy": (None, 'violates PodSecurity "restricted:latest"', Reason.POD_REFUSED, "policy allows less"),
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
        "no node has nvidia.com/gpu to spare: is its device plugin running?",
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
    "a zombie": (
        a_pod(running(), deletionTimestamp="2030-01-01T00:10:00Z"),
        "",
        Reason.NODE_LOST,
        "its node spot-1 does not answer",
    ),
}


@pytest.mark.parametrize(("pod", "warning", "reason", "mend"), WAITINGS.values(), ids=WAITINGS)
def test_what_holds_an_attempt_up_is_named_with_its_mend(pod, warning, reason, mend):
    seen = observe_job(NAME, a_job(), Pod(pod) if pod else None, NOW, warning=warning)
    assert seen.blocker.reason is reason
    assert mend in seen.blocker.message


def test_a_pod_that_is_on_its_way_waits_for_nothing():
    assert observe_job(NAME, a_job(), Pod(a_pod(waiting("ContainerCreating"), phase="Pending")), NOW).blocker is None
    assert observe_job(NAME, a_job(), None, NOW).blocker is None
    assert observe_job(NAME, a_job(), Pod(a_pod(running())), NOW).blocker is None


def test_a_pod_that_is_being_stopped_within_its_time_is_no_zombie():
    soon = (NOW + timedelta(seconds=10)).isoformat()
    assert observe_job(NAME, a_job(), Pod(a_pod(running(), deletionTimestamp=soon)), NOW).blocker is None


def test_books_forget_what_a_whole_list_does_not_have_and_keep_last_words():
    books = ResourceCache()
    pipeline = {"metadata": {"namespace": "team", "name": "demo"}}
    other = {"metadata": {"namespace": "team", "name": "gone"}}
    for known in (pipeline, other):
        books.update_pipeline(known)
    books.update_job(a_job())
    books.update_pod(a_pod(ended(75, SAVED), phase="Failed"))
    assert books.replace(finetunepipelines=[pipeline]) == {Key("team", "demo")}
    assert books.jobs == {}
    assert books.pods["team", NAME].gone
    assert books.pods["team", NAME].exit_code == 75
    books.replace()
    assert books.pods == {}


def test_an_older_view_of_a_pod_does_not_undo_its_end():
    books = ResourceCache()
    books.update_pod(a_pod(ended(75, SAVED), phase="Failed"))
    books.update_pod(a_pod(running()))
    assert books.pods["team", NAME].exit_code == 75
    books.update_pod(a_pod(running()), gone=True)
    books.update_pod(a_pod(running()))
    pod = books.pods["team", NAME]
    assert (pod.exit_code, pod.termination_message.interruption.saved_step, pod.gone) == (75, 40, True)


def test_a_pod_that_was_turned_away_stays_so_whatever_an_older_view_says():
    books = ResourceCache()
    books.update_pod(a_pod(None, phase="Failed", status={"reason": "NodeAffinity", "message": "no"}))
    books.update_pod(a_pod(None, phase="Pending"))
    assert books.pods["team", NAME].finished
    assert books.pods["team", NAME].disruption


def test_what_is_heard_of_the_end_of_a_pod_after_it_has_gone_is_kept():
    books = ResourceCache()
    books.update_pod(a_pod(running()), gone=True)
    books.update_pod(a_pod(ended(75, SAVED), phase="Failed"))
    pod = books.pods["team", NAME]
    assert (pod.exit_code, pod.gone) == (75, True)


def test_of_two_pods_of_one_job_the_younger_counts():
    books = ResourceCache()
    young = a_pod(running())
    young["metadata"] |= {"name": "young", "creationTimestamp": "2030-01-01T00:01:00Z"}
    books.update_pod(young)
    books.update_pod(a_pod(ended(137)), gone=True)
    assert books.pods["team", NAME].name == "young"


def test_where_it_was_in_the_end_counts_more_than_what_it_said_when_it_was_asked():
    where = {"stage": "train", "updatedAt": "2030-01-01T00:00:00Z", "step": 41, "startStep": 7}
    said = json.dumps({"interruption": {"step": 41, "savedStep": 41}, "progress": where})
    asked = Progress(stage="train", updated_at=datetime(2030, 1, 1, tzinfo=UTC), step=30)
    job = observe_job(NAME, a_job(over("Failed")), Pod(a_pod(ended(75, said), phase="Failed")), NOW, progress=asked)
    assert (job.progress.step, job.progress.start_step) == (41, 7)
    silent = observe_job(NAME, a_job(over("Failed")), Pod(a_pod(ended(75, SAVED), phase="Failed")), NOW, progress=asked)
    assert silent.progress == asked
