"""Odd numbers of a base model's config.json, which transformers takes or fails for without naming the key."""

import json
import re

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from finetune_trainer.models.model_types import TEXT_MODELS
from finetune_trainer.models.requirements import ModelFiles, check_config, check_model
from finetune_trainer.models.rope import rope_problem
from finetune_trainer.models.structure import load_structure
from finetune_trainer.models.token_ids import token_id_problem
from finetune_trainer.runtime.errors import ConfigInvalid

AS_TRAINED = "write the number with which the model was trained"
LLAMA3 = {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ODD = [
    ({"rope_theta": "500000.0"}, "rope_theta of config.json must be a number, it is a text: write 500000.0 without"),
    ({"rope_theta": "large"}, f'must be a number, it is "large": {AS_TRAINED}'),
    ({"rope_theta": 0}, f"must be above 0, it is 0: {AS_TRAINED}"),
    ({"rope_theta": -5.0}, "must be above 0, it is -5.0"),
    ({"rope_theta": float("nan")}, "must be a number, it is NaN"),
    ({"rope_theta": float("inf")}, "must be a number, it is Infinity"),
    ({"rope_theta": True}, "must be a number, it is true"),
    ({"rotary_emb_base": 0}, "rotary_emb_base of config.json must be above 0"),
    ({"text_config": {"rope_local_base_freq": "1"}}, "rope_local_base_freq of config.json must be a number"),
    ({"rope_parameters": {"rope_theta": 0}}, "rope_parameters of config.json is wrong: rope_theta must be above 0"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": -1}}}, "rope_theta must be above 0"),
    ({"rope_scaling": {"type": "linear", "factor": 0.5}}, f"factor must be at least 1, it is 0.5: {AS_TRAINED}"),
    ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor must be a number, it is a text: write 2 without"),
    ({"rope_scaling": {"type": "dynamic"}}, "has the type dynamic and no factor"),
    ({"rope_scaling": {"type": "llama3", "factor": 2.0}}, "has the type llama3 and no low_freq_factor"),
    ({"rope_scaling": {"type": "llama3", **LLAMA3, "high_freq_factor": 1.0}}, "is not above low_freq_factor"),
    ({"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": "32"}}, "beta_fast must be a number"),
    ({"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0}}, "must be at least 1"),
    ({"rope_scaling": {"type": "longrope", "short_factor": 1.0, "long_factor": [2.0]}}, "must be a list of numbers"),
    ({"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [2.0]}}, "write longrope, which is its"),
    ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}, "write default, which computes the same for"),
    ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "trained: default, dynamic, linear, llama3, longrope"),
    ({"rope_scaling": {"short_factor": [1.0], "long_factor": [2.0]}}, 'add "rope_type": longrope'),
    ({"rope_scaling": LLAMA3}, 'add "rope_type": llama3'),
    ({"rope_scaling": {"factor": 2.0}}, 'add "rope_type": linear, dynamic or yarn'),
    ({"eos_token_id": "2"}, 'config.json: eos_token_id has the text "2": write the number 2 without quotes'),
    ({"eos_token_id": [1, "2"]}, "write the number 2 without quotes"),
    ({"eos_token_id": "</s>"}, "write the whole number of the token in tokenizer.json"),
    ({"eos_token_id": 2.0}, "eos_token_id has 2.0, which is no number of a token"),
    ({"bos_token_id": True}, "bos_token_id has true"),
    ({"text_config": {"pad_token_id": "0"}}, "pad_token_id has the text"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "problem"), ODD)
def test_odd_number_is_refused_with_its_key_and_a_fix(changes, problem):
    with pytest.raises(ConfigInvalid, match=re.escape(problem)):
        check_config("m", {"model_type": "llama", **changes})


@pytest.mark.parametrize("value", ["2", [2, "3"]])
def test_text_in_generation_config_is_refused(tiny_model, tmp_path, value):
    """It was published beside the right number, and generation would never have stopped at it."""
    for path in tiny_model.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": value})
    )
    files = ModelFiles.in_folder("m", tmp_path)
    with pytest.raises(
        ConfigInvalid, match=r"^m: generation_config.json: eos_token_id"
    ):
        check_model(files)


@pytest.mark.parametrize(
    ("named", "fixed"),
    [
        ({"type": "su"}, {"type": "longrope"}),
        ({"type": "mrope"}, {"type": "default"}),
    ],
)
def test_fix_of_an_earlier_type_is_read_by_transformers(
    tiny_model, tmp_path, named, fixed
):
    config = json.loads((tiny_model / "config.json").read_text())
    config.pop("rope_parameters", None)
    size = config["hidden_size"] // config["num_attention_heads"] // 2
    factors = {"short_factor": [1.0] * size, "long_factor": [2.0] * size}
    path = tmp_path / "config.json"
    for scaling, is_read in ((named, False), (fixed, True)):
        path.write_text(json.dumps(config | {"rope_scaling": scaling | factors}))
        assert (rope_problem(json.loads(path.read_text())) is None) == is_read
    assert (
        load_structure(tmp_path, "m").config.rope_parameters["rope_type"]
        == fixed["type"]
    )


def test_defaults_of_every_text_model_are_accepted():
    problems = {}
    for model_type in TEXT_MODELS:
        try:
            config = CONFIG_MAPPING[model_type]()
        except StrictDataclassError:
            # Some types have no defaults that pass their own check.
            continue
        settings = json.loads(json.dumps(config.to_dict(), default=str))
        problems[model_type] = rope_problem(settings) or token_id_problem(settings)
    assert len(problems) > 150
    assert set(problems.values()) == {None}
