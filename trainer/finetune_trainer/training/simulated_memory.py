"""Counts the bytes of the tensors that a program makes, without memory for them."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ATTENTION = "simulated"
"""Name of `simulated_attention` in the registry of transformers."""


class PeakBytes(TorchDispatchMode):  # type: ignore[misc]  # PyTorch has no types for it
    """Counts the bytes of all tensors that are made while it is active and still exist, and the most at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.current = 0
        self.peak = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return the result of an operation, and count the tensors that it has made."""
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor)
        return result

    def exclude(self, tensors: Iterable[torch.Tensor]) -> None:
        """Leave out tensors that exist already: an operation that returns one of them has not made it."""
        for tensor in tensors:
            self._known.add(tensor.untyped_storage())

    def _add(self, tensor: torch.Tensor) -> None:
        # Views share a storage, which is freed with the last of them.
        storage = tensor.untyped_storage()
        if storage in self._known:
            return
        self._known.add(storage)
        size = storage.nbytes()
        weakref.finalize(storage, self._free, size)
        self.current += size
        self.peak = max(self.peak, self.current)

    def _free(self, size: int) -> None:
        self.current -= size


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of tensors; tensors that share their memory count once."""
    storages = {id(s): s for s in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storage.nbytes() for storage in storages.values())


def simulated_attention(
    module: torch.nn.Module,  # noqa: ARG001  the signature of the registry
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001  as above
    *,
    scaling: float | None = None,
    **_options: Any,
) -> tuple[torch.Tensor, None]:
    """Return [B, T, H, D] for queries [B, H, T, D], with the tensors that a kernel without a mask makes and keeps."""
    query, key, value = (tensor.to(value.dtype) for tensor in (query, key, value))
    attended, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(  # noqa: SLF001  there is no public name
        query, key, value, 0.0, is_causal=True, scale=scaling
    )
    return attended.transpose(1, 2), None
