"""The optimizers: what their states hold, and that a restored one goes on as the other would."""

import importlib.util

import pytest
import torch

from finetune_trainer.contract import Optimizer
from finetune_trainer.runtime.errors import ConfigInvalid
from finetune_trainer.training.optimizer import OPTIMIZERS, create_optimizer

torch.set_num_threads(1)


def parameters():
    generator = torch.Generator().manual_seed(1)
    shapes = {"large": (96, 64), "small": (8, 4), "vector": (5000,), "unused": (3, 3)}
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator))
        for name, shape in shapes.items()
    }


def take_steps(optimizer, trained, steps):
    for step in steps:
        for name, parameter in trained.items():
            if name != "unused":
                parameter.grad = torch.randn(
                    parameter.shape, generator=torch.Generator().manual_seed(step)
                )
        optimizer.step(1e-2)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_restored_optimizer_takes_the_same_steps(name):
    recipe = Optimizer(name=name, weight_decay=0.1)
    whole = parameters()
    copied = parameters()
    optimizer = create_optimizer(recipe, whole)
    take_steps(optimizer, whole, range(3))
    saved = {key: tensor.clone() for key, tensor in optimizer.tensors().items()}
    restored = create_optimizer(recipe, copied)
    for key, parameter in copied.items():
        parameter.data.copy_(whole[key])
    restored.restore(saved)
    take_steps(optimizer, whole, range(3, 6))
    take_steps(restored, copied, range(3, 6))
    assert all(torch.equal(whole[key], copied[key]) for key in whole)
    assert all(
        torch.equal(tensor, restored.tensors()[key])
        for key, tensor in optimizer.tensors().items()
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_layout_is_that_of_the_state_after_a_step(name):
    tensors = parameters()
    optimizer = create_optimizer(Optimizer(name=name), tensors)
    layout = optimizer.layout()
    take_steps(optimizer, tensors, range(1))
    state = optimizer.tensors()
    assert state.keys() == {key for key in layout if not key.startswith("unused")}
    for key, tensor in state.items():
        assert tensor.shape == layout[key].shape
        assert tensor.dtype == layout[key].dtype


def test_moments_of_large_parameters_take_8_bits():
    tensors = parameters()
    optimizer = create_optimizer(Optimizer(name="AdamW8Bit"), tensors)
    take_steps(optimizer, tensors, range(1))
    dtypes = {
        key: tensor.dtype
        for key, tensor in optimizer.tensors().items()
        if key.endswith("state1")
    }
    assert dtypes == {
        "large.state1": torch.uint8,
        "vector.state1": torch.uint8,
        "small.state1": torch.float32,
    }


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_vectors_get_no_weight_decay(name):
    tensors = parameters()
    optimizer = create_optimizer(Optimizer(name=name, weight_decay=0.5), tensors)
    before = {key: parameter.detach().clone() for key, parameter in tensors.items()}
    for parameter in tensors.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(1e-1)
    assert torch.equal(tensors["vector"], before["vector"])
    assert torch.allclose(tensors["large"], before["large"] * 0.95)


def test_missing_bitsandbytes_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(
        ConfigInvalid,
        match=r"AdamW8Bit needs bitsandbytes: pip install 'finetune-operator\[qlora\]'",
    ):
        create_optimizer(Optimizer(name="AdamW8Bit"), parameters())
