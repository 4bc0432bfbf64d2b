"""The processes that train together. Each computes its share of every step; the first alone decides and writes.

All have equal weights: the gradients are summed before each optimizer step, and a sum has the same bits in every
process. So a checkpoint of the first is a checkpoint of all, and no process is needed to save it but the first.
"""

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from typing_extensions import override

from finetune_trainer.data.sampling import Indices
from finetune_trainer.runtime.errors import Interrupted
from finetune_trainer.runtime.progress.progress import log_line
from finetune_trainer.stop_signal import StopSignal

BUCKET_BYTES = 256 << 20
"""Size of the gradients that are summed at once; they are copied for that."""
POLL_SECONDS = 1e-4
"""Between two looks whether a sum has arrived. A process that waits in PyTorch instead would hear no signal."""
ABANDON_SECONDS = 10.0
"""Time after a request to stop in which the others must answer: processes on a lost node never do."""
ABANDON_SHARDED_SECONDS = 60.0
"""The same for sharded models. The first process may be copying all weights, and nothing is saved without it."""
PEER_ERROR = re.compile(
    r"^\[\S*third_party/gloo|Connection (closed|reset)|Broken pipe|[Tt]imed out|ncclRemoteError"
)
"""Messages of gloo and NCCL when a connection ends. Other errors, such as NCCL's for invalid usage, are faults."""
TIMEOUT = timedelta(hours=1)
"""Limit of each sum, which waits while another process saves, validates or generates samples."""


class PeerLost(Interrupted):
    """Another process that trains has ended or does not answer: the step cannot be finished."""


class Ranks:
    """The processes that train together: here a single process, which trains alone."""

    rank: int = 0
    """Number of this process."""
    size: int = 1
    """Number of processes: the world size."""

    is_sharded: bool = False
    """Whether weights and optimizer state are spread over the processes, so that all take part in saving."""

    @property
    def is_first(self) -> bool:
        """Whether this process decides and writes."""
        return self.rank == 0

    def sum(self, *values: float) -> tuple[float, ...]:
        """Return the sums of all processes' values; raise PeerLost if a process has ended."""
        return values

    def any(self, flag: bool) -> bool:  # noqa: FBT001  the only argument
        """Return whether the flag is set in any process; raise PeerLost if a process has ended."""
        return flag

    def gather(self, value: int) -> tuple[int, ...]:
        """Return all processes' values, each below 2^53; raise PeerLost if a process has ended."""
        # Each process adds its value at its own place, and zeros elsewhere. Sums are in fp64, hence the limit.
        own = [0] * self.size
        own[self.rank] = value
        return tuple(int(total) for total in self.sum(*own))

    def micro_batches(
        self, indices: Indices, size: int
    ) -> Iterator[tuple[Indices, bool]]:
        """Yield the indices of each micro-batch of this process, and whether they count.

        The processes take turns. Each gets the same number of micro-batches, for they compute and stop together: if
        there are too few for a process, it gets the first micro-batch once more, which does not count.
        """
        starts = range(0, len(indices), size)
        rounds = -(-len(starts) // self.size)
        for number in range(self.rank, rounds * self.size, self.size):
            counts = number < len(starts)
            start = number * size if counts else 0
            yield indices[start : start + size], counts

    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Replace each gradient by the sum of all processes' gradients; raise PeerLost if a process has ended."""

    def has_lost_peer(self, _error: RuntimeError) -> bool:
        """Return whether a pass of the model failed because another process has ended."""
        return False

    def leave(self) -> None:
        """Note that this process waits for the others no more, so that the loss of another does not end it."""


ALONE = Ranks()
"""The ranks of a process that trains alone."""


class RankGroup(Ranks):
    """Several processes, connected by torch.distributed."""

    def __init__(
        self,
        rank: int,
        size: int,
        stop: StopSignal,
        has_lost_a_peer: Callable[[], bool],
        left: threading.Event,
    ) -> None:
        """Use the default process group.

        `has_lost_a_peer` says whether a process of this pod has ended. `left` is set by `leave`.
        """
        self.rank = rank
        self.size = size
        self._stop = stop
        self._has_lost_a_peer = has_lost_a_peer
        self._left = left

    @override
    def sum(self, *values: float) -> tuple[float, ...]:
        # On the CPU: the GPU need not finish its work for it. In fp64, where counts below 2^53 are exact.
        total = torch.tensor(values, dtype=torch.float64)
        self._sum(total)
        return tuple(total.tolist())

    @override
    def any(self, flag: bool) -> bool:
        return self.sum(flag)[0] > 0

    @override
    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        parameters = list(parameters)
        # A parameter without a gradient here may have a gradient elsewhere, such as an expert that no token here chose.
        counts = self.sum(*(parameter.grad is not None for parameter in parameters))
        pairs = zip(parameters, counts, strict=True)
        used = [parameter for parameter, count in pairs if count]
        for bucket in _buckets(used):
            gradients = [
                torch.zeros_like(parameter)
                if parameter.grad is None
                else parameter.grad
                for parameter in bucket
            ]
            # In a single tensor: each sum has a delay, whatever its size, and an adapter has hundreds of gradients.
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            self._sum(flat)
            totals = flat.split([gradient.numel() for gradient in gradients])
            for parameter, total in zip(bucket, totals, strict=True):
                parameter.grad = total.view_as(parameter)

    @override
    def leave(self) -> None:
        self._left.set()

    @property
    def _abandon_seconds(self) -> float:
        return ABANDON_SECONDS

    def _is_of_lost_peer(self, error: RuntimeError) -> bool:
        return is_loss_of_peer(error) or self._has_lost_a_peer()

    def _sum(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by the sum of all processes' tensors."""
        abandon_at: float | None = None
        # Polled: a process that waits in PyTorch runs no signal handler, and would miss SIGTERM.
        try:
            work: Any = torch.distributed.all_reduce(tensor, async_op=True)
            while not work.is_completed():
                if self._stop.requested:
                    abandon_at = abandon_at or time.monotonic() + self._abandon_seconds
                if self._has_lost_a_peer() or (
                    abandon_at and time.monotonic() > abandon_at
                ):
                    raise PeerLost
                time.sleep(POLL_SECONDS)
            work.wait()
        except RuntimeError as error:
            if not self._is_of_lost_peer(error):
                raise
            # The first line only: the others are PyTorch's stack in C++.
            reason = str(error).partition("\n")[0]
            log_line(
                f"train: process {self.rank} of {self.size} has lost another process: {reason}"
            )
            raise PeerLost from error


class ShardedRankGroup(RankGroup):
    """Several processes over which weights, gradients and optimizer state are sharded."""

    is_sharded = True

    @override
    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Do nothing: the backward pass has summed them."""

    @override
    def has_lost_peer(self, error: RuntimeError) -> bool:
        return self._is_of_lost_peer(error)

    @property
    @override
    def _abandon_seconds(self) -> float:
        return ABANDON_SHARDED_SECONDS


def is_loss_of_peer(error: RuntimeError) -> bool:
    """Return whether PyTorch raised an error because another process has ended."""
    if isinstance(
        error, torch.distributed.DistNetworkError | torch.distributed.DistStoreError
    ):
        return True
    # An error of CUDA is "the launch timed out", which PEER_ERROR would match.
    is_of_gpu = str(error).startswith("CUDA error")
    return not is_of_gpu and PEER_ERROR.search(str(error)) is not None


def _buckets(
    parameters: list[torch.nn.Parameter],
) -> Iterator[list[torch.nn.Parameter]]:
    """Yield the parameters in order, in lists of at most BUCKET_BYTES, or of a single larger parameter."""
    bucket: list[torch.nn.Parameter] = []
    size = 0
    for parameter in parameters:
        if bucket and size + parameter.nbytes > BUCKET_BYTES:
            yield bucket
            bucket = []
            size = 0
        bucket.append(parameter)
        size += parameter.nbytes
    if bucket:
        yield bucket
