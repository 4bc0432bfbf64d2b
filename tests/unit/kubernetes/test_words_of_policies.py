"""Texts that hold the words of other causes, and pods that wait or end for causes outside the usual ones."""

import pytest
from support.operator.pods import (
    ATTEMPT,
    CREATED,
    DELETED,
    JOB,
    NOW,
    a_job,
    a_pod,
    job_condition,
    observed_job,
    running,
    terminated,
    unschedulable,
    waiting,
)

from finetune_operator.api.conditions import Reason
from finetune_operator.api.status import Outcome
from finetune_operator.core.attempts.endings import classify_ending
from finetune_operator.kubernetes.cache.trim import trim_job, trim_pod
from finetune_operator.kubernetes.translate.api_errors import (
    ApiError,
    classify_api_error,
)
from finetune_operator.kubernetes.translate.pod import ObservedPod
from finetune_operator.kubernetes.translate.start_errors import (
    container_not_started,
    pod_not_created,
    pod_not_started,
)

DENIED = 'Error creating: admission webhook "validate.example" denied the request: '
FORBIDDEN = 'Error creating: pods "x" is forbidden: '
REFUSALS = {
    "policy about a RuntimeClass": (
        FORBIDDEN
        + "ValidatingAdmissionPolicy 'gpu' with binding 'b' denied request: RuntimeClass nvidia is required",
        Reason.POD_REFUSED,
        "change the field",
    ),
    "policy about a PriorityClass": (
        DENIED + "policy require-priority: PriorityClass must be set",
        Reason.POD_REFUSED,
        "change the field",
    ),
    "policy about a quota": (
        DENIED + "exceeded quota: images of this team",
        Reason.POD_REFUSED,
        "change the field",
    ),
    "webhook with a name of another cause": (
        'Error creating: Internal error occurred: failed calling webhook "PriorityClass.x": connection refused',
        Reason.DEPENDENCY_NOT_READY,
        "repair this admission webhook",
    ),
    "scopes of a quota": (
        FORBIDDEN
        + "insufficient quota to match these scopes: [{PriorityClass In [high]}]",
        Reason.POD_REFUSED,
        "create a quota for these scopes",
    ),
    "absent RuntimeClass": (
        FORBIDDEN + 'pod rejected: RuntimeClass "gvisor" not found',
        Reason.CONTAINER_NOT_STARTED,
        "create the RuntimeClass",
    ),
    "absent PriorityClass": (
        FORBIDDEN + "no PriorityClass with name high was found",
        Reason.CONTAINER_NOT_STARTED,
        "create the PriorityClass",
    ),
    "quota": (
        FORBIDDEN + "exceeded quota: team, requested: pods=1, used: pods=5",
        Reason.WAITING_FOR_QUOTA,
        "the quota is raised",
    ),
}
VOLUMES = {
    "pod on another node": ("Multi-Attach error for volume", "until it ends"),
    "share": (
        "MountVolume.SetUp failed: mount.nfs: access denied by server while mounting",
        "allow node n1 to mount it",
    ),
    "driver": (
        "MountVolume.SetUp failed: driver name csi.example not found in the list of registered CSI drivers",
        "install this CSI driver on node n1",
    ),
    "class of secrets": (
        'MountVolume.SetUp failed: rpc error: SecretProviderClass "vault" not found',
        "create the SecretProviderClass",
    ),
    "file system": (
        "MountVolume.MountDevice failed: wrong fs type, bad option",
        "repair the file system",
    ),
    "attach": (
        "AttachVolume.Attach failed for volume: Volume not found",
        "kubectl describe pvc",
    ),
    "other": ("Unable to attach or mount volumes: timed out", "kubectl describe pvc"),
    "secret of a volume": (
        'MountVolume.SetUp failed for volume "ca" : secret "company-ca" not found',
        "remove it from the stage's pod.volumes",
    ),
}


@pytest.mark.parametrize(("text", "reason", "fix"), REFUSALS.values(), ids=REFUSALS)
def test_refused_pod_has_the_fix_of_its_cause(text, reason, fix):
    blocker = pod_not_created(text)
    assert blocker.reason is reason
    assert fix in blocker.message.removeprefix(text)


@pytest.mark.parametrize(("text", "fix"), VOLUMES.values(), ids=VOLUMES)
def test_volume_that_cannot_be_mounted_has_a_fix(text, fix):
    blocker = pod_not_started(text, "n1")
    assert blocker
    assert fix in blocker.message.removeprefix(text)


def test_absent_library_of_a_driver_is_no_wrong_command():
    message = "libnvidia-ml.so.1: cannot open: no such file or directory"
    blocker = container_not_started("RunContainerError", message)
    assert "check the device plugin" in blocker.message


@pytest.mark.parametrize("status", [400, 403, 406, 418, 422, 500])
def test_denial_with_any_code_is_a_blocker(status):
    text = 'admission webhook "budget.co" denied the request: exceeded quota: budget'
    blocker = classify_api_error(ApiError(status, text))
    assert blocker
    assert blocker.reason in {Reason.POD_REFUSED, Reason.SPEC_INVALID}


def observed(state, phase, *conditions, init=None, plain=None, job=None, **status):
    raw = a_pod(state, *conditions, phase=phase, status=status)
    if init:
        raw["status"]["initContainerStatuses"] = [{"name": "proxy", **init}]
    if plain:
        statuses = raw["status"]["containerStatuses"]
        raw["status"]["containerStatuses"] = [{"name": "proxy", **plain}, *statuses]
    pod = ObservedPod(trim_pod(raw))
    return observed_job(JOB, job or a_job(), [pod], NOW)


def test_pod_behind_a_gate_waits_for_no_node():
    gate = unschedulable("Scheduling is blocked due to non-empty scheduling gates")
    gate |= {"reason": "SchedulingGated", "lastTransitionTime": CREATED}
    job = observed(None, "Pending", gate)
    assert job.unschedulable_since is None
    assert job.blocker.reason is Reason.WAITING_FOR_QUOTA
    assert "scheduling gates are removed" in job.blocker.message


RECOVERED = {"restartCount": 3, "state": running(), "lastState": terminated(1)}


def test_sidecar_that_has_recovered_holds_nothing_up():
    native = observed(running(), "Running", init={**RECOVERED, "started": True})
    plain = observed(running(), "Running", plain=RECOVERED)
    assert native.blocker is None
    assert plain.blocker is None
    crashing = RECOVERED | {"state": waiting("CrashLoopBackOff")}
    blocker = observed(running(), "Running", plain=crashing).blocker
    assert blocker.reason is Reason.SIDECAR_FAILED


def test_eviction_in_other_words_is_an_interruption():
    words = "Pod was evicted for a reason of a later version"
    job = observed(
        terminated(137),
        "Failed",
        job=a_job(job_condition("Failed")),
        reason="Evicted",
        message=words,
    )
    ending = classify_ending(ATTEMPT, job)
    assert ending.outcome is Outcome.INTERRUPTED
    assert words in ending.message


def test_deadline_of_the_job_names_who_sets_it():
    """The Job controller ends the pods, which then look like those that a client deletes."""
    words = "Job was active longer than specified deadline"
    pod = a_pod(terminated(143), phase="Failed", **DELETED)
    job = a_job(job_condition("Failed", "DeadlineExceeded", words))
    ending = classify_ending(
        ATTEMPT, observed_job(JOB, trim_job(job), [ObservedPod(trim_pod(pod))], NOW)
    )
    assert ending.outcome == Outcome.FAILED
    assert ending.reason == Reason.STAGE_FAILED
    assert ending.message == (
        f"{words}: an admission policy has set activeDeadlineSeconds of the Job: raise or remove it"
    )


def test_failed_job_without_its_pod_says_that_no_code_is_known():
    """The operator was away, and the garbage collector has deleted the pod."""
    job = observed_job(JOB, a_job(job_condition("Failed")), [], NOW)
    ending = classify_ending(ATTEMPT, job)
    assert ending.outcome == Outcome.FAILED
    assert ending.reason == Reason.STAGE_FAILED
    assert "its pod was gone before the exit code was read" in ending.message


def test_deadline_of_the_pod_names_who_sets_it():
    words = "Pod was active on the node longer than the specified deadline"
    job = observed(
        None,
        "Failed",
        job=a_job(job_condition("Failed")),
        reason="DeadlineExceeded",
        message=words,
    )
    ending = classify_ending(ATTEMPT, job)
    assert ending.reason is Reason.STAGE_FAILED
    assert ending.message.startswith(words)
    assert "activeDeadlineSeconds" in ending.message
