"""The command line against an API server: what it shows, which pipeline it means, and what it says of what is wrong."""

import json
import subprocess
import sys

import pytest
from support.cli_session import TRAIN, interrupted, once
from support.scenario import Scenario, scores

from finetune_cli.__main__ import COMMANDS
from finetune_operator.core.pipeline import Key
from finetune_operator.local.pipeline_file import PipelineFile

# get


def test_get_draws_stages_attempts_and_pods(terminal, scenario):
    interrupted(scenario)
    terminal.api.nodes[f"{TRAIN}1"] = "spot-7"
    said = terminal.do("get", "demo")
    assert said.code == 0
    for words in (
        "team/demo  Running",
        "60/100  loss 0.512  1,024 tok/s  9 s left",
        "attempt 1, interrupted at 41; exit code 75; evicted",
        "0 steps lost",
        f"pod {TRAIN}1-xyz on spot-7: Failed",
        "attempt 2 resumed at 41",
        f"pod {TRAIN}2-xyz on spot-1: Running",
        "evaluate  pending  waits for train",
    ):
        assert words in said.out, said.out
    order = ("prepare", "train", "evaluate", "push", "deploy")
    assert sorted(order, key=lambda stage: said.out.index(f" {stage} ")) == list(order)


def test_get_says_at_length_why_a_stage_waits(terminal, scenario):
    why = "0/3 nodes are available: " + "3 node(s) had untolerated taint(s), " * 9 + "and the end"
    scenario.hold(scenario.attempt("prepare").job, why)
    scenario.reconcile_until_stable()
    said = terminal.do("get", "demo")
    assert f"queued  WaitingForCapacity: {why}" in said.out
    assert "on no node yet: Pending" in said.out


def test_get_tells_the_gate_the_model_and_the_endpoint_that_others_can_reach(terminal, scenario):
    scenario.finish(evaluate=scores(0.7, 0.02), deploy={"longRunning": True})
    said = terminal.do("get", "demo")
    assert "gate open: " in said.out
    assert "model pvc://models/demo  sha256:push" in said.out
    assert "endpoint http://demo/v1" in said.out
    other = terminal.api.add(Scenario(name="own").reconcile_until_stable())
    other.finish(deploy={"url": "http://127.0.0.1:8000/v1"})
    assert "endpoint" not in terminal.do("get", "own").out


def test_get_says_which_pods_are_gone(terminal, scenario):
    interrupted(scenario)
    terminal.api.gone.add(f"{TRAIN}1")
    assert f"job {TRAIN}1: no pod" in terminal.do("get", "demo").out


def test_get_without_a_name_lists_the_namespace_or_all(terminal, scenario):
    scenario.run("prepare").start("train")
    terminal.api.add(Scenario(name="other"), "elsewhere").reconcile_until_stable()
    listed = [line.split() for line in terminal.do("get").out.splitlines()]
    assert listed == [
        ["NAME", "PHASE", "STAGE", "PROGRESS", "ATTEMPT", "REASON"],
        ["demo", "Running", "train", "1", "Progressing"],
    ]
    everywhere = terminal.do("get", "-A").out.splitlines()
    assert [line.split()[:2] for line in everywhere[1:]] == [["elsewhere", "other"], ["team", "demo"]]
    assert terminal.do("get", "-n", "nowhere").out == "no pipelines in the namespace nowhere\n"
    items = json.loads(terminal.do("get", "-A", "--json").out)["items"]
    assert [item["metadata"]["name"] for item in items] == ["other", "demo"]


def test_get_json_is_the_object(terminal, scenario):
    found = json.loads(terminal.do("get", "demo", "--json").out)
    assert found["spec"] == scenario.spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    assert found["status"]["phase"] == scenario.status.phase
    assert "managedFields" not in found["metadata"]


def test_get_watch_draws_until_the_end_and_says_in_its_code_how_that_was(terminal, scenario):
    scenario.start("prepare")
    once(lambda: len(terminal.api.asked) > 3, lambda: scenario.finish(evaluate=scores(0.5)))
    said = terminal.do("get", "-w", "demo")
    assert said.code == 3
    assert said.out.index("prepare   starting") < said.out.index("team/demo  BelowThreshold")


# Which pipeline is meant.


def test_a_name_is_on_the_cluster_and_a_file_on_this_machine_unless_the_cluster_is_named(terminal, scenario):
    file = terminal.write()
    assert "team/demo" in terminal.do("get", "demo").out
    here = terminal.do("get", file)
    assert (here.code, terminal.do("get", file, "-n", "team").code) == (2, 0)
    assert ".finetune/demo holds no run" in here.err
    assert "team/demo" in terminal.do("get", file, "--context", "here").out


def test_get_without_a_name_shows_the_only_run_on_this_machine_if_there_is_one(terminal, scenario):
    PipelineFile(terminal.folder / ".finetune" / "mine").apply(Key("default", "mine"), scenario.spec, {})
    assert terminal.do("get").out.startswith("mine  Pending")
    assert "team/demo" in terminal.do("get", "demo").out
    assert terminal.do("get", "-n", "team").out.startswith("NAME")


def test_the_namespace_is_the_given_one_else_the_manifests_else_the_contexts(terminal, scenario):
    terminal.api.add(Scenario().reconcile_until_stable(), "mine")
    terminal.api.add(Scenario().reconcile_until_stable(), "default")
    terminal.write(namespace="mine")
    assert "team/demo" in terminal.do("get", "demo").out
    assert "default/demo" in terminal.do("get", "demo", "--context", "plain").out
    assert "mine/demo" in terminal.do("get", "demo", "-n", "mine").out
    assert "mine/demo" in terminal.do("get", "p.yaml", "--context", "here").out
    differ = terminal.do("get", "p.yaml", "-n", "team")
    assert (differ.code, differ.err) == (2, "finetune: p.yaml is for the namespace mine, and -n says team\n")


def test_what_is_for_the_cluster_only_says_what_to_do_here(terminal):
    file = terminal.write()
    for verb, instead in (
        ("cancel", "Ctrl-C"),
        ("suspend", "Ctrl-C"),
        ("resume", "finetune run"),
        ("wait", "finetune run"),
    ):
        said = terminal.do(verb, file)
        assert said.code == 2
        assert f"add -n or --context for the pipeline of {file} there; on this machine" in said.err
        assert instead in said.err


def test_no_command_of_the_laptop_waits_for_the_clients_import():
    modules = ", ".join(f"finetune_cli.commands.{name}" for name in COMMANDS.values())
    code = f"import sys, {modules}; print([m for m in ('kubernetes', 'aiohttp', 'kopf') if m in sys.modules])"
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}; {code}"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[]\n"


# What goes wrong.


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["get", "dmo"], 2, "there is no pipeline dmo in the namespace team; did you mean demo?"),
        (["get", "xyz"], 2, "there is no pipeline xyz in the namespace team; there are demo"),
        (["get", "demo", "-n", "void"], 2, "in the namespace void, nor any other: choose the namespace with -n"),
        (["get", "a/b"], 2, "'a/b' is no file and no pipeline's name, which must be lower-case letters"),
        (["get", "demo", "-n", "../x"], 2, "--namespace '../x': must be lower-case letters"),
        (["get", "demo", "--context", "her"], 2, "did you mean here?"),
        (["get", "demo", "--context", "xxx"], 2, "there are dead, here, plain, stranger"),
        (["get", "demo", "--context", "dead"], 1, "context dead: the API server does not answer"),
        (["get", "demo", "--context", "stranger"], 1, "the API server does not accept these credentials; log in again"),
        (["get", "demo", "-A"], 2, "-A lists all pipelines"),
        (["get", "-w", "-n", "team"], 2, "give its name"),
        (["get", "demo", "-n", "team", "--workdir", "x"], 2, "--workdir is for a run on this machine"),
        (["retry", "demo", "-n", "team", "--until", "train"], 2, "--until is for a run on this machine"),
        (["plan", "p.yaml", "-n", "team"], 2, "p.yaml: no such file"),
        (["logs", "train", "-n", "team"], 2, "name the pipeline before the stage"),
        (["wait", "demo", "--timeout", "soon"], 2, "write it as 90s, 30m or 1h30m"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_wrong_is_one_clear_line(terminal, scenario, arguments, code, words):
    said = terminal.do(*arguments)
    assert (said.code, said.out) == (code, "")
    assert words in said.err
    assert said.err.count("\n") == 1


def test_what_is_forbidden_is_named(terminal, scenario):
    terminal.api.forbidden = {("list", "pods"), ("patch", "finetunepipelines"), ("list", "finetunepipelines")}
    said = terminal.do("get", "demo")
    assert said.code == 1
    assert "bob may not list pods in the namespace team; a binding to the ClusterRole view allows it" in said.err
    assert "bob may not patch finetunepipelines in the namespace team" in terminal.do("suspend", "demo").err
    assert "ClusterRole edit" in terminal.do("suspend", "demo").err
    assert "bob may not list finetunepipelines in all namespaces" in terminal.do("get", "-A").err


def test_a_cluster_without_the_operator_says_how_to_install_it(terminal):
    terminal.api.installed = False
    for arguments in (["get"], ["get", "demo"], ["plan", terminal.write(), "-n", "team"]):
        said = terminal.do(*arguments)
        assert said.code == 1
        assert "context here: the operator is not installed: helm install finetune-operator" in said.err


def test_without_the_clusters_library_it_is_named():
    code = "sys.modules['kubernetes'] = None; from finetune_cli.__main__ import main; sys.exit(main(['get', 'demo']))"
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}; {code}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert (
        done.stderr == "finetune: a cluster needs one more library: .ci/install operator, in a clone of the project\n"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "no kubeconfig at"),
        ("", "is no kubeconfig"),
        ("[1, 2", "is no kubeconfig"),
        ("just text", "is no kubeconfig"),
        ("{}", "no kubeconfig at"),
        ("contexts: [{name: a, context: {}}]", "has no current context; choose with --context: a"),
        ("{current-context: a, contexts: [{name: a, context: {}}]}", "no credentials for a cluster"),
    ],
)
def test_a_kubeconfig_that_is_of_no_use_is_named(terminal, monkeypatch, text, words):
    file = terminal.folder / "other"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr("kubernetes.aio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(file))
    said = terminal.do("get", "demo")
    assert said.code in {1, 2}
    assert words in said.err
    assert said.err.count("\n") == 1
