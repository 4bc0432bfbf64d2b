"""`finetune drill` on a cluster: what it reports is what happened, and it refuses what the API server would refuse."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.pipelines.driver import SCRIPT, PipelineDriver, pipeline
from e2e.pipelines.terminal import Terminal
from e2e.progress import wait_for_step
from testcluster.errors import TimedOut
from testcluster.kube_namespace import KubeNamespace, until

pytestmark = pytest.mark.usefixtures("operator")
# Serves /progress, which the script of the other tests does not.
SHOW = r"""
mkdir -p /tmp/www; start=$i; httpd -p 8080 -h /tmp/www
show() {
  now=$(date -u +%Y-%m-%dT%H:%M:%SZ)
  printf '{"stage":"train","updatedAt":"%s","step":%s,"total":%s,"startStep":%s,"savedStep":%s,"stepSeconds":0.2}' \
    "$now" "$i" "$STEPS" "$start" "$start" > /tmp/www/new
  mv /tmp/www/new /tmp/www/progress
}
show
"""
AFTER_RESUME = 'echo "$HOSTNAME from $i" >> "$folder/log"\n'
WITH_PROGRESS = SCRIPT.replace(AFTER_RESUME, AFTER_RESUME + SHOW).replace(
    "i=$((i+1)); done", "i=$((i+1)); show; done"
)
SLOW_SAVE = WITH_PROGRESS.replace("trap 'echo", "trap 'sleep 20; echo")
SELECTOR = "finetune.dev/stage=train"


def training(
    namespace: KubeNamespace, name: str, script: str = WITH_PROGRESS
) -> PipelineDriver:
    """Start a pipeline and wait until train has done 20 steps of 0.2 s."""
    pod = {"command": ["sh", "-c", script]}
    driver = PipelineDriver.start(
        namespace, pipeline(name, steps={"train": 900}, train={"pod": pod})
    )
    driver.wait_state("train", "Running")
    wait_for_step(namespace, SELECTOR, 20)
    return driver


def drill(terminal: Terminal, *arguments: str) -> dict[str, Any]:
    """Run a drill that must succeed, and return its report."""
    done = terminal.run(
        "drill", *arguments, "--yes", "--json", "--timeout", "3m", timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_drill_reports_a_graceful_eviction(
    namespace: KubeNamespace, terminal: Terminal
):
    driver = training(namespace, "drilled")
    report = drill(terminal, "drilled")
    driver.until(lambda: "startStep" in driver.stage("train")["attempts"][-1])
    first, second = driver.stage("train")["attempts"]
    assert "EvictionByEvictionAPI" in first["message"]
    assert (report["outcome"], report["lostSteps"], report["complete"]) == (
        "Interrupted",
        0,
        True,
    )
    assert (
        report["savedStep"]
        == first["lastStep"]
        == report["resumedAtStep"]
        == second["startStep"]
        >= report["step"]
    )
    assert report["nextStep"] > report["resumedAtStep"]
    seconds = report["seconds"]
    assert 0 < seconds["durable"] <= seconds["nextJob"] <= seconds["nextStep"] < 60
    assert (driver.status["interruptions"], driver.stage("train")["failures"]) == (1, 0)


def test_kill_loses_what_was_not_saved(namespace: KubeNamespace, terminal: Terminal):
    """The kubelet leaves a pod that is deleted without grace about 2 s, too few for this script to save."""
    driver = training(namespace, "killed", SLOW_SAVE)
    report = drill(terminal, "killed", "train", "--kill")
    first = driver.stage("train")["attempts"][0]
    assert (report["outcome"], report["resumedAtStep"]) == ("Interrupted", 0)
    assert report["lostSteps"] >= report["step"] >= 20
    assert first["outcome"] == "Interrupted"
    assert driver.stage("train")["failures"] == 0


def test_disruption_budget_refuses_the_drill_by_name(
    namespace: KubeNamespace, terminal: Terminal
):
    driver = training(namespace, "guarded")
    selector = {"matchLabels": {"finetune.dev/pipeline": "guarded"}}
    budget = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "keep"},
    }
    namespace.create({**budget, "spec": {"minAvailable": 1, "selector": selector}})
    refused = terminal.run("drill", "guarded", "--yes")
    assert refused.returncode == 1
    assert (
        "a PodDisruptionBudget forbids the eviction: The disruption budget keep"
        in refused.stderr
    )
    assert driver.stage("train")["attempts"][0]["outcome"] == "Running"


def user(namespace: KubeNamespace, terminal: Terminal, name: str) -> Terminal:
    """Create a service account with the ClusterRole `view`, and return its command line."""
    account = f"{namespace.name}:{name}"
    namespace.run("create", "serviceaccount", name)
    namespace.run(
        "create",
        "rolebinding",
        name,
        "--clusterrole=view",
        f"--serviceaccount={account}",
    )
    config = yaml.safe_load(namespace.kube.kubeconfig.read_text())
    config["users"] = [
        {**entry, "user": {"token": token(namespace, name)}}
        for entry in config["users"]
    ]
    file: Path = terminal.folder / f"{name}.kubeconfig"
    file.write_text(yaml.safe_dump(config))
    return replace(terminal, kubeconfig=file)


def token(namespace: KubeNamespace, account: str) -> str:
    return namespace.run("create", "token", account).strip()


def test_printed_rule_is_what_a_viewer_needs(
    namespace: KubeNamespace, terminal: Terminal
):
    driver = training(namespace, "seen")
    viewer = user(namespace, terminal, "viewer")
    refused = viewer.run("drill", "seen", "--yes")
    assert refused.returncode == 1
    assert (
        f"may not create pods/eviction in the namespace {namespace.name}"
        in refused.stderr
    )
    killing = viewer.run("drill", "seen", "--yes", "--kill")
    assert f"may not delete pods in the namespace {namespace.name}" in killing.stderr
    assert driver.stage("train")["attempts"][0]["outcome"] == "Running"

    rules = yaml.safe_load(refused.stderr[refused.stderr.index("- apiGroups") :])
    role = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": {"name": "drill"},
    }
    namespace.create({**role, "rules": rules})
    account = f"{namespace.name}:viewer"
    namespace.run(
        "create", "rolebinding", "drill", "--role=drill", f"--serviceaccount={account}"
    )
    assert (
        drill(viewer, "seen")["lostSteps"] == 0
    )  # the step is the operator's: a viewer may not use the pod's proxy


def test_role_edit_may_drill(namespace: KubeNamespace):
    account = f"system:serviceaccount:{namespace.name}:editor"
    namespace.run(
        "create",
        "rolebinding",
        "editor",
        "--clusterrole=edit",
        f"--serviceaccount={namespace.name}:editor",
    )

    def may(verb: str, resource: str) -> bool:
        try:
            return (
                namespace.run(
                    "auth", "can-i", verb, resource, f"--as={account}"
                ).strip()
                == "yes"
            )
        except TimedOut:  # kubectl exits with 1
            return False

    for verb, resource in (
        ("create", "pods/eviction"),
        ("delete", "pods"),
        ("get", "pods/proxy"),
    ):
        until(partial(may, verb, resource), 30)  # RBAC reads the binding from a cache
