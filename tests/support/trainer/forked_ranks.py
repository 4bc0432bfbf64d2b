"""The processes that a forked stage trains with, forked with it: their imports would take seconds."""

import json
import os
import signal
import time
from collections.abc import Mapping

import torch

from finetune_trainer.contract.environment import LOCAL_RANK
from finetune_trainer.parent_death import die_with_parent
from finetune_trainer.runtime.entrypoint import main
from finetune_trainer.training.distributed import processes


def fork_ranks(count: int) -> None:
    """Fork the processes that the stage will start to train with it. Each waits for its variables."""
    forked = {number: ForkedRank() for number in range(1, count)}

    def start_module(
        _module: str, _stage: str, *, variables: Mapping[str, str]
    ) -> ForkedRank:
        return forked[int(variables[LOCAL_RANK])].start(variables)

    processes.start_module = start_module  # type: ignore[assignment,attr-defined]  # replaces what the module imported


class ForkedRank:
    """A process that trains beside the stage's; has what `rank_processes` needs of a Popen."""

    def __init__(self) -> None:
        """Fork it, and die with this process then."""
        read, self._write = os.pipe()
        self.pid = os.fork()
        self._code: int | None = None
        if not self.pid:
            os.close(self._write)
            die_with_parent()
            with os.fdopen(
                read
            ) as pipe:  # not to its end: later forks have the other end of it, too
                os.environ.update(json.loads(pipe.readline()))
            os.setsid()
            torch.set_num_threads(1)  # as in prefork.run
            os._exit(main(["train"]))
        os.close(read)

    def start(self, variables: Mapping[str, str]) -> "ForkedRank":
        """Start the stage with these variables."""
        with os.fdopen(self._write, "w") as pipe:
            pipe.write(json.dumps(dict(variables)) + "\n")
        return self

    def poll(self) -> int | None:
        """Return the exit code, None while the process runs."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self) -> int:
        """Wait for the process to end."""
        while self.poll() is None:
            time.sleep(0.001)
        return self.poll() or 0

    def kill(self) -> None:
        """Kill the process, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
