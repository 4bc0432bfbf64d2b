"""Identities change only if the result changes."""

import json
from pathlib import Path

from support.operator.scenario import Scenario

from finetune_trainer.contract import RESULTS_VERSION, configs, datasets, recipes, tasks
from finetune_trainer.contract.models import ContractModel

DEFAULTS = (
    Path(__file__).parents[2] / "data" / f"defaults-of-results-{RESULTS_VERSION}.json"
)


def test_limit_of_silence_is_in_no_identity():
    plain = Scenario()
    limited = Scenario()
    stages = ("prepare", "train", "evaluate", "push", "deploy")
    limited.edit(**{stage: {"maxSilenceSeconds": 0} for stage in stages})
    for scenario in (plain, limited):
        scenario.finish()
    assert {name: stage.identity for name, stage in plain.status.stages.items()} == {
        name: stage.identity for name, stage in limited.status.stages.items()
    }


def test_other_spelling_of_a_number_keeps_the_identity():
    """A client may write a whole number without a point, and an API server shortens it."""
    identities = []
    for spelling in ('{"a": 32.0, "r": 0.0001}', '{"a": 32, "r": 1e-4}'):
        numbers = json.loads(spelling)
        scenario = Scenario()
        scenario.edit(
            train={
                "lora": {"alpha": numbers["a"]},
                "optimizer": {"learningRate": numbers["r"]},
            }
        )
        scenario.finish()
        stages = scenario.status.stages.items()
        identities.append({name: stage.identity for name, stage in stages})
    assert identities[0] == identities[1]


def test_explicit_default_keeps_the_identity():
    plain = Scenario()
    explicit = Scenario()
    explicit.edit(
        train={"lora": {"rank": 16}},
        prepare={"unrendered": "Refuse"},
        validation={"fraction": 0.05},
    )
    for scenario in (plain, explicit):
        scenario.finish()
    assert {name: stage.identity for name, stage in plain.status.stages.items()} == {
        name: stage.identity for name, stage in explicit.status.stages.items()
    }


def test_changed_default_requires_new_results_version():
    """If this fails: raise RESULTS_VERSION for a changed default, or add a new field to the file.

    A default of Checkpoint may change without a new version: it is part of no identity.
    """
    defaults = {
        f"{kind.__name__}.{name}": repr(field.get_default(call_default_factory=True))
        for module in (recipes, datasets, configs, tasks)
        for kind in vars(module).values()
        if isinstance(kind, type)
        and issubclass(kind, ContractModel)
        and kind.__module__ == module.__name__
        for name, field in kind.model_fields.items()
        if not field.is_required()
    }
    assert defaults == json.loads(DEFAULTS.read_text())


def test_pin_of_the_model_reaches_later_stages_and_identities():
    """Nothing may move between prepare and push: the commit that prepare has found is what they load."""
    stages = ("train", "evaluate", "push")
    identities = {}
    for pin in ("commit-1", "commit-2"):
        scenario = Scenario().run("prepare", modelPin=pin).reconcile_until_stable()
        for stage in stages:
            scenario.reconcile_until_stable()
            assert scenario.config(stage).model_pin == pin
            identities[pin, stage] = scenario.attempt(stage).identity
            scenario.run(stage)
    for stage in stages:
        assert identities["commit-1", stage] != identities["commit-2", stage]


def test_form_of_the_records_is_in_no_identity_of_deploy():
    identities = set()
    for conversations in (True, False):
        scenario = Scenario()
        scenario.finish(prepare={"conversations": conversations})
        assert scenario.config("deploy").conversations == conversations
        identities.add(scenario.stage("deploy").identity)
    assert len(identities) == 1


def test_samples_change_how_a_training_runs_and_not_its_identity():
    plain = Scenario()
    sampling = Scenario()
    sampling.edit(train={"samples": {"prompts": ["What is new?"]}})
    for scenario in (plain, sampling):
        scenario.finish()
    assert sampling.config("train").samples
    for stage in ("train", "evaluate", "push", "deploy"):
        assert plain.stage(stage).identity == sampling.stage(stage).identity
    assert plain.stage("train").execution != sampling.stage("train").execution


def test_objective_is_part_of_the_identity_of_prepare():
    plain = Scenario()
    pairs = Scenario()
    pairs.edit(train={"objective": "DPO"})
    for scenario in (plain, pairs):
        scenario.finish()
    assert pairs.config("prepare").objective == "DPO"
    assert plain.stage("prepare").identity != pairs.stage("prepare").identity


def test_written_out_defaults_of_dpo_keep_the_identity():
    absent = Scenario()
    explicit = Scenario()
    other = Scenario()
    absent.edit(train={"objective": "DPO"})
    explicit.edit(train={"objective": "DPO", "dpo": {"beta": 0.1}})
    other.edit(train={"objective": "DPO", "dpo": {"beta": 0.2}})
    for scenario in (absent, explicit, other):
        scenario.finish()
    identities = [
        scenario.stage("train").identity for scenario in (absent, explicit, other)
    ]
    assert identities[0] == identities[1] != identities[2]


START = {"startFrom": {"uri": "pvc://models/sft/latest"}}


def test_content_of_the_adapter_to_start_from_reaches_train():
    """What prepare has found is what train loads, and another content is another training."""
    identities = set()
    for digest in ("sha256:1", "sha256:2"):
        scenario = Scenario()
        scenario.edit(train=START)
        scenario.run(
            "prepare", startDigest=digest, startPin="commit"
        ).reconcile_until_stable()
        assert (
            scenario.config("train").start_digest,
            scenario.config("train").start_pin,
        ) == (
            digest,
            "commit",
        )
        identities.add(scenario.attempt("train").identity)
    assert len(identities) == 2


def test_written_out_settings_of_a_started_adapter_are_others():
    absent = Scenario()
    explicit = Scenario()
    absent.edit(train=START)
    explicit.edit(train=START | {"lora": {"rank": 16}})
    for scenario in (absent, explicit):
        scenario.finish()
    assert explicit.config("train").recipe.lora.rank == 16
    assert absent.stage("train").identity != explicit.stage("train").identity
