"""What all trainers of bench/train.py share: the model, the rows and the options."""

import argparse
from pathlib import Path

from finetune_trainer.contract import TrainConfig
from finetune_trainer.data.packing.rows import PackedRows

VOCABULARY = 8192
CONTEXT = 128
BATCH = 4
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


PAUSES_RANK = 128
"""The adapter's rank where the pauses for checkpoints are measured: it makes a checkpoint of 105 MB."""
PAUSES_EVERY = 2
"""The steps from one of these checkpoints to the next."""
RANKS_EVERY = 4
"""The same with several processes, where steps without a checkpoint are compared with those that wait for one."""


class Benchmark:
    """A folder with a model and rows, and the options of the command line."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder = folder
        self.options = options
        self.model = folder / "model"
        self.rows = PackedRows(folder / "prepare" / "rows" / "output", "train")

    def config(
        self,
        identity: str,
        *,
        rank: int = 16,
        every: int = 10**6,
        steps: int | None = None,
    ) -> TrainConfig:
        """Return the train config that all trainers follow. Its first step is not timed."""
        recipe = {
            "max_steps": steps or self.options.steps + 1,
            "micro_batch_size": BATCH,
            "dtype": self.options.dtype,
            "method": self.options.method,
            "objective": self.options.objective,
            "processes_per_node": self.options.processes,
            "parallelism": self.options.parallelism,
            "optimizer": {
                "learning_rate": 1e-4,
                "scheduler": "Constant",
                "warmup_fraction": 0.0,
            },
        }
        if self.options.method != "Full":
            dropout = self.options.dropout
            recipe["lora"] = {
                "rank": rank,
                "alpha": 32,
                "dropout": dropout,
                "target_modules": TARGETS,
            }
        return TrainConfig.model_validate(
            {
                "identity": identity,
                "prepare": "rows",
                "model": {"uri": f"file://{self.model}"},
                "recipe": recipe,
                "checkpoint": {"every_steps": every},
            }
        )
