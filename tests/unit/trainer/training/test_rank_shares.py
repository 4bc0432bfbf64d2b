"""What one of several processes computes and hears, without the others."""

from threading import Event

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.trainer.training import documents, write_rows

from finetune_trainer.data.packing.rows import PackedRows
from finetune_trainer.stop_signal import StopSignal
from finetune_trainer.training.batches import batches
from finetune_trainer.training.distributed.ranks import PeerLost, RankGroup, Ranks


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return PackedRows(
        write_rows(tmp_path_factory.mktemp("packed"), documents(60)), "train"
    )


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (
            RuntimeError(
                "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"
            ),
            True,
        ),
        (
            RuntimeError(
                "[/pytorch/third_party/gloo/gloo/unbound_buffer.cc:78] Timed out waiting 4000ms for recv"
            ),
            True,
        ),
        (
            RuntimeError(
                "[enforce fail at /pytorch/third_party/gloo/gloo/pair.cc:456] length <= nbytes"
            ),
            False,
        ),
        (
            torch.distributed.DistBackendError(
                "NCCL error: ncclRemoteError: a remote process exited"
            ),
            True,
        ),
        (
            torch.distributed.DistBackendError(
                "NCCL error: invalid usage. Duplicate GPU detected"
            ),
            False,
        ),
        (torch.distributed.DistNetworkError("failed to recv, got 0 bytes"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("CUDA error: the launch timed out and was terminated"), False),
    ],
)
def test_only_a_lost_connection_is_an_interruption(monkeypatch, capsys, error, is_lost):
    def all_reduce(*_: object, **__: object):
        raise error

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    with pytest.raises(PeerLost if is_lost else type(error)):
        RankGroup(0, 2, StopSignal(), lambda: False, Event()).sum(1.0)
    assert (
        f"process 0 of 2 has lost another process: {error}"
        in "".join(capsys.readouterr())
    ) is is_lost


class Share(Ranks):
    """One of several processes, without the others."""

    def __init__(self, rank, size):
        self.rank = rank
        self.size = size


def test_gathered_values_are_in_the_order_of_the_processes():
    ranks = Share(1, 3)
    largest = 2**53 - 1
    ranks.sum = lambda *own: (own[0] + 5.0, own[1] + 0.0, own[2] + 3.0)
    assert [ranks.gather(4), ranks.gather(largest), Ranks().gather(7)] == [
        (5, 4, 3),
        (5, largest, 3),
        (7,),
    ]


@settings(
    deadline=None,
    max_examples=30,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(count=st.integers(1, 20), batch_size=st.integers(1, 4), size=st.integers(1, 5))
def test_processes_share_every_row_in_equal_rounds(rows, count, batch_size, size):
    indices = np.arange(min(count, len(rows)))
    alone = list(batches(rows, indices, batch_size))
    shares = [
        list(batches(rows, indices, batch_size, ranks=Share(rank, size)))
        for rank in range(size)
    ]
    assert len({len(share) for share in shares}) == 1
    dealt = [share[number] for number in range(len(shares[0])) for share in shares]
    assert sum(batch.size for batch in dealt) == sum(batch.size for batch in alone)
    for mine, expected in zip(dealt, alone, strict=False):
        assert torch.equal(mine.targets, expected.targets)
    assert all(
        not len(batch.targets) and not batch.size for batch in dealt[len(alone) :]
    )
