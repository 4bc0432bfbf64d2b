"""LoRA's part of a layer's output: what PEFT computes, to rounding."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from finetune_trainer.training.model.lora_kernels import AddsInPlace, speed_up_lora

WIDTH = 24
HEIGHT = 40


class Model(torch.nn.Module):
    """Two layers with an adapter; the gradient of the first comes through the second."""

    def __init__(self, first: torch.nn.Module, second: torch.nn.Module) -> None:
        super().__init__()
        self.first = first
        self.second = second
        self.config: dict[str, str] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def linear(wide: int, high: int, *, bias: bool = False) -> torch.nn.Module:
    return torch.nn.Linear(wide, high, bias=bias)


def biased(wide: int, high: int) -> torch.nn.Module:
    return linear(wide, high, bias=True)


def conv1d(wide: int, high: int) -> torch.nn.Module:
    return Conv1D(high, wide)


class Transposed(torch.nn.Linear):
    """A layer whose output is not contiguous."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        return output.transpose(0, 1).contiguous().transpose(0, 1).clone()


def transposed(wide: int, high: int) -> torch.nn.Module:
    return Transposed(wide, high, bias=False)


def quantized(wide: int, high: int, *, bias: bool = False) -> torch.nn.Module:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    layer = bitsandbytes.nn.Linear4bit(
        wide, high, bias=bias, quant_type="nf4", compute_dtype=torch.float32
    )
    return layer.to("cpu")


def quantized_and_biased(wide: int, high: int) -> torch.nn.Module:
    return quantized(wide, high, bias=True)


class Other(torch.nn.Linear):
    """A layer of which only its own forward pass is known."""


def other(wide: int, high: int) -> torch.nn.Module:
    return Other(wide, high, bias=False)


LAYERS = [linear, biased, other, conv1d, quantized, quantized_and_biased]


def pair(layer, **changes) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Return PEFT's model and one with the same weights and the faster forward pass."""
    torch.manual_seed(0)
    model = Model(layer(WIDTH, HEIGHT), layer(HEIGHT, WIDTH))
    config = LoraConfig(
        target_modules=["first", "second"],
        r=4,
        lora_alpha=6,
        init_lora_weights=False,
        **changes,
    )
    of_peft = get_peft_model(model, config)
    ours = copy.deepcopy(of_peft)
    speed_up_lora(ours)
    assert [
        isinstance(module, AddsInPlace)
        for module in ours.modules()
        if isinstance(module, LoraLayer)
    ] == [True, True]
    return of_peft, ours


def gradients(
    model: torch.nn.Module, run=lambda model, x: model(x)
) -> dict[str, torch.Tensor]:
    """Return the output and the gradients of the input and of all that is trained."""
    torch.manual_seed(1)
    x = torch.randn(2, 7, WIDTH, requires_grad=True)
    output = run(model, x)
    (output.float() * torch.linspace(-1, 1, WIDTH)).sum().backward()
    trained = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    assert len(trained) == 4
    return {
        "output": output.detach(),
        "x": x.grad,
        **trained,
    }


def assert_close(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float
) -> None:
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype
        assert float((actual[name] - tensor).norm()) <= tolerance * float(
            tensor.norm()
        ), name


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_output_and_gradients_are_those_of_peft(layer, dropout):
    of_peft, ours = pair(layer, lora_dropout=dropout)
    assert_close(gradients(ours), gradients(of_peft), 1e-6)


@pytest.mark.parametrize("layer", LAYERS)
def test_output_and_gradients_with_autocast_are_those_of_peft(layer):
    def run(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    of_peft, ours = pair(layer)
    assert_close(gradients(ours, run), gradients(of_peft, run), 0.02)


@pytest.mark.parametrize("layer", LAYERS)
def test_output_computed_again_for_the_gradient_is_the_same(layer):
    _, ours = pair(layer, lora_dropout=0.4)
    again = gradients(ours, lambda model, x: checkpoint(model, x, use_reentrant=False))
    assert all(
        torch.equal(again[name], tensor)
        for name, tensor in gradients(ours).items()
        if name != "x"
    )


def test_output_that_is_not_contiguous_is_added_to():
    of_peft, ours = pair(transposed)
    assert_close(gradients(ours), gradients(of_peft), 1e-6)


def test_output_without_a_gradient_is_that_of_peft():
    of_peft, ours = pair(linear)
    x = torch.randn(3, WIDTH)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), of_peft(x))


def test_disabled_adapter_changes_nothing():
    of_peft, ours = pair(linear)
    x = torch.randn(3, WIDTH)
    with ours.disable_adapter(), of_peft.disable_adapter():
        assert torch.equal(ours(x), of_peft(x))


def test_merged_adapter_is_added_once():
    of_peft, ours = pair(linear)
    x = torch.randn(3, WIDTH)
    expected = of_peft(x)
    ours.merge_adapter()
    torch.testing.assert_close(ours(x), expected)


def test_layer_of_dora_is_that_of_peft():
    of_peft, ours = pair(linear, use_dora=True)
    x = torch.randn(3, WIDTH)
    assert torch.equal(ours(x), of_peft(x))


def test_layer_with_two_adapters_adds_both():
    of_peft, ours = pair(linear)
    for model in (of_peft, ours):
        torch.manual_seed(5)
        config = LoraConfig(
            target_modules=["first", "second"], r=4, init_lora_weights=False
        )
        model.add_adapter("second", config)
        model.base_model.set_adapter(["default", "second"])
    x = torch.randn(3, WIDTH)
    assert torch.equal(ours(x), of_peft(x))


def test_output_of_another_layer_is_added_to_in_place():
    """The output of the base layer is not copied: this is what the forward pass is for."""
    _, ours = pair(other)
    layer = ours.base_model.model.first
    outputs: list[torch.Tensor] = []
    layer.base_layer.register_forward_hook(
        lambda _module, _inputs, output: outputs.append(output)
    )
    assert layer(torch.randn(3, WIDTH)).data_ptr() == outputs[0].data_ptr()


def test_layer_whose_bias_is_trained_is_that_of_peft():
    of_peft, ours = pair(biased)
    gradients = []
    for model in (of_peft, ours):
        bias = model.base_model.model.first.base_layer.bias.requires_grad_(True)
        model(
            torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(2))
        ).sum().backward()
        gradients.append(bias.grad)
    torch.testing.assert_close(gradients[1], gradients[0])
