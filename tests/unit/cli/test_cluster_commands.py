"""The commands logs, retry, cancel, suspend, resume and wait against a fake API server."""

import json

import pytest
from support.cli.session import TRAIN, interrupt_training, run_when
from support.operator.scenario import Scenario, a_pipeline, scores

STAGES = ("prepare", "train", "evaluate", "push", "deploy")


# logs


def test_logs_print_the_newest_or_the_selected_attempt(cli, scenario):
    interrupt_training(scenario)
    cli.api.logs = {
        f"{TRAIN}1": ["one", "", "  indented"],
        f"{TRAIN}2": ["two"],
    }
    assert cli.run("logs", "demo", "train").out == "two\n"
    first = cli.run("logs", "demo", "train", "--attempt", "1")
    assert (first.code, first.out) == (0, "one\n\n  indented\n")
    assert first.err == f"--- attempt 1: {TRAIN}1\n"


def test_missing_logs_are_reported_with_the_attempts_status(cli, scenario):
    interrupt_training(scenario)
    cli.api.deleted_pods.add(f"{TRAIN}1")
    deleted = cli.run("logs", "demo", "train", "--attempt", "1")
    assert (deleted.code, deleted.out) == (1, "")
    assert (
        "the pod of attempt 1 no longer exists, and its log is lost; its status: attempt 1 on Spot, interrupted"
        in deleted.err
    )
    assert "saved at step 41" in deleted.err
    unknown = cli.run("logs", "demo", "train", "--attempt", "7")
    assert (unknown.code, unknown.err) == (
        2,
        "finetune: train has no attempt 7; its attempts are 1, 2\n",
    )
    none = cli.run("logs", "demo", "deploy")
    assert (none.code, none.err) == (2, "finetune: deploy has no attempts yet\n")


def test_logs_of_a_waiting_pod_report_the_reason(cli, scenario):
    scenario.hold(scenario.attempt("prepare").job, "0/3 nodes are available")
    scenario.reconcile_until_stable()
    result = cli.run("logs", "demo", "prepare")
    assert result.code == 1
    assert (
        result.err
        == "attempt 1 has not started: WaitingForCapacity: 0/3 nodes are available\n"
    )


def test_follow_continues_with_the_next_attempt_until_stage_ends(cli, scenario):
    first = scenario.run("prepare").start("train")
    cli.api.logs = {
        first: ["step 1"],
        f"{TRAIN}2": ["step 2"],
    }

    def evict():
        cli.api.logs[first].append("saving")
        scenario.cluster.evict(first, step=1, saved=1)
        scenario.reconcile_until_stable()
        run_when(lambda: any(f"{TRAIN}2" in path for path in cli.api.requests), finish)

    def finish():
        scenario.start("train")
        run_when(
            lambda: any(f"{TRAIN}2-xyz/log" in path for path in cli.api.requests),
            lambda: scenario.complete("train"),
        )

    run_when(lambda: any("/log?" in path for path in cli.api.requests), evict)
    result = cli.run("logs", "-f", "demo", "train")
    assert (result.code, result.out) == (0, "step 1\nsaving\nstep 2\n")
    assert [line for line in result.err.splitlines() if line.startswith("---")] == [
        f"--- attempt 1: {TRAIN}1",
        f"--- attempt 2: {TRAIN}2",
    ]


def test_follow_after_lost_connection_repeats_no_line(cli, scenario):
    job = scenario.run("prepare").start("train")
    cli.api.logs = {job: ["one", "two", "three"]}
    cli.api.interrupted_logs = [job]
    run_when(
        lambda: sum("/log?" in path for path in cli.api.requests) > 1,
        lambda: scenario.complete("train"),
    )
    result = cli.run("logs", "-f", "demo", "train")
    assert (result.code, result.out) == (0, "one\ntwo\nthree\n")


def test_words_of_the_kubelet_are_no_part_of_a_log(cli, scenario):
    job = scenario.run("prepare").start("train")
    cli.api.logs = {job: ["one"]}
    cli.api.kubelet_messages = {
        job: "unable to retrieve container logs for containerd://c356"
    }
    run_when(
        lambda: sum("/log?" in path for path in cli.api.requests) > 1,
        lambda: scenario.complete("train"),
    )
    result = cli.run("logs", "-f", "demo", "train")
    assert (result.code, result.out) == (0, "one\n")
    assert "unable to retrieve container logs for containerd://c356\n" in result.err


def test_follow_starts_with_the_newest_attempt(cli, scenario):
    interrupt_training(scenario)
    cli.api.logs = {
        f"{TRAIN}1": ["one"],
        f"{TRAIN}2": ["two"],
    }
    run_when(
        lambda: any("/log?" in path for path in cli.api.requests),
        lambda: scenario.complete("train"),
    )
    assert cli.run("logs", "-f", "demo", "train").out == "two\n"


def test_follow_of_one_attempt_ends_with_the_attempt(cli, scenario):
    interrupt_training(scenario)
    cli.api.logs = {f"{TRAIN}1": ["one"]}
    assert cli.run("logs", "-f", "demo", "train", "--attempt", "1").out == "one\n"


# retry, cancel, suspend, resume


def test_suspend_and_resume_patch_spec_suspend(cli, scenario):
    job = scenario.start("prepare")
    assert cli.run("suspend", "demo").code == 0
    assert scenario.cluster.jobs[job].asked_to_stop
    assert "is already suspended" in cli.run("suspend", "demo").out
    scenario.cluster.evict(job, disruption=None)
    assert scenario.reconcile_until_stable().status.phase == "Suspended"
    assert cli.run("resume", "demo").code == 0
    assert scenario.created_jobs == ["prepare-a1", "prepare-a2"]
    assert "is not suspended" in cli.run("resume", "demo").out


def test_cancelled_pipeline_starts_again_on_retry(cli, scenario):
    job = scenario.start("prepare")
    assert cli.run("cancel", "demo").code == 0
    scenario.cluster.evict(job, disruption=None)
    assert scenario.reconcile_until_stable().status.phase == "Cancelled"
    assert "has already finished (Cancelled)" in cli.run("cancel", "demo").out
    result = cli.run("retry", "demo")
    assert (result.code, result.out) == (
        0,
        "team/demo: starts again at prepare, with fresh budgets\n",
    )
    assert scenario.created_jobs == ["prepare-a1", "prepare-a2"]


def test_retry_of_a_succeeded_pipeline_changes_nothing(cli, scenario):
    scenario.finish()
    version = scenario.cluster.pipelines[scenario.key].version
    assert "nothing to start again" in cli.run("retry", "demo").out
    assert scenario.cluster.pipelines[scenario.key].version == version


# wait


@pytest.mark.parametrize("condition", ["Finished", "Ready"])
def test_wait_exit_code_tells_success_gate_and_failure(cli, scenario, condition):
    scenario.start("prepare")
    run_when(
        lambda: len(cli.api.requests) > 1, lambda: scenario.finish(evaluate=scores(0.7))
    )
    result = cli.run("wait", "demo", "--for", condition, "--timeout", "1m")
    assert (result.code, result.out) == (
        0,
        "team/demo: Succeeded: all requested stages are done\n",
    )
    scenario.edit(evaluate={"gates": [{"task": "exam", "value": 0.8}]})
    assert cli.run("wait", "demo", "--for", condition).code == 3
    bad = cli.api.add(Scenario(name="bad").reconcile_until_stable())
    bad.cluster.fail(bad.start("prepare"), 65, "no records")
    bad.reconcile_until_stable()
    failed = cli.run("wait", "bad", "--for", condition)
    assert failed.code == 1
    assert "team/bad: Failed: prepare: no records" in failed.out


def test_wait_ignores_the_status_of_an_older_generation(cli):
    scenario = cli.api.add(
        Scenario(a_pipeline(prepare={"maxFailures": 0})).reconcile_until_stable()
    )
    scenario.cluster.fail(scenario.start("prepare"), 70)
    assert scenario.reconcile_until_stable().status.phase == "Failed"
    scenario.cluster.edit(scenario.key, a_pipeline(prepare={"maxFailures": 1}, seed=1))
    run_when(lambda: len(cli.api.requests) > 1, scenario.finish)
    assert cli.run("wait", "demo").code == 0


def test_wait_timeout_reports_the_current_status(cli, scenario):
    result = cli.run("wait", "demo", "--timeout", "1s")
    assert (result.code, result.err) == (
        1,
        "finetune: team/demo: Pending: prepare is queued (not Finished after 1s)\n",
    )


def test_wait_retries_when_the_api_server_is_unavailable(cli, scenario):
    def make_unavailable():
        cli.api.unavailable = 2
        scenario.finish()

    run_when(lambda: len(cli.api.requests) > 0, make_unavailable)
    assert cli.run("wait", "demo").code == 0


def test_wait_ends_when_the_pipeline_is_deleted(cli, scenario):
    run_when(lambda: len(cli.api.requests) > 0, scenario.cluster.pipelines.clear)
    result = cli.run("wait", "demo")
    assert (result.code, result.err.startswith("finetune: demo no longer exists")) == (
        1,
        True,
    )


def test_wait_fails_when_the_operator_rejects_the_spec(cli, scenario):
    stored = scenario.cluster.pipelines[scenario.key]
    stored.generation += 1
    refused = {
        "reason": "SpecInvalid",
        "message": "train: nonsense",
        "observedGeneration": stored.generation,
    }
    refused["lastTransitionTime"] = "2030-01-01T00:00:00Z"
    kinds = {"Ready": "False", "Stalled": "True", "Finished": "False"}
    conditions = [
        {**refused, "type": kind, "status": status} for kind, status in kinds.items()
    ]
    marked = {
        "conditions": conditions,
        "observedGeneration": stored.generation,
        "phase": "Failed",
    }
    stored.status = json.dumps({**json.loads(stored.status), **marked})
    result = cli.run("wait", "demo", "--timeout", "5s")
    assert (result.code, result.out) == (1, "team/demo: Failed: train: nonsense\n")
