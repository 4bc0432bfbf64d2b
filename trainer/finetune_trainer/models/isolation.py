"""Whether the documents of a packed row stay apart in an architecture: found out without its weights."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from finetune_trainer.runtime.errors import ConfigInvalid, short_reason
from finetune_trainer.runtime.progress.progress import log_line

PROBE_LENGTH = 8
"""Tokens of each document of a probe."""
ROUNDING = 1e-4
"""Largest difference by rounding in fp32, as a share of the values' standard deviation."""
SHORT_CHUNK = 16
"""Tokens that a recurrent layer computes at once, which changes no result, but its memory."""
POOL = 1 << 22
"""Random numbers that stand in for all weights: each weight is a window of them."""
STRIDES = (1, 7, 11, 13, 17)
"""Steps between the windows of rows, by dimension, the last dimension first; small, so that all fit into the pool."""
TERMS = 4
"""Inputs that each output of a stand-in for a matrix depends on."""


def probe_rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and positions [2, 2 * PROBE_LENGTH] of two rows of two documents each.

    The second documents are equal, and the first are not.
    """
    tokens = torch.arange(2 * PROBE_LENGTH).repeat(2, 1)
    tokens[1, :PROBE_LENGTH] = tokens[0, :PROBE_LENGTH].flip(0)
    positions = (torch.arange(2 * PROBE_LENGTH) % PROBE_LENGTH).repeat(2, 1)
    return tokens, positions


def not_isolated(uri: str, architecture: str) -> ConfigInvalid:
    """Return the error of an architecture whose documents see each other."""
    return ConfigInvalid(
        f"model {uri}: documents packed into one row attend to each other in this architecture "
        f"({architecture}): set prepare.packing to false"
    )


def check_packing(structure: Any, uri: str) -> None:
    """Raise ConfigInvalid if a packed document changes what the model computes for the document after it.

    `structure` is a model on the meta device, which afterwards has random weights. Its size costs little: all weights
    are windows of a pool, and matrices are not multiplied.
    """
    architecture = type(structure).__name__
    try:
        first, second = _hidden_states(structure)[:, PROBE_LENGTH:]
    except Exception as error:  # noqa: BLE001  with stand-ins for its weights, a model may fail in any way
        log_line(f"packing in {architecture} was not checked: {short_reason(error)}")
        return
    if not first.isfinite().all():
        return
    if (first - second).abs().max() > ROUNDING * first.std():
        raise not_isolated(uri, architecture)


def _hidden_states(structure: Any) -> torch.Tensor:
    """Return the input of the output head [2, 2 * PROBE_LENGTH, D] for the rows of the probe; without head, logits."""
    _fill(structure)
    structure.eval()
    tokens, positions = probe_rows()
    captured: list[torch.Tensor] = []
    head = structure.get_output_embeddings()
    if head is not None:
        head.register_forward_pre_hook(lambda _head, inputs: captured.append(inputs[0]))
    with torch.no_grad(), torch.random.fork_rng([]), _CheapMatrices():
        logits = structure(
            input_ids=tokens, position_ids=positions, use_cache=False
        ).logits
    values = captured[0] if captured else logits
    return values.float().view(*tokens.shape, -1)


def _fill(structure: Any) -> None:
    """Replace the tensors on the meta device: buffers as the model computes them, and random weights."""
    if hasattr(structure, "set_experts_implementation"):
        # The others multiply all experts at once.
        structure.set_experts_implementation("eager")
    for module in structure.modules():
        buffers = module._buffers  # noqa: SLF001  there is no other way to replace a buffer
        for name, buffer in buffers.items():
            if buffer is not None and buffer.is_meta:
                buffers[name] = torch.zeros_like(buffer, device="cpu")
        if isinstance(getattr(module, "chunk_size", None), int):
            module.chunk_size = SHORT_CHUNK
    for module in structure.modules():
        # Computes the buffers; on weights without memory it does nothing.
        structure._init_weights(module)  # noqa: SLF001  transformers has no public name for it
    _replace_weights(structure)


def _replace_weights(structure: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    pool = torch.randn(POOL, generator=generator) / 2
    replaced: dict[int, torch.nn.Parameter] = {}
    for module in structure.modules():
        weights = module._parameters  # noqa: SLF001  as for buffers
        for name, weight in weights.items():
            if weight is None:
                continue
            # Layers that share a weight share its stand-in.
            if id(weight) not in replaced:
                window = _window(pool, weight.shape, generator)
                replaced[id(weight)] = torch.nn.Parameter(window, requires_grad=False)
            weights[name] = replaced[id(weight)]


def _window(
    pool: torch.Tensor, shape: Sequence[int], generator: torch.Generator
) -> torch.Tensor:
    """Return a tensor of this shape over numbers of the pool, which it shares with other tensors."""
    strides = STRIDES[: len(shape)][::-1]
    length = 1 + sum(
        (size - 1) * stride for size, stride in zip(shape, strides, strict=True)
    )
    latest = max(0, len(pool) - length)
    offset = int(torch.randint(latest + 1, (), generator=generator))
    return pool.as_strided(tuple(shape), strides, offset)


class _CheapMatrices(TorchFunctionMode):  # type: ignore[misc]  # PyTorch has no types for it
    """Replaces products with weights: each output becomes a sum of TERMS inputs with random signs.

    As in a product, an output depends on its own token only.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return the result of a function of PyTorch, or of its stand-in."""
        options = dict(kwargs or {})
        if func is torch.nn.functional.linear:
            return _linear(*args, **options)
        if func in _PRODUCTS and _is_window(args[1]):
            return _mixed(args[0], args[1], args[1].shape[-1])
        if func is torch.addmm and _is_window(args[2]):
            return args[0] + _mixed(args[1], args[2], args[2].shape[-1])
        return func(*args, **options)


_PRODUCTS = (
    torch.matmul,
    torch.bmm,
    torch.mm,
    torch.Tensor.matmul,
    torch.Tensor.__matmul__,
)


def _is_window(weight: Any) -> bool:
    """Return whether a tensor has more elements than memory."""
    if not isinstance(weight, torch.Tensor):
        return False
    memory: int = weight.untyped_storage().nbytes()
    return bool(weight.numel() > memory // weight.element_size())


def _linear(
    values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    mixed = _mixed(values, weight, weight.shape[0])
    if bias is None:
        return mixed
    return mixed + bias


def _mixed(values: torch.Tensor, weight: torch.Tensor, size: int) -> torch.Tensor:
    """Return [..., size] for values [..., D]; the same weight mixes in the same way."""
    generator = torch.Generator().manual_seed(weight.storage_offset() + size)
    inputs = values.shape[-1]
    picked = torch.randint(inputs, (TERMS, size), generator=generator)
    signs = torch.randint(2, (TERMS, size), generator=generator) * 2.0 - 1.0
    return (values[..., picked] * signs.to(values.dtype)).sum(-2) / TERMS**0.5
