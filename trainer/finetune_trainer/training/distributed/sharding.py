"""Shard a model over all processes with PyTorch's fully_shard (FSDP2), and gather its tensors for a checkpoint.

Each process keeps a part of every weight, of its gradient and of its optimizer state. The weights of a layer are
gathered while it computes. A checkpoint has whole tensors, like the checkpoint of a single process.
"""

from dataclasses import replace

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from finetune_trainer.models.structure import layers_of
from finetune_trainer.runtime.errors import ConfigInvalid
from finetune_trainer.training.determinism import Tensors
from finetune_trainer.training.distributed.ranks import Ranks
from finetune_trainer.training.methods.trainable import Trainable

PINNED_BYTES = 2 << 30
"""Most bytes of a copy in pinned memory. PyTorch keeps that for the next copy, up to twice as much.

An adapter of an 8B model and its moments have 0.5 GB. More is copied tensor by tensor into memory that is freed.
"""


def shard(trainable: Trainable, ranks: Ranks, device: torch.device) -> Trainable:
    """Shard a model that lies in CPU memory, layer by layer, so that no device holds all of it.

    Raise ConfigInvalid if its architecture has no layers that can be gathered one after the other.
    """
    module = trainable.module
    layers = layers_of(module)
    if not layers:
        raise ConfigInvalid(
            "train.parallelism FSDP: this architecture cannot be sharded by layers: set it to DDP"
        )
    # By address, as long as the memory is shared: sharding replaces the parameters, and the saved names may differ.
    names = {
        parameter.data_ptr(): name for name, parameter in module.named_parameters()
    }
    # The layers first and the module last: it takes only the parameters that no layer has taken.
    mesh = init_device_mesh(device.type, (ranks.size,))
    for part in (*layers, module):
        fully_shard(part, mesh=mesh)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            # The sum, not the mean: each loss is divided by the targets of all processes already.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    parameters = dict(module.named_parameters())
    weights = {
        name: parameters[names[tensor.data_ptr()]].detach()
        for name, tensor in trainable.weights.items()
    }
    return replace(trainable, weights=weights)


def drop_gathered(module: torch.nn.Module) -> None:
    """Drop the whole weights of a sharded model; those outside its layers stay gathered after a pass without gradients.

    Call this before the shards change: the next pass would compute with the weights of before.
    """
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor. A sharded tensor is gathered, for which all processes must call this together."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    return tensor


def sharded_like(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the part of a whole tensor that this process keeps, if `like` is sharded, on its device."""
    tensor = tensor.to(like.device)
    if not isinstance(like, DTensor):
        return tensor
    # No process sends its tensor to others: all have read the same file.
    return distribute_tensor(
        tensor, like.device_mesh, like.placements, src_data_rank=None
    )


def copy_to_cpu(tensors: Tensors, *, keep: bool = True) -> Tensors:
    """Return copies of the whole tensors in CPU memory, which training does not write to.

    A process that does not keep them takes part in gathering the sharded tensors, and returns none.
    """
    pin = any(tensor.is_cuda for tensor in tensors.values()) and fits_pinned(tensors)
    copies: Tensors = {}
    for name, tensor in tensors.items():
        # One after the other, so that no device holds more than a single whole tensor.
        gathered = whole(tensor.detach())
        if keep:
            copies[name] = _start_copy(gathered, pin=pin and gathered.is_cuda)
    if pin:
        # Not the whole GPU: a collective whose peer is lost never ends on its own stream.
        torch.cuda.current_stream().synchronize()
    return copies


def reserve_copies(*groups: Tensors) -> None:
    """Allocate the pinned memory of copies of all these tensors, and release it to PyTorch, which keeps it for them.

    On an H200, the first checkpoint of 0.5 GB, which allocated it, paused training for 303 ms, and each later
    checkpoint for 32 ms at most. `groups` are the arguments of the calls of `copy_to_cpu`; the values are ignored.
    """
    pinned = [
        tensor
        for tensors in groups
        if fits_pinned(tensors)
        for tensor in tensors.values()
    ]
    # All of them, before the first is released: PyTorch would hand out the same memory again.
    _ = [pinned_like(tensor) for tensor in pinned]


def fits_pinned(tensors: Tensors) -> bool:
    """Return whether a copy of these tensors may be in pinned memory."""
    size: int = sum(tensor.nbytes for tensor in tensors.values())
    return size <= PINNED_BYTES


def _start_copy(tensor: torch.Tensor, *, pin: bool) -> torch.Tensor:
    """Return a copy in CPU memory; if that is pinned, the GPU still writes it, and the next copy need not wait."""
    if not pin:
        return tensor.to("cpu", copy=True).contiguous()
    return pinned_like(tensor).copy_(tensor, non_blocking=True)


def pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return memory for a copy of a tensor, to which the GPU can write by itself."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
