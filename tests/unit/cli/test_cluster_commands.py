"""The commands logs, plan, retry, cancel, suspend, resume and wait against a fake API server."""

import json

import pytest
from support.cli_session import TRAIN, interrupt_training, run_when
from support.scenario import ALL_STAGES, Scenario, a_pipeline, scores

STAGES = ("prepare", "train", "evaluate", "push", "deploy")


# logs


def test_logs_print_the_newest_or_the_selected_attempt(cli, scenario):
    interrupt_training(scenario)
    cli.api.logs = {f"{TRAIN}1": ["one", "", "  indented"], f"{TRAIN}2": ["two"]}
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
    assert result.err == "attempt 1 has not started: WaitingForCapacity: 0/3 nodes are available\n"


def test_follow_continues_with_the_next_attempt_until_stage_ends(cli, scenario):
    first = scenario.run("prepare").start("train")
    cli.api.logs = {first: ["step 1"], f"{TRAIN}2": ["step 2"]}

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
    cli.api.kubelet_messages = {job: "unable to retrieve container logs for containerd://c356"}
    run_when(
        lambda: sum("/log?" in path for path in cli.api.requests) > 1,
        lambda: scenario.complete("train"),
    )
    result = cli.run("logs", "-f", "demo", "train")
    assert (result.code, result.out) == (0, "one\n")
    assert "unable to retrieve container logs for containerd://c356\n" in result.err


def test_follow_starts_with_the_newest_attempt(cli, scenario):
    interrupt_training(scenario)
    cli.api.logs = {f"{TRAIN}1": ["one"], f"{TRAIN}2": ["two"]}
    run_when(
        lambda: any("/log?" in path for path in cli.api.requests),
        lambda: scenario.complete("train"),
    )
    assert cli.run("logs", "-f", "demo", "train").out == "two\n"


def test_follow_of_one_attempt_ends_with_the_attempt(cli, scenario):
    interrupt_training(scenario)
    cli.api.logs = {f"{TRAIN}1": ["one"]}
    assert cli.run("logs", "-f", "demo", "train", "--attempt", "1").out == "one\n"


# plan


@pytest.mark.parametrize(
    "edit",
    [
        {},
        {"seed": 1},
        {"train": {"lora": {"rank": 8}}},
        {"train": {"pod": {"resources": {"limits": {"memory": "8Gi"}}}}},
        {"evaluate": {"gates": [{"task": "exam", "value": 0.9}]}},
        {"evaluate": {"tasks": [{"name": "exam", "fewShot": 2}]}},
        {"push": {"targets": [{"uri": "pvc://models/other"}]}},
        {"deploy": None, "push": None},
        {"suspend": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("until", ["train", "deploy", None])
def test_plan_predicts_the_effect_of_applying(cli, scenario, edit, until):
    """The planned stages run with the planned identities; no other stage runs."""
    scenario.run_before(until) if until else scenario.finish()
    planned = cli.plan(cli.write(**edit), "-n", "team")
    assert scenario.generation == 1, "a dry run changes nothing"
    before = len(scenario.created_jobs)
    running = scenario.running
    scenario.edit(**edit).finish()
    ran = {name.rpartition("-a")[0] for name in scenario.created_jobs[before:]} | (
        {running} if running else set()
    )
    stopped = {running} if edit.get("suspend") and running else set()
    wanted = {name for name, stage in planned.items() if stage["action"] in {"run", "resume"}}
    skipped = {name for name, state in scenario.states.items() if state == "Skipped"}
    assert ran - skipped - stopped == wanted - skipped
    assert {name: scenario.stage(name).identity for name in wanted - skipped} == {
        name: planned[name]["identity"] for name in wanted - skipped
    }


def test_plan_reports_the_reason_of_each_action(cli, scenario):
    interrupt_training(scenario)
    file = cli.write(train={"pod": {"resources": {"limits": {"memory": "8Gi"}}}})
    train = cli.plan(file, "-n", "team")["train"]
    assert train["action"] == "resume"
    assert (
        "spec.train.pod.resources.limits.memory: absent → 8Gi; resumes from the work of attempt 2"
        in train["why"]
    )
    train = cli.plan(cli.write(train={"lora": {"rank": 8}}), "-n", "team")["train"]
    assert (train["action"], train["why"]) == ("run", "spec.train.lora.rank: 16 → 8")
    stages = cli.plan("demo")
    assert [stages[name]["action"] for name in STAGES] == ["reuse", "run", "run", "run", "run"]
    assert stages["train"]["why"] == "attempt 2 is running"


def test_plan_names_the_edit_that_causes_a_rerun(cli, scenario):
    """A threshold changes no score, so it is no reason to evaluate again; neither are a CPU request and a budget."""
    scenario.finish()
    changes = {"evaluate": {"gates": [{"task": "exam", "value": 0.65}]}, "push": {"maxFailures": 1}}
    train = {"lora": {"rank": 8}, "pod": {"resources": {"requests": {"cpu": "2"}}}}
    stages = cli.plan(cli.write(train=train, **changes), "-n", "team")
    assert {name: stages[name]["why"] for name in STAGES} == {
        "prepare": "already done, took 1m",
        "train": "spec.train.lora.rank: 16 → 8",
        "evaluate": "train runs again",
        "push": "evaluate runs again",
        "deploy": "push runs again",
    }
    datasets = [{**ALL_STAGES["datasets"][0], "revision": "b"}]
    stages = cli.plan(cli.write(seed=1, datasets=datasets), "-n", "team")
    assert stages["prepare"]["why"] == "spec.datasets[0].revision: absent → b, spec.seed: 0 → 1"


def test_plan_tells_that_an_edited_gate_closes(cli, scenario):
    scenario.finish(evaluate=scores(0.7))
    result = cli.run(
        "plan", cli.write(evaluate={"gates": [{"task": "exam", "value": 0.9}]}), "-n", "team"
    )
    assert (
        "a gate is closed, so the exit code is 3: exam acc = 0.7 is not above 0.9; done under an earlier gate: deploy"
        in result.out
    )
    assert "a gate is closed" not in cli.run("plan", cli.write(), "-n", "team").out


def test_plan_counts_rows_tokens_and_steps(cli, scenario):
    assert (
        "records not counted: hf://org/data/train.jsonl is read on the cluster"
        in cli.run("plan", "demo").out
    )
    scenario.run("prepare")
    result = cli.run("plan", cli.write(train={"epochs": 3, "microBatchSize": 8}), "-n", "team")
    assert (
        "data: 100 records, 40 rows of 1,024 tokens and 2 for validation, 40,000 tokens to train on"
        in result.out
    )
    assert "train: 15 steps of 8 rows, 3 epochs" in result.out
    shared = {"accessMode": "ReadWriteMany"}
    wide = cli.run(
        "plan", cli.write(train={"microBatchSize": 4, "nodes": 2}, workspace=shared), "-n", "team"
    )
    assert "train: 2 processes on 2 nodes, a step has 8 rows" in wide.out


def test_plan_counts_pairs_with_objective_dpo(cli, scenario):
    scenario.edit(train={"objective": "DPO"})
    scenario.finish()
    train = {"objective": "DPO", "epochs": 3, "microBatchSize": 8}
    out = cli.run("plan", cli.write(train=train), "-n", "team").out
    assert (
        "data: 100 records, 20 pairs of rows of 1,024 tokens and 1 for validation, 40,000 tokens to train on"
        in out
    )
    assert "train: 8 steps of 8 pairs, 3 epochs" in out


def test_plan_names_objective_and_start_where_they_are_written(cli, scenario):
    scenario.finish()
    train = {"objective": "DPO", "startFrom": {"uri": "pvc://models/sft"}}
    why = cli.plan(cli.write(train=train), "-n", "team")["prepare"]["why"]
    assert (
        why
        == "spec.train.objective: SFT → DPO, spec.train.startFrom: absent → {'uri': 'pvc://models/sft'}"
    )


def test_plan_reuses_an_earlier_result_in_the_workspace(cli, scenario):
    scenario.finish().edit(train={"lora": {"rank": 8}}).run("train")
    train = cli.plan(cli.write(), "-n", "team")["train"]
    assert (train["action"], train["why"]) == (
        "reuse",
        "the result of attempt 1 is in the workspace",
    )


def test_plan_needs_no_permission_to_read_claims(cli, scenario):
    interrupt_training(scenario)
    cli.api.forbidden = {("get", "persistentvolumeclaims")}
    assert cli.plan("demo")["train"]["action"] == "run"


def test_plan_of_a_new_pipeline_runs_every_stage(cli):
    file = cli.write("fresh")
    result = cli.run("plan", file, "-n", "team")
    assert result.out.startswith(
        "team/fresh: would be created\nrun     prepare   not run yet\nrun     train     after prepare"
    )
    assert cli.api.scenarios == {}


def test_plan_removes_fields_that_only_the_last_apply_set(cli, scenario):
    """As `kubectl apply` does: fields that another client has set are kept."""
    scenario.edit(suspend=True)
    file = cli.write()
    key = next(iter(cli.api.scenarios))
    cli.api.last_applied[key] = {"spec": {**ALL_STAGES, "suspend": True}}
    assert cli.plan(file, "-n", "team")["prepare"]["action"] == "run"
    cli.api.last_applied[key] = {
        "spec": ALL_STAGES
    }  # another client has suspended it: kubectl apply keeps that
    assert cli.plan(file, "-n", "team")["prepare"]["why"] == "spec.suspend is true"


def test_plan_uses_the_field_manager_of_the_last_apply(cli, scenario):
    cli.plan(cli.write(), "-n", "team")
    [request] = [path for path in cli.api.requests if path.startswith("PATCH")]
    assert "dryRun=All" in request
    assert "fieldManager=flux" in request


def test_plan_reports_the_error_of_an_admission_webhook(cli, scenario):
    cli.api.admission_error = (
        'admission webhook "costs.corp" denied the request: no GPUs on Fridays'
    )
    result = cli.run("plan", cli.write(), "-n", "team")
    assert (result.code, result.err) == (2, f"finetune: {cli.api.admission_error}\n")


def test_plan_in_a_missing_namespace_is_an_error(cli):
    cli.api.missing_namespaces = {"void"}
    result = cli.run("plan", cli.write(), "-n", "void")
    assert (result.code, result.err) == (2, 'finetune: namespaces "void" not found\n')


# retry, cancel, suspend, resume


def test_suspend_and_resume_patch_spec_suspend(cli, scenario):
    job = scenario.start("prepare")
    assert cli.run("suspend", "demo").code == 0
    assert scenario.cluster.jobs[job].asked_to_stop
    assert "is already suspended" in cli.run("suspend", "demo").out
    scenario.cluster.evict(job, why=None)
    assert scenario.reconcile_until_stable().status.phase == "Suspended"
    assert cli.run("resume", "demo").code == 0
    assert scenario.created_jobs == ["prepare-a1", "prepare-a2"]
    assert "is not suspended" in cli.run("resume", "demo").out


def test_cancelled_pipeline_starts_again_on_retry(cli, scenario):
    job = scenario.start("prepare")
    assert cli.run("cancel", "demo").code == 0
    scenario.cluster.evict(job, why=None)
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
    run_when(lambda: len(cli.api.requests) > 1, lambda: scenario.finish(evaluate=scores(0.7)))
    result = cli.run("wait", "demo", "--for", condition, "--timeout", "1m")
    assert (result.code, result.out) == (0, "team/demo: Succeeded: all requested stages are done\n")
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
        "finetune: team/demo: Running: prepare is queued (not Finished after 1s)\n",
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
    assert (result.code, result.err.startswith("finetune: demo no longer exists")) == (1, True)


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
    conditions = [{**refused, "type": kind, "status": status} for kind, status in kinds.items()]
    marked = {"conditions": conditions, "observedGeneration": stored.generation, "phase": "Failed"}
    stored.status = json.dumps({**json.loads(stored.status), **marked})
    result = cli.run("wait", "demo", "--timeout", "5s")
    assert (result.code, result.out) == (1, "team/demo: Failed: train: nonsense\n")
