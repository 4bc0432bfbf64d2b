"""This trainer, as bench/train.py runs it."""

import shutil

from finetune_trainer.contract import Environment
from finetune_trainer.runtime.stage_folder import Context
from finetune_trainer.stages import train as train_stage
from finetune_trainer.stop_signal import StopSignal
from finetune_trainer.training.checkpoint_manager import CheckpointManager
from finetune_trainer.training.loop import TrainingRun
from train_bench.benchmark import PAUSES_EVERY, PAUSES_RANK, Benchmark
from train_bench.measuring import StepTimes, timed


def train(benchmark: Benchmark, **changes: int) -> list[float]:
    """Train with our loop; return the times at which the steps ended."""
    config = benchmark.config("ours", **changes)
    environment = Environment(benchmark.folder)
    folder = environment.stage_dir("train", "ours")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    times = StepTimes(environment, benchmark.options.clock)
    train_stage.run(config, Context(environment, folder, times, StopSignal()))
    return times.ends


def pauses(benchmark: Benchmark) -> list[float]:
    """Return the seconds for which each checkpoint pauses training: its snapshot and the start of its write."""
    parts: list[float] = []
    with timed(TrainingRun, "snapshot", parts), timed(CheckpointManager, "save", parts):
        train(benchmark, rank=PAUSES_RANK, every=PAUSES_EVERY)
    return [snapshot + save for snapshot, save in zip(parts[::2], parts[1::2], strict=True)]
