"""The ledger of the simulated kubelet notices two pods on one claim, and work that is done twice."""

from support.faults.final_status import comparable
from support.faults.ledger import Ledger
from support.faults.pods import StagePod


def pod(
    name: str, job: str = "demo-0f1e2d3c-train-a1", identity: str = "i1"
) -> StagePod:
    labels = {
        "finetune.dev/stage": "train",
        "finetune.dev/identity": identity,
        "batch.kubernetes.io/job-name": job,
    }
    volumes = [
        {"name": "workspace", "persistentVolumeClaim": {"claimName": "demo-workspace"}}
    ]
    env = [{"name": "VERSION", "value": "7"}]
    return StagePod(
        {
            "metadata": {
                "name": name,
                "namespace": "team",
                "uid": name,
                "labels": labels,
            },
            "spec": {
                "volumes": volumes,
                "containers": [{"name": "stage", "env": env}],
            },
        }
    )


def succeeded(ledger: Ledger, request: StagePod) -> None:
    ledger.start(request)
    ledger.end(request, success=True)
    ledger.keep_result(request)


def test_second_pod_on_a_claim_is_a_problem():
    ledger = Ledger()
    ledger.start(pod("first"))
    ledger.start(pod("second", job="other-1a2b3c4d-train-a1"))
    assert len(ledger.overlaps) == len(ledger.problems("team")) == 1
    assert not ledger.problems("others")


def test_pod_after_the_first_has_ended_is_no_problem():
    ledger = Ledger()
    ledger.start(pod("first"))
    ledger.end(pod("first"), success=False)
    ledger.start(pod("second", job="demo-0f1e2d3c-train-a2"))
    assert not ledger.problems()


def test_repetition_with_a_readable_result_is_a_problem():
    ledger = Ledger()
    succeeded(ledger, pod("first"))
    ledger.start(pod("second", job="demo-0f1e2d3c-train-a2"))
    assert len(ledger.repetitions) == 1


def test_repetition_after_the_result_was_deleted_is_allowed():
    ledger = Ledger()
    succeeded(ledger, pod("first"))
    ledger.drop_result(pod("first"))
    succeeded(ledger, pod("second", job="demo-0f1e2d3c-train-a2"))
    assert not ledger.problems()
    assert ledger.stages_of("team", "demo-0f1e2d3c-") == {"train i1": 2}


def test_versions_of_a_deleted_pod_are_not_readable():
    ledger = Ledger()
    succeeded(ledger, pod("first"))
    assert (
        ledger.readable_in("team")
        == ledger.succeeded_in("team")
        == {("demo-0f1e2d3c-train", "7")}
    )
    ledger.drop_result(pod("first"))
    assert not ledger.readable_in("team")


def test_comparable_status_keeps_what_must_not_differ():
    lost = {
        "outcome": "Interrupted",
        "number": 1,
        "message": "evicted",
        "exitCode": 75,
        "finishedAt": "t",
    }
    ended = {
        "outcome": "Succeeded",
        "number": 2,
        "message": "done",
        "exitCode": 0,
        "job": "demo-0f1e2d3c-train-a2",
    }
    status = {"stages": {"train": {"attempts": [lost, ended]}}}
    [first, second] = comparable(status, "demo", "team", "0f1e2d3c-4b5a")["stages"][
        "train"
    ]["attempts"]
    assert first == {"outcome": "Interrupted", "number": 1}
    assert second == {**ended, "job": "NAME-UID-train-a2"}
