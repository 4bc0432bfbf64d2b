"""Weights that a cast makes infinite: a narrower data type has a smaller largest value."""

import torch

from finetune_trainer.models.stored_weights import StoredWeights
from finetune_trainer.runtime.errors import ConfigInvalid

FIXES = {
    torch.float16: "set push.dtype to BF16",
    torch.bfloat16: "set train.dtype and push.dtype to FP32",
}
"""How to choose a data type with a larger largest value."""


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has no infinite value and no NaN; read it once, without memory for a mask."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    smallest, largest = tensor.aminmax()
    return bool(smallest.isfinite() and largest.isfinite())


def is_narrower(dtype: torch.dtype, than: torch.dtype) -> bool:
    """Return whether a finite value of the other data type may be infinite in `dtype`."""
    if not (dtype.is_floating_point and than.is_floating_point):
        return False
    return bool(torch.finfo(dtype).max < torch.finfo(than).max)


def check_casts(stored: StoredWeights, dtype: torch.dtype) -> None:
    """Raise ConfigInvalid if a finite weight of a model is not finite in `dtype`; read the weights that may be."""
    for name, meta in stored.meta.items():
        if is_narrower(dtype, than=meta.dtype):
            tensor = stored.read(name)
            check_cast(tensor, tensor.to(dtype), name)


def check_cast(tensor: torch.Tensor, rounded: torch.Tensor, name: str) -> None:
    """Raise ConfigInvalid if a finite value of the tensor is not finite in `rounded`, the tensor in another dtype."""
    lost = tensor.isfinite() & ~rounded.isfinite()
    if not lost.any():
        return
    largest = tensor[lost].abs().max().item()
    narrow = str(rounded.dtype).removeprefix("torch.")
    limit = torch.finfo(rounded.dtype).max
    fix = FIXES.get(rounded.dtype, "use a base model without such weights")
    raise ConfigInvalid(
        f"{name} has a weight of {largest:g}, which is infinite in {narrow}, whose largest value is {limit:g}: {fix}"
    )
