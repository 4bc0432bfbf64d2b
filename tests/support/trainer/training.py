"""Workspaces with packed rows, and runs of the train stage in them."""

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, product
from pathlib import Path
from signal import SIGKILL, SIGTERM, Signals
from typing import Any, TypeVar

import numpy as np

from finetune_trainer.contract import Environment, ExitCode, TrainConfig, TrainResult
from finetune_trainer.data.documents import Document
from finetune_trainer.data.packing.writer import PackedWriter
from finetune_trainer.runtime import artifacts
from finetune_trainer.runtime.progress.progress import ProgressReporter
from finetune_trainer.runtime.stage_folder import Context
from finetune_trainer.stop_signal import StopSignal

os.environ.setdefault("HF_HUB_OFFLINE", "1")

PREPARED = "p" * 16
IDENTITY = "a" * 16

ALL = os.environ.get("TRAINING") == "all"
KILLS = 10 if ALL else 4
"""At least one for each of two targets and two signals."""
STEPS_OF_KILLED = 10 * KILLS
"""So many that none of KILLS finds the training done."""

T = TypeVar("T")


def stop_code(number: Signals) -> int:
    """Return the exit code of a stage that got a signal while it ran."""
    return ExitCode.INTERRUPTED if number == SIGTERM else -number


def random_kills(
    targets: Sequence[T], longest_delay: float
) -> Iterator[tuple[T, float, Signals]]:
    """Yield KILLS targets, delays in seconds and signals, the same ones in every run.

    Each target gets each signal before one gets the same signal again.
    """
    generator = np.random.Generator(np.random.Philox(KILLS))
    kinds = [*product(targets, (SIGTERM, SIGKILL))]
    rounds = chain.from_iterable(
        generator.permutation(len(kinds)) for _ in range(KILLS)
    )
    for kind in islice(rounds, KILLS):
        target, number = kinds[kind]
        yield target, generator.uniform(0, longest_delay), number


def document(
    start: int, length: int, *, prompt: int = 3, vocabulary: int = 320
) -> Document:
    """Return a document with a learnable pattern: each token is 7 more than the one before, modulo the vocabulary.

    The first `prompt` tokens are not in the loss.
    """
    tokens = 3 + (start + 7 * np.arange(length, dtype="<i4")) % (vocabulary - 3)
    loss_mask = np.ones(length, dtype="u1")
    loss_mask[:prompt] = 0
    return Document(tokens.astype("<i4"), loss_mask)


def documents(count: int, *, seed: int = 0, longest: int = 20) -> list[Document]:
    """Return seeded random documents of 6 tokens to less than `longest`."""
    generator = np.random.Generator(np.random.Philox(seed))
    return [
        document(int(generator.integers(300)), int(generator.integers(6, longest)))
        for _ in range(count)
    ]


def pairs(count: int, *, seed: int = 0, longest: int = 20) -> list[Document]:
    """Return the documents of seeded random pairs, one after the other: chosen is the pattern of `document`.

    Both have the same first three tokens. The rejected one goes on with other tokens and another length.
    """
    generator = np.random.Generator(np.random.Philox(seed))
    documents_of_pairs = []
    for _ in range(count):
        chosen = document(
            int(generator.integers(300)), int(generator.integers(6, longest))
        )
        rejected = document(
            int(chosen.tokens[2]) + 40, int(generator.integers(6, longest))
        )
        rejected.tokens[:3] = chosen.tokens[:3]
        documents_of_pairs += [chosen, rejected]
    return documents_of_pairs


def write_rows(
    workspace: Path,
    train: Iterable[Document],
    validation: Iterable[Document] = (),
    *,
    context_length: int = 32,
    prepared: str = PREPARED,
    packing: bool = True,
    pairs: bool = False,
) -> Path:
    """Write packed rows into the output folder of a prepare stage and return that folder.

    With `pairs`, two documents at a time are a pair.
    """
    output = workspace / "prepare" / prepared / "output"
    with artifacts.atomic_folder(output) as folder:
        with PackedWriter(
            folder, context_length, 0, packing=packing, pairs=pairs
        ) as writer:
            for document in train:
                writer.add("train", document)
            for document in validation:
                writer.add("validation", document)
        artifacts.seal(folder, known_digests=writer.digests())
    return output


def train_config(model: Path, **changes: object) -> TrainConfig:
    """Return a config that uses random numbers everywhere it can; `changes` are fields of the recipe.

    `checkpoint`, `identity` and `seed` may be changed, too.
    """
    checkpoint = changes.pop("checkpoint", {"every_steps": 5})
    identity = changes.pop("identity", IDENTITY)
    seed = changes.pop("seed", 11)
    recipe: dict[str, object] = {
        "max_steps": 20,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "dtype": "FP32",
        "lora": {"rank": 4, "alpha": 8, "dropout": 0.1},
        "optimizer": {"learning_rate": 5e-3},
        "eval_steps": 8,
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
    """Return the SHA-256 of the trained weights, of an adapter or of the whole model."""
    (weights,) = (stage_folder(workspace, identity) / "output").glob("*.safetensors")
    return artifacts.digest_file(weights)


class StoppingProgress(ProgressReporter):
    """Requests a stop when step `at` is finished or, with `validating`, when the validation at that step begins.

    Keeps all updates in `history`.
    """

    def __init__(
        self,
        environment: Environment,
        stop: StopSignal,
        at: int | None,
        *,
        validating: bool,
    ) -> None:
        super().__init__("train", environment)
        self._stop = stop
        self._at = at
        self._note = "validating" if validating else None
        self.history: list[dict[str, Any]] = []

    def update(self, **fields: Any) -> None:
        super().update(**fields)
        self.history.append(fields)
        if fields.get("step") == self._at and fields.get("note") == self._note:
            self._stop.requested = True


def run_train(
    config: TrainConfig,
    workspace: Path,
    *,
    stop_at: int | None = None,
    validating: bool = False,
) -> TrainResult:
    """Run the stage in this process; an exception of the stage is raised."""
    from finetune_trainer.stages import train  # noqa: PLC0415  only tests that train import torch

    stop = StopSignal()
    variables = environment(workspace)
    progress = StoppingProgress(variables, stop, stop_at, validating=validating)
    folder = stage_folder(workspace, config.identity)
    folder.mkdir(parents=True, exist_ok=True)
    result = train.run(config, Context(variables, folder, progress, stop))
    assert result
    return result
