"""A workspace with packed rows and a tiny model, and runs of the train stage in it."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from finetune_trainer.contract import Environment, TrainConfig, TrainResult
from finetune_trainer.data.packing import Document, PackedWriter
from finetune_trainer.runtime import artifacts
from finetune_trainer.runtime.progress import ProgressReporter
from finetune_trainer.runtime.stage_folder import Context
from finetune_trainer.stop_signal import StopSignal

os.environ.setdefault("HF_HUB_OFFLINE", "1")

PREPARED = "p" * 16
IDENTITY = "a" * 16


def document(start: int, length: int, *, prompt: int = 3, vocabulary: int = 320) -> Document:
    """Tokens that count upwards, so that a model can learn them; the first few are not counted."""
    tokens = 3 + (start + 7 * np.arange(length, dtype="<i4")) % (vocabulary - 3)
    counted = np.ones(length, dtype="u1")
    counted[:prompt] = 0
    return Document(tokens.astype("<i4"), counted)


def documents(count: int, *, seed: int = 0, longest: int = 20) -> list[Document]:
    generator = np.random.Generator(np.random.Philox(seed))
    return [document(int(generator.integers(300)), int(generator.integers(6, longest))) for _ in range(count)]


def write_rows(
    workspace: Path,
    train: Iterable[Document],
    validation: Iterable[Document] = (),
    *,
    context_length: int = 32,
    prepared: str = PREPARED,
) -> Path:
    """Put packed rows where the stage prepare would have put them."""
    output = workspace / "prepare" / prepared / "output"
    with artifacts.atomic_folder(output) as folder:
        with PackedWriter(folder, context_length, 0) as writer:
            for each in train:
                writer.add("train", each)
            for each in validation:
                writer.add("validation", each)
        artifacts.seal(folder)
    return output


def train_config(model: Path, **changes: object) -> TrainConfig:
    """A config in which everything that draws random numbers is on; changes are by the recipe's field names."""
    checkpoint = changes.pop("checkpoint", {"every_steps": 5})
    identity = changes.pop("identity", IDENTITY)
    seed = changes.pop("seed", 11)
    recipe: dict[str, object] = {
        "max_steps": 20,
        "batch_size": 2,
        "gradient_accumulation": 2,
        "precision": "fp32",
        "lora": {"rank": 4, "alpha": 8, "dropout": 0.1},
        "optimizer": {"learning_rate": 5e-3},
        "validate_every_steps": 8,
    }
    return TrainConfig.model_validate(
        {
            "identity": identity,
            "seed": seed,
            "prepare": PREPARED,
            "model": {"uri": f"file://{model}"},
            "recipe": recipe | changes,
            "checkpoint": checkpoint,
        }
    )


def environment(workspace: Path) -> Environment:
    return Environment(
        workspace=workspace,
        termination_log=workspace / "termination.json",
        progress_file=workspace / "progress.json",
        manifest_dir=workspace,
    )


def stage_folder(workspace: Path, identity: str = IDENTITY) -> Path:
    return workspace / "train" / identity


def adapter_digest(workspace: Path, identity: str = IDENTITY) -> str:
    """SHA-256 of the adapter's weights."""
    return artifacts.digest_file(stage_folder(workspace, identity) / "output" / "adapter_model.safetensors")


class StoppingProgress(ProgressReporter):
    """Asks the stage to stop as soon as a step is finished; with `validating`, when the validation there begins."""

    def __init__(self, environment: Environment, stop: StopSignal, at: int | None, *, validating: bool) -> None:
        super().__init__("train", environment)
        self._stop, self._at, self._note = stop, at, "validating" if validating else None
        self.history: list[dict[str, Any]] = []

    def update(self, **fields: Any) -> None:
        super().update(**fields)
        self.history.append(fields)
        if fields.get("step") == self._at and fields.get("note") == self._note:
            self._stop.requested = True


def run_train(
    config: TrainConfig, workspace: Path, *, stop_at: int | None = None, validating: bool = False
) -> TrainResult:
    """Run the stage in this process; raise what it raises."""
    from finetune_trainer.stages import train  # noqa: PLC0415  torch only where a test trains

    stop = StopSignal()
    where = environment(workspace)
    progress = StoppingProgress(where, stop, stop_at, validating=validating)
    folder = stage_folder(workspace, config.identity)
    folder.mkdir(parents=True, exist_ok=True)
    return train.run(config, Context(where, folder, progress, stop))
