"""This trainer, as bench/train.py runs it."""

import os
import shutil

from finetune_trainer.contract import Environment
from finetune_trainer.runtime.stage_folder import Context
from finetune_trainer.stages import train as train_stage
from finetune_trainer.stop_signal import StopSignal
from finetune_trainer.training import loop
from train_bench.benchmark import PAUSES_EVERY, PAUSES_RANK, Benchmark
from train_bench.measuring import Pause, StepTimes, timed


def train(benchmark: Benchmark, **changes: int) -> list[float]:
    """Train with our loop; return the times at which the steps ended."""
    config = benchmark.config("ours", **changes)
    environment = Environment(benchmark.folder)
    folder = environment.stage_dir("train", "ours")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.environ["FINETUNE_CONFIG"] = config.model_dump_json(
        by_alias=True
    )  # for the other processes
    times = StepTimes(environment, benchmark.options.clock)
    train_stage.run(config, Context(environment, folder, times, StopSignal()))
    return times.ends


def pauses(benchmark: Benchmark) -> tuple[list[float], list[Pause]]:
    """Return the times at which the steps ended, and how long the loop waits at each checkpoint.

    That is the snapshot and the start of its write.
    """
    checkpoints: list[Pause] = []
    with timed(loop, "save", checkpoints):
        return train(benchmark, rank=PAUSES_RANK, every=PAUSES_EVERY), checkpoints
