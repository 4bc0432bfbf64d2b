"""What the process of evaluate receives."""

import pytest
from pydantic import ValidationError
from support.operator.scenario import Scenario, a_pipeline

from finetune_trainer.contract import EvaluateConfig, PrepareConfig

NO_PUSH = {"push": None, "deploy": None}
ADAPTER_ONLY = {
    "push": {"targets": [{"uri": "pvc://models/adapter", "format": "Adapter"}]},
    "deploy": None,
}
GAIN = {"task": "exam", "value": 0.1, "against": "Base"}


def evaluate_config(**changes) -> EvaluateConfig:
    config = (
        Scenario(a_pipeline(**changes))
        .run("prepare")
        .run("train")
        .reconcile_until_stable()
        .config("evaluate")
    )
    assert isinstance(config, EvaluateConfig)
    return config


@pytest.mark.parametrize(
    ("changes", "weights", "dtype"),
    [
        ({}, "Merged", "BF16"),
        ({"push": {"dtype": "FP16"}}, "Merged", "FP16"),
        ({"evaluate": {"weights": "Adapter"}}, "Adapter", "Auto"),
        (ADAPTER_ONLY, "Adapter", "Auto"),
        (NO_PUSH, "Adapter", "Auto"),
        ({**NO_PUSH, "evaluate": {"weights": "Merged"}}, "Merged", "Auto"),
        ({**NO_PUSH, "train": {"method": "Full"}}, "Merged", "Auto"),
    ],
)
def test_evaluated_model_is_the_one_that_is_pushed(changes, weights, dtype):
    config = evaluate_config(**changes)
    assert config.recipe.weights == weights
    assert config.dtype == dtype


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"train": {"method": "Full", "lora": {"rank": 8}}}, "lora"),
        (
            {"train": {"method": "Full"}, "evaluate": {"weights": "Adapter"}},
            "evaluate.weights",
        ),
        ({"train": {"method": "Full"}, **ADAPTER_ONLY}, "push.targets"),
    ],
)
def test_adapter_of_full_training_is_refused(changes, field):
    with pytest.raises(ValidationError, match=rf"{field}: .*Full trains no adapter"):
        evaluate_config(**changes)


def test_config_names_the_prepare_stage_for_its_records():
    scenario = Scenario().run("prepare").run("train").reconcile_until_stable()
    assert scenario.config("evaluate").prepare == scenario.stage("prepare").identity


@pytest.mark.parametrize(
    ("evaluate", "compares"),
    [
        ({}, False),
        ({"compareWithBase": True}, True),
        ({"gates": [GAIN]}, True),
        ({"gates": [{"task": "exam", "value": 0.6}, GAIN]}, True),
        ({"gates": [{**GAIN, "against": "Value"}]}, False),
    ],
)
def test_gate_against_base_implies_the_comparison(evaluate, compares):
    assert evaluate_config(evaluate=evaluate).recipe.compare_with_base is compares


@pytest.mark.parametrize("template", [{}, {"applyChatTemplate": False}])
def test_turns_without_a_chat_template_are_refused(template):
    with pytest.raises(
        ValidationError,
        match="fewshotAsMultiturn: turns need a chat template: add applyChatTemplate",
    ):
        a_pipeline(evaluate={"fewshotAsMultiturn": True, **template})


@pytest.mark.parametrize(
    "fields",
    [
        {"applyChatTemplate": True, "fewshotAsMultiturn": True},
        {"applyChatTemplate": True, "fewshotAsMultiturn": False},
        {"fewshotAsMultiturn": False},
        {"systemInstruction": "Answer with one word."},
    ],
)
def test_settings_of_the_chat_template_reach_the_process(fields):
    recipe = evaluate_config(evaluate=fields).recipe.model_dump(by_alias=True)
    assert {name: recipe[name] for name in fields} == fields


def test_held_out_gets_rows_and_the_recipe_of_the_training():
    """Without the task, the identities of earlier results stay as they are."""
    assert evaluate_config().training is None
    held_out = {"evaluate": {"tasks": [{"name": "held_out"}], "gates": []}}
    always = {"push": {"when": "Always"}, "deploy": {"when": "Always"}}
    scenario = Scenario(
        a_pipeline(train={"objective": "DPO"}, **held_out, **always)
    ).reconcile_until_stable()
    prepare = scenario.config("prepare")
    assert isinstance(prepare, PrepareConfig)
    assert prepare.held_out
    config = evaluate_config(train={"objective": "DPO"}, **held_out, **always)
    assert config.training
    assert config.training.objective == "DPO"
