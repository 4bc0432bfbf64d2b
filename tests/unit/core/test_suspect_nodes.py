"""The next attempt avoids a node on which two attempts of the stage have ended; a broken device forbids the node."""

from dataclasses import replace
from typing import Any

import pytest
from support.operator.scenario import Scenario, a_pipeline

from finetune_operator.api.conditions import Reason
from finetune_operator.core.attempts.suspect_nodes import NO_NODES, AvoidedNodes
from finetune_operator.core.job_template import REQUIRED_AFFINITY
from finetune_operator.core.observation import JobState, PodFault
from finetune_operator.core.pipeline import Key, Pipeline
from finetune_operator.kubernetes.resources.affinity import PREFERRED
from finetune_operator.kubernetes.resources.job import build_job
from finetune_trainer.contract import Failure, TerminationMessage

BROKEN: dict[str, Any] = {
    "exit_code": 70,
    "message": TerminationMessage(failure=Failure(message="GPU", device=True)),
}
NO_DEVICE: dict[str, Any] = {
    "fault": PodFault(Reason.DEVICE_FAILED, "Allocate failed", interrupts=True),
    "disruption": "UnexpectedAdmissionError",
}
BUG: dict[str, Any] = {"exit_code": 70}
EVICTED: dict[str, Any] = {"exit_code": 75, "disruption": "evicted"}
NOT_IN = {"key": "metadata.name", "operator": "NotIn"}


def training() -> Scenario:
    return Scenario(a_pipeline(train={"maxFailures": 9})).run("prepare")


def end_on(scenario: Scenario, node: str, failed_node: str = "", **facts: Any) -> None:
    """End the attempt of train on a node, and wait until the next attempt is there."""
    job = scenario.start("train")
    scenario.cluster.update_job(
        job,
        node=node,
        failed_node=failed_node or node,
        state=JobState.FAILED,
        finished_at=scenario.cluster.now,
        **facts,
    )
    scenario.reconcile_until_stable().after(700).reconcile_until_stable()


def avoided(scenario: Scenario) -> AvoidedNodes:
    """Return the nodes that the newest attempt of train avoids."""
    return scenario.cluster.jobs[scenario.attempt("train").job].template.avoided_nodes


@pytest.mark.parametrize("facts", [BROKEN, NO_DEVICE], ids=["failed", "not given"])
def test_node_whose_device_fails_twice_is_forbidden(facts):
    scenario = training()
    end_on(scenario, "sick", **facts)
    assert scenario.stage("train").attempts[0].reason is Reason.DEVICE_FAILED
    assert avoided(scenario) is NO_NODES, "once may be bad luck"
    end_on(scenario, "sick", **facts)
    assert avoided(scenario) == AvoidedNodes(faulty=("sick",))


@pytest.mark.parametrize("facts", [BUG, EVICTED], ids=["bug", "eviction"])
def test_node_of_two_other_ends_is_avoided_if_another_is_free(facts):
    """The cause may be the program: on a cluster with a single node, the attempts must go on."""
    scenario = training()
    end_on(scenario, "a", **facts)
    end_on(scenario, "b", **facts)
    assert avoided(scenario) is NO_NODES
    end_on(scenario, "a", **facts)
    assert avoided(scenario) == AvoidedNodes(unlucky=("a",))


def test_node_of_the_pod_that_failed_counts():
    """The other pods of the attempt ran on nodes that are not at fault."""
    scenario = training()
    end_on(scenario, "first", failed_node="sick", **BROKEN)
    end_on(scenario, "other", failed_node="sick", **BROKEN)
    assert avoided(scenario) == AvoidedNodes(faulty=("sick",))


def test_forbidden_node_is_named_while_the_stage_waits():
    scenario = training()
    for _ in range(2):
        end_on(scenario, "sick", **BROKEN)
    scenario.hold(scenario.attempt("train").job, "0/1 nodes are available")
    message = scenario.reconcile_until_stable().stage("train").message
    assert message.startswith("0/1 nodes are available; node sick is avoided")
    assert "finetune.dev/retry" in message


def test_retry_request_permits_the_node_again():
    scenario = training()
    for _ in range(2):
        end_on(scenario, "sick", **BROKEN)
    scenario.edit(suspend=True)
    scenario.cluster.evict(scenario.attempt("train").job, disruption=None)
    scenario.reconcile_until_stable().retry("repaired").edit(suspend=False)
    assert avoided(scenario) is NO_NODES


def affinity_of(nodes: AvoidedNodes, own=None):
    spec = a_pipeline(train={"pod": {"affinity": own or {}}})
    scenario = Scenario(spec).run("prepare")
    template = scenario.cluster.jobs[scenario.attempt("train").job].template
    template = replace(template, avoided_nodes=nodes)
    job = build_job(Pipeline(Key("team", "demo"), "u", 1, spec), template)
    affinity = job["spec"]["template"]["spec"].get("affinity", {})
    return affinity.get("nodeAffinity", {})


def test_pod_keeps_its_own_affinity_beside_the_avoided_nodes():
    zone = {"matchExpressions": [{"key": "zone", "operator": "Exists"}]}
    own = {"nodeAffinity": {REQUIRED_AFFINITY: {"nodeSelectorTerms": [zone]}}}
    affinity = affinity_of(AvoidedNodes(("sick",), ("a", "b")), own)
    fields = [{**NOT_IN, "values": ["sick"]}]
    [term] = affinity[REQUIRED_AFFINITY]["nodeSelectorTerms"]
    assert term["matchFields"] == fields
    assert zone["matchExpressions"][0] in term["matchExpressions"]
    [preferred] = affinity[PREFERRED]
    assert preferred["weight"] == 100
    values = [field["values"] for field in preferred["preference"]["matchFields"]]
    assert values == [["a"], ["b"]]


def test_pod_without_suspects_has_no_preference():
    affinity = affinity_of(NO_NODES)
    assert PREFERRED not in affinity
    terms = affinity.get(REQUIRED_AFFINITY, {}).get("nodeSelectorTerms", [])
    assert all("matchFields" not in term for term in terms)
