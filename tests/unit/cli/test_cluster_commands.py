"""The command line against an API server: it follows, foretells, asks and waits."""

import json

import pytest
from support.cli_session import TRAIN, interrupted, once
from support.scenario import ALL_STAGES, Scenario, a_pipeline, scores

STAGES = ("prepare", "train", "evaluate", "push", "deploy")


# logs


def test_logs_print_the_newest_attempt_or_the_one_that_is_named(terminal, scenario):
    interrupted(scenario)
    terminal.api.logs = {f"{TRAIN}1": ["one", "", "  indented"], f"{TRAIN}2": ["two"]}
    assert terminal.do("logs", "demo", "train").out == "two\n"
    first = terminal.do("logs", "demo", "train", "--attempt", "1")
    assert (first.code, first.out) == (0, "one\n\n  indented\n")
    assert first.err == f"--- attempt 1: {TRAIN}1\n"


def test_logs_that_there_are_not_say_why_and_what_is_known(terminal, scenario):
    interrupted(scenario)
    terminal.api.gone.add(f"{TRAIN}1")
    gone = terminal.do("logs", "demo", "train", "--attempt", "1")
    assert (gone.code, gone.out) == (1, "")
    assert "the pod of attempt 1 is gone, and its log with it; what is known of it: attempt 1, interrupted" in gone.err
    assert "saved at step 41" in gone.err
    never = terminal.do("logs", "demo", "train", "--attempt", "7")
    assert (never.code, never.err) == (2, "finetune: train has no attempt 7: there are 1, 2\n")
    none = terminal.do("logs", "demo", "deploy")
    assert (none.code, none.err) == (2, "finetune: deploy has no attempt: there are none yet\n")


def test_logs_of_a_pod_that_waits_say_what_for(terminal, scenario):
    scenario.hold(scenario.attempt("prepare").job, "0/3 nodes are available")
    scenario.reconcile_until_stable()
    said = terminal.do("logs", "demo", "prepare")
    assert said.code == 1
    assert said.err == "attempt 1 has not started: WaitingForCapacity: 0/3 nodes are available\n"


def test_following_goes_on_with_the_next_attempt_until_the_stage_is_over(terminal, scenario):
    first = scenario.run("prepare").start("train")
    terminal.api.logs = {first: ["step 1"], f"{TRAIN}2": ["step 2"]}

    def evicted():
        terminal.api.logs[first].append("saving")
        scenario.cluster.evict(first, step=1, saved=1)
        scenario.reconcile_until_stable()
        once(lambda: any(f"{TRAIN}2" in path for path in terminal.api.asked), finished)

    def finished():
        scenario.start("train")
        once(
            lambda: any(f"{TRAIN}2-xyz/log" in path for path in terminal.api.asked), lambda: scenario.complete("train")
        )

    once(lambda: any("/log?" in path for path in terminal.api.asked), evicted)
    said = terminal.do("logs", "-f", "demo", "train")
    assert (said.code, said.out) == (0, "step 1\nsaving\nstep 2\n")
    assert [line for line in said.err.splitlines() if line.startswith("---")] == [
        f"--- attempt 1: {TRAIN}1",
        f"--- attempt 2: {TRAIN}2",
    ]


def test_following_survives_a_broken_connection_and_repeats_nothing(terminal, scenario):
    job = scenario.run("prepare").start("train")
    terminal.api.logs = {job: ["one", "two", "three"]}
    terminal.api.cuts = [job]
    once(lambda: sum("/log?" in path for path in terminal.api.asked) > 1, lambda: scenario.complete("train"))
    said = terminal.do("logs", "-f", "demo", "train")
    assert (said.code, said.out) == (0, "one\ntwo\nthree\n")


def test_following_begins_with_the_newest_attempt(terminal, scenario):
    interrupted(scenario)
    terminal.api.logs = {f"{TRAIN}1": ["one"], f"{TRAIN}2": ["two"]}
    once(lambda: any("/log?" in path for path in terminal.api.asked), lambda: scenario.complete("train"))
    assert terminal.do("logs", "-f", "demo", "train").out == "two\n"


def test_following_one_attempt_ends_with_it(terminal, scenario):
    interrupted(scenario)
    terminal.api.logs = {f"{TRAIN}1": ["one"]}
    assert terminal.do("logs", "-f", "demo", "train", "--attempt", "1").out == "one\n"


# plan


@pytest.mark.parametrize(
    "edit",
    [
        {},
        {"seed": 1},
        {"train": {"lora": {"rank": 8}}},
        {"train": {"resources": {"memory": "8Gi"}}},
        {"evaluate": {"gate": {"threshold": 0.9}}},
        {"evaluate": {"tasks": {"exam": {"fewShot": 2}}}},
        {"push": {"target": "pvc://models/other"}},
        {"deploy": None, "push": None},
        {"suspend": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("until", ["train", "deploy", None])
def test_what_plan_foretells_is_what_applying_does(terminal, scenario, edit, until):
    scenario.run_before(until) if until else scenario.finish()
    foretold = terminal.plan(terminal.write(**edit), "-n", "team")
    assert scenario.generation == 1, "a dry run changes nothing"
    before = len(scenario.created_jobs)
    running = scenario.running
    scenario.edit(**edit).finish()
    ran = {name.rpartition("-a")[0] for name in scenario.created_jobs[before:]} | ({running} if running else set())
    stopped = {running} if edit.get("suspend") and running else set()
    wanted = {name for name, stage in foretold.items() if stage["action"] in {"run", "resume"}}
    skipped = {name for name, state in scenario.states.items() if state == "Skipped"}
    assert ran - skipped - stopped == wanted - skipped
    assert {name: scenario.stage(name).identity for name in wanted - skipped} == {
        name: foretold[name]["identity"] for name in wanted - skipped
    }


def test_plan_says_why(terminal, scenario):
    interrupted(scenario)
    file = terminal.write(train={"resources": {"memory": "8Gi"}})
    train = terminal.plan(file, "-n", "team")["train"]
    assert train["action"] == "resume"
    assert "spec.train.resources.memory: absent → 8Gi; goes on from what attempt 2 has kept" in train["why"]
    train = terminal.plan(terminal.write(train={"lora": {"rank": 8}}), "-n", "team")["train"]
    assert (train["action"], train["why"]) == ("run", "spec.train.lora.rank: 16 → 8")
    stages = terminal.plan("demo")
    assert [stages[name]["action"] for name in STAGES] == ["reuse", "run", "run", "run", "run"]
    assert stages["train"]["why"] == "attempt 2 is running"


def test_plan_knows_that_an_earlier_result_is_still_in_the_workspace(terminal, scenario):
    scenario.finish().edit(train={"lora": {"rank": 8}}).run("train")
    train = terminal.plan(terminal.write(), "-n", "team")["train"]
    assert (train["action"], train["why"]) == ("reuse", "attempt 1 made it: its result is in the workspace")


def test_plan_needs_no_right_to_read_claims(terminal, scenario):
    interrupted(scenario)
    terminal.api.forbidden = {("get", "persistentvolumeclaims")}
    assert terminal.plan("demo")["train"]["action"] == "run"


def test_plan_of_a_pipeline_that_is_not_there_yet(terminal):
    file = terminal.write("fresh")
    said = terminal.do("plan", file, "-n", "team")
    assert said.out.startswith(
        "team/fresh: would be created\nrun    prepare   not run yet\nrun    train     after prepare"
    )
    assert terminal.api.scenarios == {}


def test_plan_takes_away_what_was_applied_last_and_is_not_in_the_manifest_any_more(terminal, scenario):
    scenario.edit(suspend=True)
    file = terminal.write()
    key = next(iter(terminal.api.scenarios))
    terminal.api.last_applied[key] = {"spec": {**ALL_STAGES, "suspend": True}}
    assert terminal.plan(file, "-n", "team")["prepare"]["action"] == "run"
    terminal.api.last_applied[key] = {"spec": ALL_STAGES}  # suspended by somebody else: kubectl apply leaves it so
    assert terminal.plan(file, "-n", "team")["prepare"]["why"] == "spec.suspend is true"


def test_plan_applies_as_whoever_applied_it_last_on_the_servers_side(terminal, scenario):
    terminal.plan(terminal.write(), "-n", "team")
    [asked] = [path for path in terminal.api.asked if path.startswith("PATCH")]
    assert "dryRun=All" in asked
    assert "fieldManager=somebody" in asked


def test_plan_lets_admission_speak(terminal, scenario):
    terminal.api.admission = 'admission webhook "costs.corp" denied the request: no GPUs on Fridays'
    said = terminal.do("plan", terminal.write(), "-n", "team")
    assert (said.code, said.err) == (2, f"finetune: {terminal.api.admission}\n")


def test_plan_in_a_namespace_that_is_not_there_says_so(terminal):
    terminal.api.missing = {"void"}
    said = terminal.do("plan", terminal.write(), "-n", "void")
    assert (said.code, said.err) == (2, 'finetune: namespaces "void" not found\n')


# retry, cancel, suspend, resume


def test_suspend_and_resume_change_the_spec(terminal, scenario):
    job = scenario.start("prepare")
    assert terminal.do("suspend", "demo").code == 0
    assert scenario.cluster.jobs[job].asked_to_stop
    assert "is suspended already" in terminal.do("suspend", "demo").out
    scenario.cluster.evict(job, why=None)
    assert scenario.reconcile_until_stable().status.phase == "Suspended"
    assert terminal.do("resume", "demo").code == 0
    assert scenario.created_jobs == ["prepare-a1", "prepare-a2"]
    assert "is not suspended" in terminal.do("resume", "demo").out


def test_cancel_stops_for_good_until_retry(terminal, scenario):
    job = scenario.start("prepare")
    assert terminal.do("cancel", "demo").code == 0
    scenario.cluster.evict(job, why=None)
    assert scenario.reconcile_until_stable().status.phase == "Cancelled"
    assert "has finished already (Cancelled)" in terminal.do("cancel", "demo").out
    said = terminal.do("retry", "demo")
    assert (said.code, said.out) == (0, "team/demo: starts again at prepare, with fresh budgets\n")
    assert scenario.created_jobs == ["prepare-a1", "prepare-a2"]


def test_retry_of_what_did_not_fail_changes_nothing(terminal, scenario):
    scenario.finish()
    version = scenario.cluster.pipelines[scenario.key].version
    assert "nothing to start again" in terminal.do("retry", "demo").out
    assert scenario.cluster.pipelines[scenario.key].version == version


# wait


@pytest.mark.parametrize("condition", ["Finished", "Ready"])
def test_wait_says_in_its_code_how_it_ended(terminal, scenario, condition):
    scenario.start("prepare")
    once(lambda: len(terminal.api.asked) > 1, lambda: scenario.finish(evaluate=scores(0.7)))
    said = terminal.do("wait", "demo", "--for", condition, "--timeout", "1m")
    assert (said.code, said.out) == (0, "team/demo: Succeeded: all that was asked for is done\n")
    scenario.edit(evaluate={"gate": {"threshold": 0.8}})
    assert terminal.do("wait", "demo", "--for", condition).code == 3
    bad = terminal.api.add(Scenario(name="bad").reconcile_until_stable())
    bad.cluster.fail(bad.start("prepare"), 65, "no records")
    bad.reconcile_until_stable()
    failed = terminal.do("wait", "bad", "--for", condition)
    assert failed.code == 1
    assert "team/bad: Failed: prepare: no records" in failed.out


def test_wait_does_not_believe_a_status_that_speaks_of_an_older_spec(terminal):
    scenario = terminal.api.add(Scenario(a_pipeline(prepare={"retries": {"failures": 0}})).reconcile_until_stable())
    scenario.cluster.fail(scenario.start("prepare"), 70)
    assert scenario.reconcile_until_stable().status.phase == "Failed"
    scenario.cluster.edit(scenario.key, a_pipeline(prepare={"retries": {"failures": 1}}, seed=1))
    once(lambda: len(terminal.api.asked) > 1, scenario.finish)
    assert terminal.do("wait", "demo").code == 0


def test_wait_ends_when_its_time_is_up_and_says_how_things_stand(terminal, scenario):
    said = terminal.do("wait", "demo", "--timeout", "1s")
    assert (said.code, said.err) == (1, "finetune: team/demo: Running: prepare is queued (not Finished after 1s)\n")


def test_wait_bears_with_a_server_that_is_away_for_a_moment(terminal, scenario):
    def away():
        terminal.api.busy = 2
        scenario.finish()

    once(lambda: len(terminal.api.asked) > 0, away)
    assert terminal.do("wait", "demo").code == 0


def test_wait_ends_when_the_pipeline_is_deleted(terminal, scenario):
    once(lambda: len(terminal.api.asked) > 0, scenario.cluster.pipelines.clear)
    said = terminal.do("wait", "demo")
    assert (said.code, said.err.startswith("finetune: demo is gone")) == (1, True)


def test_wait_ends_where_the_operator_cannot_use_the_object_as_it_is(terminal, scenario):
    stored = scenario.cluster.pipelines[scenario.key]
    stored.generation += 1  # and the status still speaks of the spec before
    refused = {"reason": "SpecInvalid", "message": "train: nonsense", "observedGeneration": stored.generation}
    refused["lastTransitionTime"] = "2030-01-01T00:00:00Z"
    kinds = {"Ready": "False", "Stalled": "True", "Finished": "False"}
    conditions = [{**refused, "type": kind, "status": status} for kind, status in kinds.items()]
    stored.status = json.dumps({**json.loads(stored.status), "conditions": conditions})
    said = terminal.do("wait", "demo", "--timeout", "5s")
    assert (said.code, said.out) == (1, "team/demo: Running: train: nonsense\n")
