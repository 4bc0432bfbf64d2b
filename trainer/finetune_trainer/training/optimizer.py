"""The optimizers, and their states as named tensors.

A new optimizer is a class here and a line in OPTIMIZERS, besides its name in the contract.
"""

import importlib.util
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from typing_extensions import override

from finetune_trainer.contract import Optimizer
from finetune_trainer.runtime.errors import ConfigInvalid
from finetune_trainer.training.determinism import Tensors
from finetune_trainer.training.distributed.sharding import sharded_like, whole

# Both numbers come from bitsandbytes: a checkpoint's layout must be known before the library makes a state.
BLOCK = 256
"""Numbers that share a scale in the 8-bit state of bitsandbytes."""
LEAST_8_BIT = 4096
"""Parameters with fewer numbers keep their state in 32 bits."""


class NamedOptimizer(ABC):
    """An optimizer of named parameters whose state can be saved and restored."""

    def __init__(
        self, recipe: Optimizer, parameters: Mapping[str, torch.nn.Parameter]
    ) -> None:
        self._parameters = parameters
        matrices = [p for p in parameters.values() if p.ndim > 1]
        vectors = [p for p in parameters.values() if p.ndim <= 1]
        # No weight decay on vectors (DoRA's magnitudes), as is usual for biases.
        groups: list[dict[str, Any]] = [
            {"params": matrices},
            {"params": vectors, "weight_decay": 0.0},
        ]
        options = {"lr": recipe.learning_rate, "betas": (recipe.beta1, recipe.beta2)}
        self.optimizer = self._create(
            groups, **options, weight_decay=recipe.weight_decay
        )

    @abstractmethod
    def _create(
        self, groups: list[dict[str, Any]], **options: Any
    ) -> torch.optim.Optimizer:
        """Return the optimizer."""

    @abstractmethod
    def _state_of(self, parameter: torch.nn.Parameter) -> Tensors:
        """Return the tensors of a parameter's state, not copied; a number is a scalar tensor."""

    @abstractmethod
    def _layout_of(self, parameter: torch.nn.Parameter) -> Tensors:
        """Return meta tensors with the names and shapes of the parameter's state."""

    @abstractmethod
    def _restore(self, parameter: torch.nn.Parameter, state: Tensors) -> None:
        """Restore the state of a parameter, on its device, from tensors that must not be written to."""

    def step(self, rate: float) -> None:
        """Change the parameters by their gradients, with this learning rate."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()

    def tensors(self) -> Tensors:
        """Return the state as named tensors, not copied; a parameter that never had a gradient has none."""
        return {
            f"{name}.{key}": tensor
            for name, parameter in self._parameters.items()
            if parameter in self.optimizer.state
            for key, tensor in self._state_of(parameter).items()
        }

    def layout(self) -> Tensors:
        """Return meta tensors with the names and shapes of the state of all parameters."""
        return {
            f"{name}.{key}": tensor
            for name, parameter in self._parameters.items()
            for key, tensor in self._layout_of(parameter).items()
        }

    def restore(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Restore a state from `tensors`."""
        for name, parameter in self._parameters.items():
            state = {
                key: saved[f"{name}.{key}"]
                for key in self._layout_of(parameter)
                if f"{name}.{key}" in saved
            }
            if state:
                self._restore(parameter, state)


class AdamW(NamedOptimizer):
    """PyTorch's AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101)."""

    @override
    def _create(
        self, groups: list[dict[str, Any]], **options: Any
    ) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, fused=True, **options)

    @override
    def _state_of(self, parameter: torch.nn.Parameter) -> Tensors:
        return dict(self.optimizer.state[parameter])

    @override
    def _layout_of(self, parameter: torch.nn.Parameter) -> Tensors:
        moment = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        return {
            "step": torch.empty((), dtype=torch.float32, device="meta"),
            "exp_avg": moment,
            "exp_avg_sq": moment,
        }

    @override
    def _restore(self, parameter: torch.nn.Parameter, state: Tensors) -> None:
        # Copies: the tensors of a snapshot must not change with the training.
        self.optimizer.state[parameter] = {
            "step": state["step"].to(parameter.device, copy=True),
            **{
                key: sharded_like(state[key], parameter).clone()
                for key in state
                if key != "step"
            },
        }


class AdamW8Bit(NamedOptimizer):
    """AdamW whose moments take 8 bits each, of bitsandbytes (Dettmers et al. 2022, arXiv:2110.02861)."""

    @override
    def _create(
        self, groups: list[dict[str, Any]], **options: Any
    ) -> torch.optim.Optimizer:
        if importlib.util.find_spec("bitsandbytes") is None:
            raise ConfigInvalid(
                "train.optimizer.name AdamW8Bit needs bitsandbytes: pip install 'finetune-operator[qlora]'"
            )
        from bitsandbytes.optim import AdamW8bit  # noqa: PLC0415  optional, and its import takes a second

        self._library: Any = AdamW8bit(groups, min_8bit_size=LEAST_8_BIT, **options)
        optimizer: torch.optim.Optimizer = self._library
        return optimizer

    @override
    def _state_of(self, parameter: torch.nn.Parameter) -> Tensors:
        state = self.optimizer.state[parameter]
        step = torch.tensor(float(state["step"]))
        return {
            "step": step,
            **{key: state[key] for key in self._layout_of(parameter) if key != "step"},
        }

    @override
    def _layout_of(self, parameter: torch.nn.Parameter) -> Tensors:
        is_8_bit = parameter.numel() >= LEAST_8_BIT
        moment = torch.empty_like(
            parameter, dtype=torch.uint8 if is_8_bit else torch.float32, device="meta"
        )
        layout = {
            "step": torch.empty((), dtype=torch.float32, device="meta"),
            "state1": moment,
            "state2": moment,
        }
        if is_8_bit:
            # The last block of a parameter may be shorter, and has a scale nevertheless.
            blocks = -(-parameter.numel() // BLOCK)
            scales = torch.empty(blocks, dtype=torch.float32, device="meta")
            layout["absmax1"] = scales
            layout["absmax2"] = scales
        return layout

    @override
    def _restore(self, parameter: torch.nn.Parameter, state: Tensors) -> None:
        [(group, number, index)] = [
            (group, number, index)
            for group, number, index in self._places()
            if group["params"][index] is parameter
        ]
        # bitsandbytes makes a state of its own layout, which is filled: it keeps other tensors in it than are saved.
        self._library.init_state(group, parameter, number, index)
        restored = self.optimizer.state[parameter]
        for key, tensor in state.items():
            if key == "step":
                restored[key] = int(tensor)
            else:
                restored[key].copy_(tensor)

    def _places(self) -> Iterator[tuple[dict[str, Any], int, int]]:
        """Yield the group of every parameter, the group's number, and the parameter's number in it."""
        for number, group in enumerate(self.optimizer.param_groups):
            for index in range(len(group["params"])):
                yield group, number, index


OPTIMIZERS: dict[str, type[NamedOptimizer]] = {"AdamW": AdamW, "AdamW8Bit": AdamW8Bit}
"""By the name in `train.optimizer.name`."""


def create_optimizer(
    recipe: Optimizer, parameters: Mapping[str, torch.nn.Parameter]
) -> NamedOptimizer:
    """Return the optimizer of a recipe; raise ConfigInvalid if its library is missing."""
    return OPTIMIZERS[recipe.name](recipe, parameters)


def clip_gradients(parameters: dict[str, torch.nn.Parameter], max_norm: float) -> float:
    """Clip the total gradient norm to `max_norm`, or not at all if it is 0; return the norm before clipping."""
    # An infinite limit clips nothing, and the norm is computed nevertheless.
    norm: torch.Tensor = torch.nn.utils.clip_grad_norm_(
        list(parameters.values()), max_norm or math.inf
    )
    return float(whole(norm).item())
