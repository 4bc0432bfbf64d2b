"""The targets of push: several of them, in two formats, and the one that deploy serves."""

import pytest
from pydantic import ValidationError
from support.operator.scenario import Scenario, a_pipeline, scores

ADAPTER = {"uri": "pvc://adapters/demo", "format": "Adapter"}
MERGED = {"uri": "pvc://models/demo"}
BOTH = [ADAPTER, MERGED]


def published(*targets: dict[str, str]) -> dict[str, list[dict[str, object]]]:
    """Return the result of push to these targets, each in a folder of its digest."""
    records = [
        {
            "target": target["uri"],
            "uri": f"{target['uri']}/v1",
            "format": target.get("format", "Merged"),
            "digest": f"sha256:{target.get('format', 'Merged')}",
            "size": 9,
        }
        for target in targets
    ]
    return {"published": records}


def test_all_targets_reach_the_process_and_its_claims():
    scenario = Scenario(a_pipeline(push={"targets": BOTH}, deploy=None)).run_before(
        "push"
    )
    targets = scenario.config("push").recipe.targets
    assert [(target.uri, target.format) for target in targets] == [
        (ADAPTER["uri"], "Adapter"),
        (MERGED["uri"], "Merged"),
    ]
    job = scenario.cluster.jobs[scenario.attempt("push").job]
    assert job.template.written_claims == ("adapters", "models")


def test_deploy_serves_the_merged_target_of_several():
    scenario = Scenario(a_pipeline(push={"targets": BOTH})).finish(
        push=published(*BOTH)
    )
    config = scenario.config("deploy")
    assert (config.model.uri, config.location, config.digest) == (
        "pvc://models/demo",
        "pvc://models/demo/v1",
        "sha256:Merged",
    )
    assert scenario.status.model
    assert scenario.status.model.digest == "sha256:Merged"


@pytest.mark.parametrize(
    "targets",
    [[ADAPTER], [ADAPTER, {**ADAPTER, "uri": "pvc://adapters/other"}]],
    ids=len,
)
def test_deploy_without_a_merged_target_is_refused(targets):
    with pytest.raises(
        ValidationError,
        match=r"deploy: needs a published model: add an entry with format Merged",
    ):
        a_pipeline(push={"targets": targets})
    assert a_pipeline(push={"targets": targets}, deploy=None).push
    assert a_pipeline(push={"targets": [*targets, MERGED]}).deploy


@pytest.mark.parametrize(
    "targets", [[], [MERGED, MERGED], [{"format": "Merged"}]], ids=str
)
def test_no_target_or_the_same_one_twice_is_refused(targets):
    with pytest.raises(ValidationError, match=r"push\.targets"):
        a_pipeline(push={"targets": targets})


def test_adapter_alone_is_the_published_model():
    scenario = Scenario(a_pipeline(push={"targets": [ADAPTER]}, deploy=None)).finish(
        push=published(ADAPTER)
    )
    assert scenario.status.model
    assert (scenario.status.model.uri, scenario.status.model.digest) == (
        "pvc://adapters/demo/v1",
        "sha256:Adapter",
    )


def test_two_targets_are_skipped_below_a_gate():
    spec = a_pipeline(push={"targets": BOTH, "when": "GatesPassed"})
    scenario = Scenario(spec).finish(evaluate=scores(0.1))
    assert scenario.states["push"] == scenario.states["deploy"] == "Skipped"
    assert scenario.status.model is None
