"""The command plan against a fake API server: what applying a manifest would do."""

import pytest
from support.cli.session import interrupt_training
from support.operator.scenario import ALL_STAGES, scores

STAGES = ("prepare", "train", "evaluate", "push", "deploy")


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
    wanted = {
        name for name, stage in planned.items() if stage["action"] in {"run", "resume"}
    }
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
    assert train["action"] == "run"
    assert train["why"] == "spec.train.lora.rank: 16 → 8"
    stages = cli.plan("demo")
    assert [stages[name]["action"] for name in STAGES] == [
        "reuse",
        "run",
        "run",
        "run",
        "run",
    ]
    assert stages["train"]["why"] == "attempt 2 is running"


def test_plan_names_the_edit_that_causes_a_rerun(cli, scenario):
    """A threshold changes no score, so it is no reason to evaluate again; neither are a CPU request and a budget."""
    scenario.finish()
    changes = {
        "evaluate": {"gates": [{"task": "exam", "value": 0.65}]},
        "push": {"maxFailures": 1},
    }
    train = {
        "lora": {"rank": 8},
        "pod": {"resources": {"requests": {"cpu": "2"}}},
    }
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
    assert (
        stages["prepare"]["why"]
        == "spec.datasets[0].revision: absent → b, spec.seed: 0 → 1"
    )


def test_plan_tells_that_an_edited_gate_closes(cli, scenario):
    scenario.finish(evaluate=scores(0.7))
    result = cli.run(
        "plan",
        cli.write(evaluate={"gates": [{"task": "exam", "value": 0.9}]}),
        "-n",
        "team",
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
    result = cli.run(
        "plan", cli.write(train={"epochs": 3, "microBatchSize": 8}), "-n", "team"
    )
    assert (
        "data: 100 records, 40 rows of 1,024 tokens and 2 for validation, 40,000 tokens to train on"
        in result.out
    )
    assert "train: 15 steps of 8 rows, 3 epochs" in result.out
    shared = {"accessMode": "ReadWriteMany"}
    wide = cli.run(
        "plan",
        cli.write(train={"microBatchSize": 4, "nodes": 2}, workspace=shared),
        "-n",
        "team",
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
    assert "learning rate 0.0002 is far above the usual rates of DPO" in out
    assert "train: time not known" in out


def test_plan_names_objective_and_start_where_they_are_written(cli, scenario):
    scenario.finish()
    train = {"objective": "DPO", "startFrom": {"uri": "pvc://models/sft"}}
    reason = cli.plan(cli.write(train=train), "-n", "team")["prepare"]["why"]
    assert (
        reason
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
