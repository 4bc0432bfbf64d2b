"""The dropout of LoRA's inputs on a CPU."""

import math

import pytest
import torch
from support.trainer.training import train_config
from torch.utils.checkpoint import checkpoint

from finetune_trainer.models.base_model import BaseModel
from finetune_trainer.training.methods.registry import load_trainable
from finetune_trainer.training.model.dropout import Dropout
from finetune_trainer.training.model.model import TrainedModel

ELEMENTS = 400_003  # no multiple of the numbers in a draw


@pytest.mark.parametrize("probability", [0.0, 0.05, 0.5, 0.99999])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_share_of_zeros_and_mean_are_those_of_the_probability(probability, dtype):
    torch.manual_seed(0)
    output = Dropout(probability)(torch.ones(ELEMENTS, dtype=dtype))
    deviation = math.sqrt(probability * (1 - probability) / ELEMENTS)
    assert float((output == 0).double().mean()) == pytest.approx(
        probability, abs=5 * deviation + 2**-16
    )
    [factor] = output[output != 0].unique().tolist() or [1.0]
    if probability < 0.99:
        assert factor == pytest.approx(
            1 / (1 - probability), rel=0.01 if dtype is torch.bfloat16 else 1e-4
        )


def test_neighbours_are_dropped_independently():
    """Four neighbours are parts of one draw."""
    torch.manual_seed(0)
    dropped = (Dropout(0.5)(torch.ones(100_000, 4)) == 0).double()
    correlation = torch.corrcoef(dropped.T) - torch.eye(4)
    assert float(correlation.abs().max()) < 5 / math.sqrt(100_000)


def test_seed_of_pytorch_decides_what_is_dropped():
    dropout = Dropout(0.5)
    values = torch.ones(1000)

    def of(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return torch.cat([dropout(values), dropout(values)])

    first = of(1)
    again = of(1)
    other = of(2)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first[:1000], first[1000:])


def test_forward_pass_computed_again_drops_the_same():
    torch.manual_seed(0)
    weights = torch.ones(1000, requires_grad=True)
    output = checkpoint(Dropout(0.5), weights, use_reentrant=False)
    output.sum().backward()
    assert torch.equal(weights.grad, output.detach())


def test_evaluation_drops_nothing():
    values = torch.ones(1000)
    assert torch.equal(Dropout(0.5).eval()(values), values)


def test_lora_layers_of_a_trained_model_have_it(tiny_model):
    config = train_config(tiny_model, lora={"rank": 4, "dropout": 0.25})
    trainable = load_trainable(
        BaseModel("model", tiny_model, ""), config, torch.device("cpu")
    )
    model = TrainedModel(trainable, torch.device("cpu"), config.recipe).model
    dropouts = [
        module
        for module in model.modules()
        if isinstance(module, torch.nn.Dropout) and module.p
    ]
    assert dropouts
    assert {(type(module), module.p) for module in dropouts} == {(Dropout, 0.25)}
