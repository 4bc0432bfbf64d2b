"""A base model that would train or be pushed wrongly is refused by the preview, and so by `prepare`."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.trainer.models import prompt_records, write_jsonl

from finetune_trainer.contract import Environment, PrepareConfig
from finetune_trainer.contract.preview import PreviewRequest
from finetune_trainer.models.base_model import BaseModel
from finetune_trainer.preview.preview import preview
from finetune_trainer.runtime.errors import ConfigInvalid
from finetune_trainer.training.requirements import check_model_for


@pytest.fixture
def model(tiny_model, tmp_path):
    """A copy of the tiny model that a test may change."""
    return shutil.copytree(tiny_model, tmp_path / "model")


@pytest.fixture
def config(model, tmp_path):
    """A function that returns a config with these changes."""

    def config(**changes):
        data = write_jsonl(tmp_path / "data.jsonl", prompt_records(20))
        fields = {
            "identity": "a" * 16,
            "model": {"uri": f"file://{model}"},
            "datasets": [{"uri": f"file://{data}"}],
            "recipe": {"contextLength": 64},
        }
        return PrepareConfig.model_validate(fields | changes)

    return config


def problems_of(config, tmp_path) -> dict[str, str]:
    report = preview(PreviewRequest(config=config), Environment(tmp_path / "work"))
    return {problem.field: problem.message for problem in report.problems}


def change_config(model, **changes):
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"factor": 2.0}},
        {"rope_parameters": {"factor": 4.0, "rope_theta": 10000.0}},
        {"rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": {"factor": 2.0}}},
        {"text_config": {"rope_scaling": {"short_factor": [1.0], "long_factor": [2.0]}}},
    ],
)  # fmt: skip
def test_rope_scaling_without_a_type_is_refused(model, config, tmp_path, changes):
    change_config(model, **changes)
    message = problems_of(config(), tmp_path)["model.uri"]
    assert "of config.json has no type, so that it would have no effect" in message


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": None},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_theta": 10000.0}},
        {
            "rope_parameters": {
                "rope_type": "dynamic",
                "factor": 2.0,
                "rope_theta": 10000.0,
            }
        },
    ],
)
def test_rope_scaling_with_a_type_is_accepted(model, config, tmp_path, changes):
    change_config(model, **changes)
    assert problems_of(config(), tmp_path) == {}


def write_large_weight(model):
    path = model / "model.safetensors"
    weights = load_file(path)
    name = min(weights)
    weights[name] = weights[name].float()
    weights[name].view(-1)[0] = 1e5
    save_file(weights, path, metadata={"format": "pt"})


def test_weight_that_push_would_make_infinite_is_refused(model, config, tmp_path):
    write_large_weight(model)
    message = problems_of(config(published_dtype="FP16"), tmp_path)["push.dtype"]
    assert "has a weight of 100000, which is infinite in float16" in message
    assert message.endswith("set push.dtype to BF16")


def test_prepare_refuses_it_before_any_gpu_is_used(model, config):
    write_large_weight(model)
    base = BaseModel("file://model", model, "")
    with pytest.raises(ConfigInvalid, match=r"set push\.dtype to BF16"):
        check_model_for(base, config(published_dtype="FP16"))


@pytest.mark.parametrize("dtype", ["BF16", "FP32", None])
def test_other_types_of_the_published_weights_are_accepted(
    model, config, tmp_path, dtype
):
    write_large_weight(model)
    assert problems_of(config(published_dtype=dtype), tmp_path) == {}


def test_small_weights_are_published_in_half_precision(model, config, tmp_path):
    assert torch.finfo(torch.float16).max > 6e4
    assert problems_of(config(published_dtype="FP16"), tmp_path) == {}
