"""`finetune drill` on a fake API server: what it refuses, what it asks, what it evicts and what it reports."""

import io
import json

import pytest
from support.cli.session import TRAIN, run_when

from finetune_operator.core.observation import JobState

POD = f"/api/v1/namespaces/team/pods/{TRAIN}1-xyz"


@pytest.fixture
def training(scenario):
    """The pipeline, with the first attempt of train at step 50 and a checkpoint of step 40."""
    job = scenario.run("prepare").start("train")
    scenario.cluster.progress(
        job, 50, total=100, start_step=0, saved_step=40, step_seconds=2.0
    )
    return scenario.after(100).reconcile_until_stable()


def resume(cli, scenario, *, start: int, step: int):
    """Start the next attempt once its Job was looked at, and let it report a step."""

    def act():
        job = scenario.start("train")
        scenario.cluster.progress(
            job, step, total=100, start_step=start, saved_step=start, step_seconds=2.0
        )
        scenario.reconcile_until_stable()

    run_when(lambda: any(f"/jobs/{TRAIN}2" in path for path in cli.api.requests), act)


def survive(cli, scenario):
    """Answer an eviction with a graceful save at step 52, a kill with the loss of all after step 40; then resume."""

    def end(job, how):
        if how == "evict":
            scenario.cluster.evict(job, step=52, saved=52)
            resume(cli, scenario, start=52, step=53)
        else:
            scenario.cluster.fail(job, 137, disruption="DeletionByPodGC")
            resume(cli, scenario, start=40, step=41)
        scenario.reconcile_until_stable()

    cli.api.on_eviction = end


def changes(cli) -> list[str]:
    """Return the requests that would change something."""
    requests = [
        path.partition("&timeout")[0].partition("?timeout")[0]
        for path in cli.api.requests
    ]
    return [path for path in requests if not path.startswith("GET")]


def test_eviction_is_rehearsed_sent_and_reported(cli, training):
    survive(cli, training)
    result = cli.run("drill", "demo", "--yes", "--json")
    assert result.code == 0, result.err
    report = json.loads(result.out)
    seconds = report.pop("seconds")
    assert report == {
        "pipeline": "team/demo",
        "stage": "train",
        "attempt": 1,
        "kill": False,
        "complete": True,
        "outcome": "Interrupted",
        "step": 50,
        "lastStep": 52,
        "savedStep": 52,
        "lostSteps": 0,
        "lostSeconds": 0.0,
        "nextAttempt": 2,
        "resumedAtStep": 52,
        "nextStep": 53,
    }
    assert 0 <= seconds["durable"] <= seconds["nextJob"] <= seconds["nextStep"] < 15
    eviction = f"POST {POD}/eviction?fieldValidation=Strict"
    assert changes(cli) == [f"{eviction}&dryRun=All", eviction]
    assert (
        "It counts as interruption 1 of 20 (spec.train.maxInterruptions)" in result.err
    )


def test_kill_deletes_without_grace_and_counts_lost_steps(cli, training):
    survive(cli, training)
    result = cli.run("drill", "demo", "train", "--kill", "--yes")
    assert result.code == 0, result.err
    assert "money" not in result.out
    assert (
        "Steps after step 40, the last step known to be saved, may be lost."
        in result.err
    )
    assert result.out.startswith(
        "team/demo: attempt 1 of train was killed at step 50\n"
    )
    assert [
        line.split()[-1] for line in result.out.splitlines() if "steps lost" in line
    ] == ["10"]
    assert training.stage("train").lost_steps == 10
    assert [path.split()[0] for path in changes(cli)] == ["DELETE", "DELETE"]


def test_namespace_flag_and_kill_go_together(cli, training):
    survive(cli, training)
    assert cli.run("drill", "demo", "--kill", "--yes", "-n", "team").code == 0


def test_progress_comes_from_status_where_proxy_is_forbidden(cli, training):
    cli.api.forbidden = {("get", "pods/proxy")}
    survive(cli, training)
    result = cli.run("drill", "demo", "--yes", "--json")
    assert (result.code, json.loads(result.out)["nextStep"]) == (0, 53)
    assert sum("/proxy/" in path for path in cli.api.requests) == 1


def test_missing_right_prints_the_rule_that_grants_it(cli, training):
    cli.api.forbidden = {("create", "pods/eviction"), ("delete", "pods")}
    evict = cli.run("drill", "demo", "--yes")
    kill = cli.run("drill", "demo", "--yes", "--kill")
    assert (evict.code, kill.code) == (1, 1)
    assert (
        "bob may not create pods/eviction in the namespace team; a binding to the ClusterRole edit"
        in evict.err
    )
    assert (
        '- apiGroups: [""]\n  resources: [pods/eviction]\n  verbs: [create]\n'
        in evict.err
    )
    assert '- apiGroups: [""]\n  resources: [pods]\n  verbs: [delete]\n' in kill.err
    assert training.attempt("train").outcome == "Running"


def test_disruption_budget_refuses_before_anything_is_asked(cli, training):
    cli.api.disruption_budgets = [
        "The disruption budget keep needs 1 healthy pods and has 1 currently"
    ]
    refused = cli.run("drill", "demo", "--yes")
    assert refused.code == 1
    assert (
        "a PodDisruptionBudget forbids the eviction: The disruption budget keep needs 1 healthy"
        in refused.err
    )
    assert changes(cli) == [f"POST {POD}/eviction?fieldValidation=Strict&dryRun=All"]


def test_webhook_without_dry_run_does_not_prevent_the_drill(cli, training):
    cli.api.admission_without_dry_run = True
    survive(cli, training)
    assert cli.run("drill", "demo", "--yes").code == 0


def test_exhausted_budget_is_refused_with_its_numbers(cli, training):
    training.edit(train={"maxInterruptions": 0})
    refused = cli.run("drill", "demo", "--yes")
    assert refused.code == 1
    assert (
        "train has had 0 interruptions, and spec.train.maxInterruptions is 0: number 1 would end"
        in refused.err
    )
    assert changes(cli) == []


def test_stage_that_does_not_run_is_refused_with_its_state(cli, scenario):
    scenario.hold(scenario.attempt("prepare").job, "0/3 nodes are available")
    scenario.reconcile_until_stable()
    queued = cli.run("drill", "demo", "--yes")
    later = cli.run("drill", "demo", "train", "--yes")
    assert (queued.code, later.code) == (1, 1)
    assert (
        "prepare is Queued: WaitingForCapacity: 0/3 nodes are available; only a stage"
        in queued.err
    )
    assert "train is Pending" in later.err
    scenario.finish()
    done = cli.run("drill", "demo", "--yes")
    assert (
        done.code,
        "nothing of team/demo runs" in done.err,
        "Succeeded" in done.err,
    ) == (
        1,
        True,
        True,
    )


def test_server_is_refused(cli, scenario):
    scenario.run_before("deploy").start("deploy")
    for arguments in ((), ("deploy",)):
        refused = cli.run("drill", "demo", *arguments, "--yes")
        assert (refused.code, "deploy is a server" in refused.err) == (1, True)


def test_stopping_stage_is_refused(cli, training):
    training.edit(suspend=True)
    refused = cli.run("drill", "demo", "--yes")
    assert (
        refused.code,
        "train is being stopped already (Suspended)" in refused.err,
    ) == (1, True)


def test_pod_that_is_gone_is_refused(cli, training):
    cli.api.deleted_pods.add(f"{TRAIN}1")
    refused = cli.run("drill", "demo", "--yes")
    assert (refused.code, "the pod of attempt 1 does not exist" in refused.err) == (
        1,
        True,
    )


def test_without_terminal_and_yes_nothing_is_evicted(cli, training):
    result = cli.run("drill", "demo")
    assert (result.code, result.out) == (2, "")
    assert "there is no terminal to ask on; add --yes" in result.err
    assert training.attempt("train").outcome == "Running"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("answer", "code"), [("y\n", 0), ("n\n", 1), ("\n", 1), ("", 1)]
)
def test_only_a_yes_on_the_terminal_evicts(cli, training, monkeypatch, answer, code):
    survive(cli, training)
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    result = cli.run("drill", "demo")
    assert result.code == code
    assert ("nothing was evicted" in result.err) == bool(code)
    assert training.stage("train").interruptions == 1 - code


def test_attempt_that_changed_while_asking_is_not_evicted(cli, training, monkeypatch):
    class Slow(Terminal):
        def readline(self, *_):
            training.cluster.evict(f"{TRAIN}1", step=51, saved=51)
            training.reconcile_until_stable().start("train")
            return "y\n"

    monkeypatch.setattr("sys.stdin", Slow())
    result = cli.run("drill", "demo")
    assert (
        result.code,
        "another attempt runs by now; nothing was evicted" in result.err,
    ) == (
        1,
        True,
    )
    assert training.stage("train").interruptions == 1


def test_timeout_reports_what_was_seen_so_far(cli, training):
    def end(job, _how):
        training.cluster.evict(job, step=52, saved=52)
        training.reconcile_until_stable()

    cli.api.on_eviction = end
    result = cli.run("drill", "demo", "--yes", "--timeout", "2s", "--json")
    report = json.loads(result.out)
    assert (result.code, report["complete"]) == (1, False)
    assert report["problem"] == "not over 2 s after the eviction (--timeout)"
    assert report["savedStep"] == 52
    assert set(report["seconds"]) == {"durable", "nextJob"}


def test_ctrl_c_stops_the_watching_only(cli, training, monkeypatch):
    """Without a signal: one that comes late would end the process of the tests."""

    def end(job, _how):
        training.cluster.evict(job, step=52, saved=52)
        training.reconcile_until_stable()

    pauses = iter(range(3))

    async def pause(_seconds):
        if next(pauses, None) is None:
            raise KeyboardInterrupt

    cli.api.on_eviction = end
    monkeypatch.setattr("finetune_cli.drill.conduct.asyncio.sleep", pause)
    result = cli.run("drill", "demo", "--yes")
    assert result.code == 130
    assert "work durable, attempt ended" in result.out
    assert "stopped watching (Ctrl-C): the eviction stands" in result.out
    assert training.stage("train").interruptions == 1


def test_attempt_that_fails_instead_is_a_failed_drill(cli, training):
    def end(job, _how):
        training.run_out_of_memory(job)
        training.reconcile_until_stable()

    cli.api.on_eviction = end
    result = cli.run("drill", "demo", "--yes")
    assert result.code == 1
    assert "the attempt was not interrupted, but failed" in result.out


def test_stage_that_is_done_before_its_first_report_is_over(cli, training):
    def end(job, _how):
        training.cluster.evict(job, step=99, saved=99)
        training.reconcile_until_stable().start("train")
        training.complete("train")

    cli.api.on_eviction = end
    result = cli.run("drill", "demo", "--yes", "--json")
    assert (result.code, json.loads(result.out)["complete"]) == (0, True)


def test_price_in_the_status_is_reported(cli, training):
    def end(job, _how):
        training.cluster.evict(job, step=52, saved=52)
        training.reconcile_until_stable().start("train")
        training.complete("train")

    def priced(key):
        pipeline = unpriced(key)
        pipeline["status"]["costs"] = {"currency": "USD"}
        for stage in pipeline["status"]["stages"]:
            for attempt in stage.get("attempts", ()):
                attempt |= {"price": "0.80", "cost": "0.13", "lostCost": "0.01"}
        return pipeline

    unpriced = cli.api.pipeline
    cli.api.pipeline = priced
    cli.api.on_eviction = end
    result = cli.run("drill", "demo", "--yes")
    assert (
        "money: 0.01 USD lost, 0.13 USD for the attempt, 0.80 USD an hour\n"
        in result.out
    )


def test_running_job_without_process_is_refused(cli, training):
    training.cluster.update_job(f"{TRAIN}1", state=JobState.WAITING)
    refused = cli.run("drill", "demo", "--yes")
    assert (
        refused.code,
        "is Pending, so there is nothing to evict" in refused.err,
    ) == (1, True)


def test_wrong_timeout_and_unknown_pipeline_are_usage_errors(cli, training):
    assert cli.run("drill", "demo", "--yes", "--timeout", "soon").code == 2
    assert cli.run("drill", "dmo", "--yes").err == (
        "finetune: there is no pipeline dmo in the namespace team; did you mean demo?\n"
    )
