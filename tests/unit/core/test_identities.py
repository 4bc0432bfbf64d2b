"""What is to be made has the same name for as long as it is the same."""

import json
from pathlib import Path

from support.scenario import Scenario

from finetune_operator.api.stages.train import Train
from finetune_operator.core.identity import identity_of
from finetune_trainer.contract import RESULTS_VERSION, configs, recipes
from finetune_trainer.contract.recipes import ContractModel

DEFAULTS = Path(__file__).parents[2] / "data" / f"defaults-of-results-{RESULTS_VERSION}.json"


class LaterRecipe(recipes.TrainRecipe):
    """The recipe of a later version, which knows one field more."""

    sharpness: float = 0.5


class LaterConfig(configs.TrainConfig):
    recipe: LaterRecipe


def later(config: configs.TrainConfig, **more: float) -> LaterConfig:
    said = config.model_dump()
    return LaterConfig.model_validate({**said, "recipe": {**said["recipe"], **more}})


def training() -> tuple[Train, configs.TrainConfig]:
    scenario = Scenario().run("prepare").reconcile_until_stable()
    config = configs.parse_config(scenario.cluster.jobs[scenario.attempt("train").job].template.env["FINETUNE_CONFIG"])
    assert isinstance(config, configs.TrainConfig)
    return scenario.spec.train, config


def test_a_field_that_a_later_version_adds_makes_nothing_anew_until_it_is_used():
    spec, config = training()
    now = identity_of(spec, config, {})
    assert identity_of(spec, later(config), {}) == now
    assert identity_of(spec, later(config, sharpness=0.7), {}) != now


def test_saying_what_is_the_default_anyway_makes_nothing_anew():
    plain, explicit = Scenario(), Scenario()
    explicit.edit(train={"lora": {"rank": 16}}, prepare={"tooLong": "truncate"})
    assert (
        plain.reconcile_until_stable().stage("prepare").identity
        == explicit.reconcile_until_stable().stage("prepare").identity
    )


def test_a_default_that_changes_is_another_version_of_the_results():
    """Where this fails: raise RESULTS_VERSION if a default has changed; a new field is only added to the file."""
    known = {
        f"{kind.__name__}.{name}": repr(field.get_default(call_default_factory=True))
        for module in (recipes, configs)
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, ContractModel) and kind.__module__ == module.__name__
        for name, field in kind.model_fields.items()
        if not field.is_required()
    }
    assert known == json.loads(DEFAULTS.read_text())
