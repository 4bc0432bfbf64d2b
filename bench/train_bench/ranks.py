"""Several processes of this trainer that train together, as bench/train.py measures them.

    python -m train_bench.ranks       is another process than the first, which starts it

Each process leaves a file in the workspace: when its steps ended, and how long it waited at which checkpoints.
"""

import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from finetune_trainer.contract import Environment, TrainConfig
from finetune_trainer.runtime.child_process import start_module
from finetune_trainer.runtime.stage_folder import Context
from finetune_trainer.stages import train as train_stage
from finetune_trainer.stop_signal import StopSignal
from finetune_trainer.training import loop
from finetune_trainer.training.distributed import processes
from train_bench import ours
from train_bench.benchmark import PAUSES_RANK, RANKS_EVERY, Benchmark
from train_bench.measuring import StepTimes


class Recorded(NamedTuple):
    """What a process has measured, in seconds of its own clock."""

    ends: list[float]
    """The times at which its steps ended."""
    pauses: dict[str, float]
    """The step after which a checkpoint was saved -> for how long this process waited there."""

    def write(self, workspace: Path, rank: int) -> None:
        """Write the file of a process."""
        (workspace / f"rank-{rank}.json").write_text(json.dumps(self._asdict()))

    @classmethod
    def read(cls, workspace: Path, rank: int) -> "Recorded":
        """Read the file of a process."""
        return cls(**json.loads((workspace / f"rank-{rank}.json").read_text()))


def pauses(benchmark: Benchmark) -> list[float]:
    """Train together with the other processes; return the seconds that the first one waits at each checkpoint."""
    seconds: dict[str, float] = {}
    with (
        recorded_pauses(seconds),
        mock.patch.object(processes, "start_module", start_this_module),
    ):
        ends = ours.train(benchmark, rank=PAUSES_RANK, every=RANKS_EVERY)
    Recorded(ends, seconds).write(benchmark.folder, 0)
    return list(seconds.values())


def start_this_module(*_: str, variables: dict[str, str]) -> object:
    """Start this module in place of the stage's program."""
    return start_module("train_bench.ranks", variables=variables)


@contextmanager
def recorded_pauses(seconds: dict[str, float]) -> Iterator[None]:
    """Record how long this process waits at each checkpoint. Only if the model is sharded do all of them wait there."""
    save = loop.save

    def timed_save(run: loop.TrainingRun, checkpoints: loop.Checkpoints) -> None:
        start = time.perf_counter()
        save(run, checkpoints)
        seconds[str(run.state.step)] = time.perf_counter() - start

    with mock.patch.object(loop, "save", timed_save):
        yield


def take_part() -> None:
    """Train together with the first process, which has set the environment of this one."""
    environment = Environment.read(os.environ)
    seconds = dict[str, float]()
    config = TrainConfig.model_validate_json(os.environ["FINETUNE_CONFIG"])
    times = StepTimes(environment, "wall")
    with (
        recorded_pauses(seconds),
        tempfile.TemporaryDirectory(dir=environment.termination_log.parent) as folder,
    ):
        train_stage.run(config, Context(environment, Path(folder), times, StopSignal()))
        Recorded(times.ends, seconds).write(
            environment.workspace, environment.local_rank
        )


if __name__ == "__main__":
    take_part()
