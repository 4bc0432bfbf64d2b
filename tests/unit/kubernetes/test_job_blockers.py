"""What blocks an attempt: the reason, and a message that names the fix."""

from datetime import UTC, datetime, timedelta

import pytest
from support.operator.pods import (
    DELETED,
    ENDED,
    JOB,
    NOW,
    a_job,
    a_pod,
    observed_job,
    running,
    unschedulable,
    waiting,
)

from finetune_operator.api.conditions import Reason
from finetune_operator.kubernetes.cache.trim import trim_pod
from finetune_operator.kubernetes.translate.pod import ObservedPod

BLOCKERS = {
    "quota": (
        None,
        "pods is forbidden: exceeded quota: team",
        Reason.WAITING_FOR_QUOTA,
        "quota is raised",
    ),
    "policy": (
        None,
        'violates PodSecurity "restricted:latest"',
        Reason.POD_REFUSED,
        "Pod Security level does not admit",
    ),
    "no account": (
        None,
        'serviceaccount "x" not found',
        Reason.CONTAINER_NOT_STARTED,
        "serviceAccountName",
    ),
    "no node": (
        a_pod(
            None,
            unschedulable(
                "0/3 nodes are available: 3 node(s) had untolerated taint(s)."
            ),
            phase="Pending",
        ),
        "",
        Reason.WAITING_FOR_CAPACITY,
        "untolerated taint",
    ),
    "volume in another zone": (
        a_pod(
            None,
            unschedulable(
                "0/4 nodes are available: 4 node(s) had volume node affinity conflict."
            ),
            phase="Pending",
        ),
        "",
        Reason.VOLUME_NOT_READY,
        "topology.kubernetes.io/zone in podDefaults.nodeSelector",
    ),
    "newer words for another zone": (
        a_pod(
            None,
            unschedulable(
                "0/4 nodes: 4 node(s) didn't match PersistentVolume's node affinity."
            ),
            phase="Pending",
        ),
        "",
        Reason.VOLUME_NOT_READY,
        "topology.kubernetes.io/zone in podDefaults.nodeSelector",
    ),
    "volume in a full zone": (
        a_pod(
            None,
            unschedulable(
                "0/4 nodes: 2 Insufficient nvidia.com/gpu, 2 node(s) had volume node affinity conflict."
            ),
            phase="Pending",
        ),
        "",
        Reason.WAITING_FOR_CAPACITY,
        "topology.kubernetes.io/zone in podDefaults.nodeSelector",
    ),
    "no gpu": (
        a_pod(
            None,
            unschedulable("0/3 nodes are available: 3 Insufficient nvidia.com/gpu."),
            phase="Pending",
        ),
        "",
        Reason.WAITING_FOR_CAPACITY,
        "no node has nvidia.com/gpu available: wait for other pods, or check that its device plugin runs",
    ),
    "no volume": (
        a_pod(
            None,
            unschedulable("pod has unbound immediate PersistentVolumeClaims"),
            phase="Pending",
        ),
        "",
        Reason.VOLUME_NOT_READY,
        "kubectl describe pvc",
    ),
    "no claim": (
        a_pod(
            None,
            unschedulable(
                '0/3 nodes are available: persistentvolumeclaim "data" not found.'
            ),
            phase="Pending",
        ),
        "",
        Reason.VOLUME_NOT_READY,
        "create the claim data in this namespace, or correct the pvc:// URI",
    ),
    "no pull secret": (
        a_pod(waiting("ErrImagePull", "401 Unauthorized"), phase="Pending"),
        "Unable to retrieve some image pull secrets (pul); attempting to pull the image may not succeed.",
        Reason.IMAGE_PULL_FAILED,
        "the Secrets of imagePullSecrets exist in this namespace",
    ),
    "no image": (
        a_pod(
            waiting("ImagePullBackOff", 'Back-off pulling image "x"'), phase="Pending"
        ),
        "",
        Reason.IMAGE_PULL_FAILED,
        "check the stage's image",
    ),
    "no secret": (
        a_pod(
            waiting("CreateContainerConfigError", 'secret "keys" not found'),
            phase="Pending",
        ),
        "",
        Reason.SECRET_NOT_FOUND,
        "remove it from the stage's pod.envFrom and pod.env",
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
        f"run `kubectl delete job {JOB}` and then `kubectl delete pod {JOB}-xyz --force`",
    ),
}


@pytest.mark.parametrize(
    ("pod", "warning", "reason", "text"), BLOCKERS.values(), ids=BLOCKERS
)
def test_blocker_has_the_reason_and_names_the_fix(pod, warning, reason, text):
    warnings = {pod["metadata"]["name"] if pod else JOB: warning}
    job = observed_job(
        JOB, a_job(), [ObservedPod(pod)] if pod else [], NOW, warnings=warnings
    )
    assert job.blocker
    assert job.blocker.reason is reason
    assert text in job.blocker.message


def test_starting_pod_has_no_blocker():
    assert (
        observed_job(
            JOB,
            a_job(),
            [ObservedPod(a_pod(waiting("ContainerCreating"), phase="Pending"))],
            NOW,
        ).blocker
        is None
    )
    assert (
        observed_job(JOB, a_job(), [ObservedPod(a_pod(running()))], NOW).blocker is None
    )


def test_pod_that_no_scheduler_takes_names_the_scheduler():
    pod = a_pod(None, phase="Pending")
    pod["spec"] = {"schedulerName": "volcanoo", "containers": []}
    taken = ObservedPod(trim_pod(pod))
    early = NOW - timedelta(minutes=18, seconds=1)
    assert observed_job(JOB, a_job(), [taken], early).blocker is None
    blocker = observed_job(JOB, a_job(), [taken], NOW).blocker
    assert blocker
    assert blocker.reason is Reason.DEPENDENCY_NOT_READY
    assert "the scheduler volcanoo has not looked at the pod" in blocker.message
    assert "correct the stage's schedulerName" in blocker.message


def test_job_that_a_finalizer_keeps_is_named():
    """Such as the Workload of a queue that is not installed any more."""
    job = a_job(**DELETED)
    soon = datetime(2030, 1, 1, 0, 12, tzinfo=UTC)
    assert observed_job(JOB, job, [], soon).blocker is None
    blocker = observed_job(JOB, job, [], NOW).blocker
    assert blocker
    assert blocker.reason is Reason.DEPENDENCY_NOT_READY
    assert f"a finalizer of the Job {JOB}" in blocker.message
    running_still = [ObservedPod(a_pod(running()))]
    assert observed_job(JOB, job, running_still, NOW).blocker is None


def test_job_without_pods_names_its_controller():
    early = datetime(2030, 1, 1, 0, 1, tzinfo=UTC)
    assert observed_job(JOB, a_job(), [], early).blocker is None
    blocker = observed_job(JOB, a_job(), [], NOW).blocker
    assert blocker
    assert blocker.reason is Reason.DEPENDENCY_NOT_READY
    assert "whether the Job controller runs" in blocker.message
    resumed = {"type": "Suspended", "status": "False", "lastTransitionTime": ENDED}
    soon = datetime(2030, 1, 1, 0, 11, tzinfo=UTC)
    assert observed_job(JOB, a_job(resumed), [], soon).blocker is None


def test_terminating_pod_in_its_grace_period_has_no_blocker():
    soon = (NOW + timedelta(seconds=10)).isoformat()
    assert (
        observed_job(
            JOB, a_job(), [ObservedPod(a_pod(running(), deletionTimestamp=soon))], NOW
        ).blocker
        is None
    )
