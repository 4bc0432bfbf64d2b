"""`finetune.dev/adopt`: a published model is the result of a pipeline that a new cluster has never run."""

import pytest
from support.operator.scenario import Scenario, a_pipeline

DIGEST = "sha256:" + "a" * 64
MODEL = f"pvc://models/demo@{DIGEST}"


def adopting(text=MODEL, spec=None):
    """Return a new pipeline with the annotation."""
    scenario = Scenario(spec)
    scenario.cluster.annotate(scenario.key, "finetune.dev/adopt", text)
    return scenario.reconcile_until_stable()


def test_adopted_model_is_served_without_a_training():
    scenario = adopting()
    assert scenario.created_jobs == ["deploy-a1"]
    assert scenario.config("deploy").digest == DIGEST
    assert scenario.finish().created_jobs == ["deploy-a1"]
    assert scenario.status.phase == "Succeeded"
    assert scenario.status.model.digest == DIGEST
    skipped = {scenario.stage(name).state for name in ("prepare", "train", "evaluate")}
    assert skipped == {"Skipped"}


def test_edit_of_an_adopted_pipeline_trains_and_publishes():
    scenario = adopting().finish().edit(seed=7)
    assert scenario.running == "prepare"
    assert scenario.finish().status.model.digest != DIGEST


def test_removed_annotation_keeps_the_adopted_model():
    scenario = adopting().finish()
    stored = scenario.cluster.pipelines[scenario.key]
    stored.annotations.clear()
    stored.version += 1
    assert scenario.reconcile_until_stable().created_jobs == ["deploy-a1"]


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("latest", "must be URI@sha256:DIGEST"),
        ("pvc://models/demo", "must be URI@sha256:DIGEST"),
        (f"pvc://models/other@{DIGEST}", "none of push.targets (pvc://models/demo)"),
        (f"pvc://models/demo2@{DIGEST}", "none of push.targets"),
        (f"pvc://models/demo/../secret@{DIGEST}", "leaves the folder of its target"),
        (f"pvc://models/demo/a/..@{DIGEST}", "remove . and .. from its path"),
        (f"pvc://models/demo/./a@{DIGEST}", "leaves the folder of its target"),
    ],
)
def test_mistake_in_the_annotation_trains_nothing(text, fix):
    scenario = adopting(text).after(1000).reconcile_until_stable()
    assert scenario.created_jobs == []
    assert fix in scenario.stage("prepare").message
    scenario.cluster.annotate(scenario.key, "finetune.dev/adopt", MODEL)
    assert scenario.reconcile_until_stable().created_jobs == ["deploy-a1"]


ADAPTER = {"uri": "pvc://models/adapter", "format": "Adapter"}
INSIDE = {"uri": "pvc://models/demo/adapter", "format": "Adapter"}
MERGED = {"uri": "pvc://models/demo"}
SECOND = {"uri": "pvc://models/copy"}


def serving(*targets, **changes):
    """Return a spec with deploy, unless the changes remove it, and with these targets."""
    return a_pipeline(push={"targets": list(targets)}, **changes)


@pytest.mark.parametrize(
    ("targets", "uri"),
    [
        ((ADAPTER, MERGED), "pvc://models/adapter"),
        ((MERGED, ADAPTER), "pvc://models/adapter/v1"),
        ((MERGED, INSIDE), "pvc://models/demo/adapter"),
        ((INSIDE, MERGED), "pvc://models/demo/adapter"),
    ],
)
def test_adapter_is_not_adopted_for_a_server(targets, uri):
    """No server may start without the digest of the model that it serves."""
    scenario = adopting(f"{uri}@{DIGEST}", serving(*targets))
    assert scenario.created_jobs == []
    assert "deploy serves a merged model" in scenario.stage("prepare").message
    assert scenario.status.model is None


@pytest.mark.parametrize("targets", [(ADAPTER, MERGED, SECOND), (SECOND, MERGED)])
@pytest.mark.parametrize("uri", ["pvc://models/demo", "pvc://models/copy/v1"])
def test_each_merged_target_is_served_by_its_digest(targets, uri):
    scenario = adopting(f"{uri}@{DIGEST}", serving(*targets))
    config = scenario.config("deploy")
    assert config.location == uri
    assert config.digest == DIGEST


def test_adapter_is_adopted_without_a_server():
    spec = serving(ADAPTER, MERGED, deploy=None)
    scenario = adopting(f"{ADAPTER['uri']}@{DIGEST}", spec)
    assert scenario.status.phase == "Succeeded"
    assert scenario.created_jobs == []


def test_pipeline_that_has_begun_keeps_its_own_results():
    scenario = Scenario().run("prepare")
    scenario.cluster.annotate(scenario.key, "finetune.dev/adopt", MODEL)
    assert scenario.finish().created_jobs[1] == "train-a1"


def test_retry_of_an_adopted_pipeline_repeats_the_server_only():
    scenario = adopting()
    scenario.cluster.fail(scenario.start("deploy"), 66, "there is no model")
    scenario.reconcile_until_stable().retry("1")
    assert scenario.created_jobs == ["deploy-a1", "deploy-a2"]
