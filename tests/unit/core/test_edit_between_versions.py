"""An edit while no operator runs, or one that cannot read it: the next version reruns what the edit concerns."""

import json

import pytest
from support.operator.scenario import Scenario, a_pipeline
from support.operator.stored_objects import training

from finetune_operator.core import adoption, identity, report


@pytest.fixture
def upgrade(monkeypatch):
    """A function that makes this program a version with another hash of each spec: it has a new field."""

    def upgrade():
        inputs_of = identity.inputs_of

        def next_inputs_of(spec, config, digests):
            values, _, contents = inputs_of(spec, config, digests).partition("-")
            return f"{values[::-1]}-{contents}"

        monkeypatch.setattr(identity, "inputs_of", next_inputs_of)
        identity._hashed.clear()
        for module in (report, adoption):
            monkeypatch.setattr(module, "release", lambda: "next")

    yield upgrade
    identity._hashed.clear()


def edit(scenario, **stages):
    scenario.spec = a_pipeline(**stages)
    scenario.cluster.edit(scenario.key, scenario.spec)


@pytest.mark.parametrize(
    "stages", [{"push": {"maxFailures": 7}}, {"deploy": {"replicas": 2}}], ids=str
)
def test_edit_that_changes_no_result_reruns_nothing(upgrade, stages):
    scenario = Scenario().finish()
    jobs = list(scenario.created_jobs)
    edit(scenario, **stages)
    upgrade()
    scenario.reconcile_until_stable()
    assert scenario.status.phase == "Succeeded"
    assert scenario.created_jobs == jobs


def test_suspended_training_keeps_its_work(upgrade):
    scenario = training(Scenario())
    before = scenario.stage("train").identity
    edit(scenario, suspend=True)
    upgrade()
    scenario.reconcile_until_stable()
    assert scenario.stage("prepare").result
    assert scenario.stage("train").identity == before


@pytest.mark.parametrize(
    ("stages", "first"),
    [
        ({"train": {"lora": {"rank": 4}}}, "train-a2"),
        ({"seed": 7}, "prepare-a2"),
        ({"train": {"pod": {"command": ["my-trainer"]}}}, "train-a2"),
        ({"evaluate": {"compareWithBase": True}}, "evaluate-a2"),
    ],
    ids=str,
)
def test_edit_of_a_result_reruns_its_stage_and_later_ones(upgrade, stages, first):
    scenario = Scenario().finish()
    count = len(scenario.created_jobs)
    edit(scenario, **stages)
    upgrade()
    scenario.finish()
    assert scenario.created_jobs[count] == first


def test_other_program_is_another_result(upgrade):
    program = {"command": ["my-trainer"], "image": "mine:1"}
    scenario = Scenario(a_pipeline(train={"pod": program})).finish()
    count = len(scenario.created_jobs)
    edit(scenario, train={"pod": program | {"image": "mine:2"}})
    upgrade()
    scenario.finish()
    assert scenario.created_jobs[count] == "train-a2"


def test_other_server_is_started_if_its_pod_was_edited(upgrade):
    scenario = Scenario().finish()
    count = len(scenario.created_jobs)
    edit(scenario, deploy={"pod": {"resources": {"limits": {"memory": "9Gi"}}}})
    upgrade()
    scenario.finish()
    assert scenario.created_jobs[count:] == ["deploy-a2"]


def test_edit_that_an_earlier_version_could_not_read_is_compared(upgrade):
    scenario = Scenario().finish()
    edit(scenario, push={"maxFailures": 7})
    stored = scenario.cluster.pipelines[scenario.key]
    unread = report.unreadable_status(
        "a newer field", stored.generation, scenario.cluster.now, "", stalled=False
    )
    stored.status = json.dumps(json.loads(stored.status) | unread)
    jobs = list(scenario.created_jobs)
    upgrade()
    scenario.reconcile_until_stable()
    assert scenario.created_jobs == jobs
