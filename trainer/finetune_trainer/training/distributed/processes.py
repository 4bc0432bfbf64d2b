"""The processes of a pod that train together: the first starts the others, and all meet.

Each is the program of the stage itself, with a local rank in its environment. The kernel kills the others when the
first ends, however it ends. When another ends by its own fault, the first ends with that fault.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from signal import SIGKILL, Signals

import torch
from pydantic import ValidationError
from torch.distributed import TCPStore, init_process_group

from finetune_trainer.contract import (
    Environment,
    Failure,
    Interruption,
    TerminationMessage,
    TrainRecipe,
)
from finetune_trainer.contract.environment import RENDEZVOUS_PORT
from finetune_trainer.exit_codes import ExitCode
from finetune_trainer.listening import (
    listen_on_all_addresses,
    listen_on_loopback,
    loopback,
)
from finetune_trainer.runtime.child_process import start_module
from finetune_trainer.runtime.errors import (
    ConfigInvalid,
    CredentialsRejected,
    DataInvalid,
    DeviceFailed,
    Interrupted,
    ServiceUnavailable,
    SourceNotFound,
    StageError,
)
from finetune_trainer.runtime.progress.activity import activity
from finetune_trainer.runtime.progress.progress import ProgressReporter, log_line
from finetune_trainer.runtime.stage_folder import Context
from finetune_trainer.runtime.watchdog import end_process
from finetune_trainer.training.distributed.ranks import (
    ALONE,
    TIMEOUT,
    PeerLost,
    RankGroup,
    Ranks,
    ShardedRankGroup,
    is_loss_of_peer,
)

JOIN_SECONDS = 1800.0
"""Limit of the time until all processes have met: the nodes of an attempt pull their images one after the other."""
CONNECT_TIMEOUT = timedelta(seconds=10)
"""Limit of a single trial to connect to the first process."""
HANG_SECONDS = 60.0
"""Time after the loss of another process in which this process must notice it: in a pass on a GPU it never does."""
END_SECONDS = 5.0
"""Time in which the others end by themselves after the first process has: they notice its closed connections."""
POLL_SECONDS = 0.05
WATCH_SECONDS = 1.0
"""Between two looks whether another process has ended, in a thread beside the training."""
FOLDER = ".ranks"
"""In the stage's folder: what the other processes of this pod write, until the stage ends."""
FAILURES = (
    ConfigInvalid,
    DataInvalid,
    SourceNotFound,
    CredentialsRejected,
    ServiceUnavailable,
)
"""What a process reports by its exit code; every other code is a bug."""

Process = subprocess.Popen[bytes]


def ranks_here(recipe: TrainRecipe, environment: Environment) -> int:
    """Return the number of processes that start here: the processes of this node, or all in a local run."""
    if environment.master_address:
        return recipe.processes_per_node or 1
    return recipe.processes


@contextlib.contextmanager
def other_ranks(recipe: TrainRecipe, context: Context) -> Iterator["RankProcesses"]:
    """Start the other processes of this pod. At the end of the context wait for them, then kill the rest.

    Raise the failure of another process, if it is the reason that this process cannot continue.
    """
    processes = RankProcesses(recipe, context)
    try:
        if processes.is_sharded:
            # A daemon: it must not keep a process alive that has ended its work.
            threading.Thread(
                target=end_in_hang, args=(processes, context), daemon=True
            ).start()
        yield processes
        processes.wait(END_SECONDS)
    except Interrupted as error:
        processes.wait(END_SECONDS)
        if isinstance(error, PeerLost):
            # Exit code 75 of this process only says that a peer is gone. The peer's own failure is the cause.
            failure = processes.failure()
            if failure:
                raise failure from None
        raise
    except RuntimeError as error:
        # The passes of a sharded model wait in PyTorch, which knows no PeerLost.
        if not is_loss_of_peer(error) and not processes.has_lost_one():
            raise
        processes.wait(END_SECONDS)
        raise (processes.failure() or PeerLost()) from error
    finally:
        processes.close()


def end_in_hang(processes: "RankProcesses", context: Context) -> None:
    """End this process with the failure of another process of this pod, HANG_SECONDS after the other has ended.

    Return as soon as this process waits for the others no more: saving may then take longer. The passes of a sharded
    model gather weights from all processes. With NCCL the GPU waits for a lost process, and the main thread for the
    GPU, without hearing anything.
    """
    while not processes.has_lost_one():
        if processes.left.wait(WATCH_SECONDS):
            return
    if processes.left.wait(HANG_SECONDS):
        return
    failure = processes.failure()
    now = context.progress.now
    code: int = ExitCode.INTERRUPTED
    if failure:
        code = failure.exit_code
        message = TerminationMessage(
            failure=Failure(message=str(failure), device=failure.device),
            progress=now,
        )
    else:
        message = TerminationMessage(
            interruption=Interruption(step=now.step, saved_step=now.saved_step),
            progress=now,
        )
    log_line(
        f"train: another process has ended, and this process still waits for it: {failure or 'it was stopped'}"
    )
    end_process(context.environment, context.stop, message, code)


class RankProcesses:
    """The other processes of this pod that train with this process; none if another process has started this one."""

    def __init__(self, recipe: TrainRecipe, context: Context) -> None:
        environment = context.environment
        self._stop = context.stop
        self._environment = environment
        self.local_rank = environment.local_rank
        self.local_size = ranks_here(recipe, environment)
        self.rank = environment.node_rank * self.local_size + environment.local_rank
        self.size = recipe.processes
        self.is_sharded = recipe.parallelism == "FSDP" and self.size > 1
        self._folder = context.folder / FOLDER
        self._processes: dict[int, Process] = {}
        """By local rank."""
        self.left = threading.Event()
        """Set when this process waits for the others no more, however its training has ended."""
        self._own_store: TCPStore | None = None
        if self.size > 1 and self.rank == 0:
            # Before the others start: they get the port of this store.
            self._own_store = self._listen()
        if not self.local_rank and self.local_size > 1:
            # The folder may be left from an attempt that was killed.
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir(parents=True)
            self._processes = {
                number: self._start(number) for number in range(1, self.local_size)
            }

    def join(self, progress: ProgressReporter) -> Ranks:
        """Wait until all processes have met; return their ranks.

        Raise PeerLost if a process of this pod has ended, and ServiceUnavailable after JOIN_SECONDS. A signal to stop
        is heard meanwhile: the waiting is done in a thread.
        """
        if self.size == 1:
            return ALONE
        progress.update(note=f"waiting for the other processes, {self.size} in all")
        failures: list[BaseException] = []
        thread = threading.Thread(target=self._meet, args=(failures,), daemon=True)
        thread.start()
        deadline = time.monotonic() + JOIN_SECONDS
        while thread.is_alive():
            thread.join(POLL_SECONDS)
            # This wait has its own limit.
            activity.report()
            if self.has_lost_one():
                raise PeerLost
            if time.monotonic() > deadline:
                break
        if thread.is_alive() or failures:
            cause = failures[0] if failures else "check the log of the other pods"
            raise ServiceUnavailable(
                f"the {self.size} processes of train.nodes and train.processesPerNode have not met within "
                f"{JOIN_SECONDS:.0f} s: {cause}"
            )
        group = ShardedRankGroup if self.is_sharded else RankGroup
        return group(self.rank, self.size, self._stop, self.has_lost_one, self.left)

    def has_lost_one(self) -> bool:
        """Return whether another process of this pod has ended before the training has."""
        # Exit code 0 is no loss: at the end of training, another process may be done before this process.
        return any(
            process.poll() not in {None, ExitCode.DONE}
            for process in self._processes.values()
        )

    def wait(self, seconds: float) -> None:
        """Wait so long for the others to end by themselves."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(
            process.poll() is None for process in self._processes.values()
        ):
            time.sleep(POLL_SECONDS)

    def close(self) -> None:
        """Kill the others and remove their files."""
        # First, because the thread of `end_in_hang` would take the killed processes for lost processes.
        self.left.set()
        for process in self._processes.values():
            process.kill()
            process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def failure(self) -> StageError | None:
        """Return the failure of a process that ended by its own fault; None if there is none."""
        for number, process in self._processes.items():
            failure = self._failure_of(number, process.poll())
            if failure:
                return failure
        return None

    def _failure_of(self, number: int, code: int | None) -> StageError | None:
        if code is None or code in {ExitCode.DONE, ExitCode.INTERRUPTED}:
            return None
        if code < 0:
            cause = "the lines before this line may say why"
            # The kernel sends SIGKILL if memory is short.
            if -code == SIGKILL:
                cause = (
                    "the container may be out of memory: raise train.pod.resources.limits.memory, or lower "
                    "train.processesPerNode"
                )
            return ServiceUnavailable(
                f"process {number} of {self.size} was killed by {Signals(-code).name}: {cause}"
            )
        failure = self._report_of(number)
        text = f"process {number} of {self.size}: {failure.message}"
        if failure.device:
            return DeviceFailed(text)
        for kind in FAILURES:
            if kind.exit_code == code:
                return kind(text)
        return StageError(text)

    def _report_of(self, number: int) -> Failure:
        try:
            message = TerminationMessage.model_validate_json(
                self._termination_log(number).read_bytes()
            )
        except (OSError, ValidationError):
            text = "it has left no message; the lines before this line may say why"
            return Failure(message=text)
        return message.failure or Failure(message="it has left no failure")

    def _listen(self) -> TCPStore:
        """Open the store by which all processes find each other: if all are in this pod, nothing else can reach it."""
        # Any free port: several local runs may share this machine.
        listen: Callable[[], socket.socket] = listen_on_loopback
        if self._environment.master_address:
            # The other pods know the port from the contract.
            listen = partial(listen_on_all_addresses, RENDEZVOUS_PORT)
        server = listen()
        port = server.getsockname()[1]
        # The store takes over a socket that listens already, so no other program can take the port in between.
        options = {
            "is_master": True,
            "wait_for_workers": False,
            "master_listen_fd": server.detach(),
        }
        return TCPStore(loopback(), port, timeout=TIMEOUT, **options)

    def _start(self, number: int) -> Process:
        environment = replace(
            self._environment,
            local_rank=number,
            master_port=self._own_store.port if self._own_store else RENDEZVOUS_PORT,
            termination_log=self._termination_log(number),
        )
        return start_module(
            "finetune_trainer", "train", variables=environment.variables()
        )

    def _termination_log(self, number: int) -> Path:
        return self._folder / f"termination-{number}.json"

    def _meet(self, failures: list[BaseException]) -> None:
        try:
            store = self._own_store or self._connect()
            # Gloo beside NCCL: counts and flags are summed on the CPU, without waiting for the GPU's work.
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            if not self._environment.master_address:
                # The machine's own name may have no address.
                os.environ.setdefault(
                    "GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0"
                )
            init_process_group(
                backend,
                store=store,
                rank=self.rank,
                world_size=self.size,
                timeout=TIMEOUT,
            )
        except Exception as error:  # noqa: BLE001  torch raises errors of many kinds
            failures.append(error)

    def _connect(self) -> TCPStore:
        """Connect to the store of the first process. Its pod may have no address yet."""
        host = self._environment.master_address or loopback()
        port = self._environment.master_port or RENDEZVOUS_PORT
        deadline = time.monotonic() + JOIN_SECONDS
        while True:
            try:
                store = TCPStore(host, port, is_master=False, timeout=CONNECT_TIMEOUT)
            except (RuntimeError, OSError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(1)
            else:
                # In the first sum NCCL asks the store for the first process's id. That process may not be ready yet.
                store.set_timeout(TIMEOUT)
                return store
