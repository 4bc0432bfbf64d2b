"""`finetune get` against a fake API server, the selection of the pipeline, and errors of the cluster."""

import asyncio
import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from support.cli.session import TRAIN, interrupt_training, run_when
from support.operator.fake_api import FakeApi
from support.operator.pods import a_pod
from support.operator.scenario import Scenario, scores

from finetune_cli.__main__ import COMMANDS
from finetune_cli.cluster.pods import list_pods
from finetune_operator.core.pipeline import Key
from finetune_operator.local.pipeline_file import PipelineFile

# get


def test_get_prints_stages_attempts_and_pods(cli, scenario):
    interrupt_training(scenario)
    cli.api.nodes[f"{TRAIN}1"] = "spot-7"
    result = cli.run("get", "demo")
    assert result.code == 0
    for text in (
        "team/demo  Running",
        "60/100  loss 0.512  1,024 tok/s  9s left",
        "attempt 1 on Spot, interrupted at 41; saved and stopped; evicted",
        "0 steps lost",
        f"pod {TRAIN}1-xyz on spot-7: Failed",
        "attempt 2 on Spot resumed at 41",
        f"pod {TRAIN}2-xyz on spot-1: Running",
        "evaluate  pending  waits for train",
    ):
        assert text in result.out, result.out
    order = ("prepare", "train", "evaluate", "push", "deploy")
    assert sorted(order, key=lambda stage: result.out.index(f" {stage} ")) == list(
        order
    )


def test_pod_of_an_attempt_is_the_first_of_several():
    """It has the progress and the result; `finetune get`, `logs` and `drill` use it."""
    api = FakeApi()
    for index, created in ((0, "2030-01-01T00:00:00Z"), (1, "2030-01-01T00:00:01Z")):
        labels = {
            "batch.kubernetes.io/job-name": "job",
            "batch.kubernetes.io/job-completion-index": str(index),
        }
        pod = a_pod(name=f"job-{index}", creationTimestamp=created, labels=labels)
        api.put(f"/api/v1/namespaces/team/pods/job-{index}", pod)
    session: Any = SimpleNamespace(api=api, context=SimpleNamespace(namespace="team"))
    assert asyncio.run(list_pods(session, "job"))["job"].name == "job-0"


def test_get_prints_a_long_waiting_reason_in_full(cli, scenario):
    reason = (
        "0/3 nodes are available: "
        + "3 node(s) had untolerated taint(s), " * 9
        + "and the end"
    )
    scenario.hold(scenario.attempt("prepare").job, reason)
    scenario.reconcile_until_stable()
    result = cli.run("get", "demo")
    assert f"queued  WaitingForCapacity: {reason}" in result.out
    assert "on no node yet: Pending" in result.out


def test_get_prints_gate_model_and_reachable_endpoint(cli, scenario):
    """An endpoint on 127.0.0.1 is reachable from its own pod only and is not printed."""
    scenario.finish(evaluate=scores(0.7, 0.02), deploy={"longRunning": True})
    result = cli.run("get", "demo")
    assert "gate open: " in result.out
    assert "model: pvc://models/demo (sha256:push)" in result.out
    assert "answered 'hello'" in result.out
    assert "endpoint http://demo/v1 inside the cluster" in result.out
    assert "kubectl port-forward -n team service/demo-deploy 8000:80" in result.out
    loopback = cli.api.add(Scenario(name="loopback").reconcile_until_stable())
    loopback.finish(deploy={"url": "http://127.0.0.1:8000/v1"})
    assert "endpoint" not in cli.run("get", "loopback").out


def test_get_marks_attempts_without_a_pod(cli, scenario):
    interrupt_training(scenario)
    cli.api.deleted_pods.add(f"{TRAIN}1")
    assert f"job {TRAIN}1: no pod" in cli.run("get", "demo").out


def test_get_without_a_name_lists_one_or_all_namespaces(cli, scenario):
    scenario.run("prepare").start("train")
    cli.api.add(Scenario(name="other"), "elsewhere").reconcile_until_stable()
    listed = [line.split() for line in cli.run("get").out.splitlines()]
    assert listed[0] == [
        "NAME",
        "PHASE",
        "STAGE",
        "PROGRESS",
        "SCORE",
        "DURATION",
        "AGE",
        "NOTES",
        "REASON",
    ]
    assert (listed[1][:3], listed[1][-1]) == (
        ["demo", "Running", "train"],
        "Progressing",
    )
    assert (
        cli.run("list", "-n", "team").out.splitlines()[0]
        == cli.run("get").out.splitlines()[0]
    )
    all_namespaces = cli.run("get", "-A").out.splitlines()
    assert [line.split()[:2] for line in all_namespaces[1:]] == [
        ["elsewhere", "other"],
        ["team", "demo"],
    ]
    assert (
        cli.run("get", "-n", "nowhere").out == "no pipelines in the namespace nowhere\n"
    )
    items = json.loads(cli.run("get", "-A", "--json").out)["items"]
    assert [item["metadata"]["name"] for item in items] == ["other", "demo"]


def test_get_json_prints_the_object(cli, scenario):
    printed = json.loads(cli.run("get", "demo", "--json").out)
    assert printed["spec"] == scenario.spec.model_dump(
        mode="json", by_alias=True, exclude_none=True
    )
    assert printed["status"]["phase"] == scenario.status.phase
    assert "managedFields" not in printed["metadata"]


def test_get_watch_ends_with_the_pipelines_exit_code(cli, scenario):
    scenario.start("prepare")
    run_when(
        lambda: len(cli.api.requests) > 3, lambda: scenario.finish(evaluate=scores(0.5))
    )
    result = cli.run("get", "-w", "demo")
    assert result.code == 3
    assert result.out.index("prepare   starting") < result.out.index(
        "team/demo  BelowThreshold"
    )
    assert (
        result.out.count("starting") == 1
    )  # without a terminal, time that passes is no change


# Selection of the pipeline.


def test_name_targets_cluster_and_file_targets_this_machine(cli, scenario):
    """With -n or --context, a file too selects a pipeline on the cluster."""
    file = cli.write()
    assert "team/demo" in cli.run("get", "demo").out
    local = cli.run("get", file)
    assert (local.code, cli.run("get", file, "-n", "team").code) == (2, 0)
    assert ".finetune/demo holds no run" in local.err
    assert "team/demo" in cli.run("get", file, "--context", "here").out


def test_get_without_a_name_shows_the_only_local_run(cli, scenario):
    PipelineFile(cli.folder / ".finetune" / "mine").apply(
        Key("default", "mine"), scenario.spec, {}
    )
    assert cli.run("get").out.startswith("mine  Stopped")
    assert cli.run("get", "mine").out.startswith("mine  Stopped")
    assert "team/demo" in cli.run("get", "demo").out
    assert cli.run("get", "-n", "team").out.startswith("NAME")


def test_run_on_this_machine_comes_before_one_on_a_cluster(cli, scenario):
    """With -n or --context, the same name means the pipeline on the cluster."""
    PipelineFile(cli.folder / ".finetune" / "demo").apply(
        Key("default", "demo"), scenario.spec, {}
    )
    assert cli.run("get", "demo").out.startswith("demo  Stopped")
    assert cli.run("get", "demo", "-n", "team").out.startswith("team/demo")
    for verb in ("suspend", "resume", "cancel"):
        assert cli.run(verb, "demo", "-n", "team").out.startswith("team/demo")
    assert cli.run("cancel", "demo").out.startswith("default/demo")


def test_namespace_comes_from_flag_manifest_or_context(cli, scenario):
    """In this order."""
    cli.api.add(Scenario().reconcile_until_stable(), "mine")
    cli.api.add(Scenario().reconcile_until_stable(), "default")
    cli.write(namespace="mine")
    assert "team/demo" in cli.run("get", "demo").out
    assert "default/demo" in cli.run("get", "demo", "--context", "plain").out
    assert "mine/demo" in cli.run("get", "demo", "-n", "mine").out
    assert "mine/demo" in cli.run("get", "p.yaml", "--context", "here").out
    differ = cli.run("get", "p.yaml", "-n", "team")
    assert (differ.code, differ.err) == (
        2,
        "finetune: -n team contradicts metadata.namespace mine in p.yaml; remove or change one\n",
    )


def test_command_modules_do_not_import_the_kubernetes_client():
    modules = ", ".join(f"finetune_cli.commands.{name}" for name in COMMANDS.values())
    code = f"import sys, {modules}; print([m for m in ('kubernetes', 'aiohttp', 'kopf') if m in sys.modules])"
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}; {code}"]
    assert (
        subprocess.run(command, capture_output=True, text=True, check=True).stdout
        == "[]\n"
    )


# Errors.


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            ["get", "dmo"],
            2,
            "there is no pipeline dmo in the namespace team; did you mean demo?",
        ),
        (
            ["get", "xyz"],
            2,
            "there is no pipeline xyz in the namespace team; its pipelines are demo",
        ),
        (
            ["get", "demo", "-n", "void"],
            2,
            "in the namespace void, which has no pipelines; choose another with -n",
        ),
        (
            ["get", "a/b"],
            2,
            "'a/b' is neither a file nor a pipeline's name: a name must consist of lower-case letters",
        ),
        (
            ["get", "demo", "-n", "../x"],
            2,
            "--namespace '../x': must consist of lower-case letters",
        ),
        (["get", "demo", "--context", "her"], 2, "did you mean here?"),
        (
            ["get", "demo", "--context", "xxx"],
            2,
            "its contexts are here, plain, unauthorized, unreachable",
        ),
        (
            ["get", "demo", "--context", "unreachable"],
            1,
            "context unreachable: the API server does not answer",
        ),
        (
            ["get", "demo", "--context", "unauthorized"],
            1,
            "the API server rejects these credentials; log in again",
        ),
        (["get", "demo", "-A"], 2, "-A lists all pipelines"),
        (["get", "-w", "-n", "team"], 2, "give its name"),
        (
            ["get", "demo", "-n", "team", "--workdir", "x"],
            2,
            "--workdir is for a run on this machine",
        ),
        (
            ["retry", "demo", "-n", "team", "--until", "train"],
            2,
            "--until is for a run on this machine",
        ),
        (["plan", "p.yaml", "-n", "team"], 2, "p.yaml: no such file"),
        (["logs", "train", "-n", "team"], 2, "name the pipeline before the stage"),
        (
            ["wait", "demo", "--timeout", "soon"],
            2,
            "must be a duration such as 90s, 30m or 1h30m",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_input_is_reported_in_one_line(cli, scenario, arguments, code, message):
    result = cli.run(*arguments)
    assert (result.code, result.out) == (code, "")
    assert message in result.err
    assert result.err.count("\n") == 1


def test_forbidden_requests_name_verb_resource_and_role(cli, scenario):
    cli.api.forbidden = {
        ("list", "pods"),
        ("patch", "finetunepipelines"),
        ("list", "finetunepipelines"),
    }
    result = cli.run("get", "demo")
    assert result.code == 1
    assert (
        "bob may not list pods in the namespace team; a binding to the ClusterRole view allows it"
        in result.err
    )
    assert (
        "bob may not patch finetunepipelines in the namespace team"
        in cli.run("suspend", "demo").err
    )
    assert "ClusterRole edit" in cli.run("suspend", "demo").err
    assert (
        "bob may not list finetunepipelines in all namespaces"
        in cli.run("get", "-A").err
    )


def test_cluster_without_the_operator_prints_the_helm_command(cli):
    cli.api.installed = False
    for arguments in (["get"], ["get", "demo"], ["plan", cli.write(), "-n", "team"]):
        result = cli.run(*arguments)
        assert result.code == 1
        assert (
            "context here: the operator is not installed; install it with: helm install finetune-operator"
            in result.err
        )


def test_missing_kubernetes_client_is_reported():
    code = "sys.modules['kubernetes'] = None; from finetune_cli.__main__ import main; sys.exit(main(['get', 'demo']))"
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}; {code}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        "finetune: a cluster needs the Kubernetes client library, which is not installed: "
        "pip install 'finetune-operator[operator]'; "
        "the runs on this machine: finetune list\n"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no run demo in ./.finetune"),
        ("", "is not a valid kubeconfig"),
        ("[1, 2", "is not a valid kubeconfig"),
        ("just text", "is not a valid kubeconfig"),
        ("{}", "no run demo in ./.finetune"),
        (
            "contexts: [{name: a, context: {}}]",
            "has no current context; choose one with --context: a",
        ),
        (
            "{current-context: a, contexts: [{name: a, context: {}}]}",
            "no credentials for a cluster",
        ),
    ],
)
def test_unusable_kubeconfig_is_reported(cli, monkeypatch, text, message):
    file = cli.folder / "other"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr(
        "kubernetes.aio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(file)
    )
    result = cli.run("get", "demo")
    assert result.code in {1, 2}
    assert message in result.err
    assert result.err.count("\n") == 1
