"""How the processes of a pod meet, and how one ends that waits for another in vain."""

import os
import socket
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.trainer.training import environment, train_config
from torch.distributed import TCPStore

from finetune_trainer.contract import ExitCode, TerminationMessage
from finetune_trainer.listening import listen_on_all_addresses
from finetune_trainer.runtime.errors import ServiceUnavailable
from finetune_trainer.runtime.progress.progress import ProgressReporter
from finetune_trainer.runtime.stage_folder import Context
from finetune_trainer.stop_signal import StopSignal
from finetune_trainer.training.distributed import processes as rank_processes
from finetune_trainer.training.distributed.processes import RankProcesses
from finetune_trainer.training.distributed.ranks import TIMEOUT


def test_store_of_another_process_waits_as_long_as_a_sum(monkeypatch):
    """NCCL asks the store for the first process's id in the first sum."""
    monkeypatch.setattr(rank_processes, "JOIN_SECONDS", 5)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    recipe = train_config(Path("m"), processes_per_node=2).recipe
    place = replace(environment(Path()), local_rank=1, master_port=store.port)
    processes = RankProcesses(
        recipe, Context(place, Path(), ProgressReporter("train", place), StopSignal())
    )
    assert processes._connect().timeout == TIMEOUT


def test_first_process_listens_by_both_protocols():
    with listen_on_all_addresses(0) as server:
        hosts = ("127.0.0.1", "::1") if socket.has_dualstack_ipv6() else ("127.0.0.1",)
        for host in hosts:
            with socket.create_connection(
                (host, server.getsockname()[1]), timeout=5
            ) as connection:
                assert connection.getpeername()[0] == host


class ProcessesWithLoss:
    """The processes of a pod of which another one has ended."""

    def __init__(self, failure):
        self.left = threading.Event()
        self._failure = failure

    def has_lost_one(self):
        return True

    def failure(self):
        return self._failure


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (ServiceUnavailable("process 1 of 2 was killed"), ExitCode.UNAVAILABLE),
        (None, ExitCode.INTERRUPTED),
    ],
    ids=["killed", "stopped"],
)
def test_process_that_hears_nothing_ends_with_the_lost_one(
    tmp_path, monkeypatch, failure, code
):
    """The main thread waits for the GPU, which waits for the lost process. Here it waits for the thread."""
    monkeypatch.setattr(rank_processes, "HANG_SECONDS", 0.1)
    place = replace(
        environment(tmp_path),
        termination_log=tmp_path / "termination.json",
        progress_file=None,
    )
    if (child := os.fork()) == 0:
        progress = ProgressReporter("train", place)
        progress.update(step=7, saved_step=5)
        processes: Any = ProcessesWithLoss(failure)
        context = Context(place, tmp_path, progress, StopSignal())
        rank_processes.end_in_hang(processes, context)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code
    message = TerminationMessage.model_validate_json(place.termination_log.read_bytes())
    assert message.progress
    assert message.progress.step == 7
    if failure:
        assert message.failure
        assert message.failure.message == "process 1 of 2 was killed"
    else:
        assert message.interruption
        assert message.interruption.step == 7
        assert message.interruption.saved_step == 5


def test_process_that_notices_the_lost_one_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_processes, "HANG_SECONDS", 30)
    monkeypatch.setattr(os, "_exit", lambda _: pytest.fail("the process was ended"))
    processes = ProcessesWithLoss(None)
    place = replace(environment(tmp_path), progress_file=None)
    context = Context(place, tmp_path, ProgressReporter("train", place), StopSignal())
    thread = threading.Thread(
        target=rank_processes.end_in_hang, args=(processes, context)
    )
    thread.start()
    processes.left.set()
    thread.join(10)
    assert not thread.is_alive()
