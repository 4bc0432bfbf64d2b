"""A model with the shape of an 8B Llama and random weights, made on the device: bench/gpu.py trains it."""

import contextlib
import copy
import gc
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typing_extensions import override

from finetune_trainer.contract import Environment, TrainConfig
from finetune_trainer.runtime.artifacts import digest_file
from finetune_trainer.runtime.stage_folder import Context
from finetune_trainer.stages import train
from finetune_trainer.stop_signal import StopSignal
from finetune_trainer.training import loop
from finetune_trainer.training.methods import registry
from finetune_trainer.training.model import document_attention, loss, model
from train_bench.measuring import Pause, StepTimes, make_rows, recorded, replaced, timed

PROGRAM = Path(__file__).parents[1] / "gpu.py"
"""It runs one training in a process of its own."""
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Dense bf16 peak of a chip, by a part of its name, from the vendors' data sheets."""
SHAPES: dict[str, tuple[dict[str, int], int, int]] = {
    "8b": (
        {
            "vocab_size": 128_256,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
        4096,
        8,
    ),
    "tiny": (
        {
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
        64,
        6,
    ),
}
"""The model, the tokens of a row, and the steps of a run."""
VARIANTS: dict[str, dict[str, Any]] = {
    "all on": {},
    "micro batch 2": {"micro_batch_size": 2},
    "micro batch 4": {"micro_batch_size": 4},
    "compiled layers": {"compile": True, "micro_batch_size": 2},
    "activation checkpointing": {"gradient_checkpointing": True, "micro_batch_size": 4},
    "dropout 0.05": {"dropout": 0.05},
    "PEFT's forward pass": {"replaced": (model, "speed_up_lora", lambda _model: None)},
    "all logits": {"replaced": (loss, "CHUNK_BYTES", 1 << 60)},
    "mask": {
        "replaced": (document_attention, "runs_on", lambda _device, _dtype: False)
    },
}
"""What differs from the recipe in `LargeModel.config`, and what is replaced in the code. The slowest comes last."""
FIRST = next(iter(VARIANTS))
"""The variant without a change, which the others are compared with."""
RESUMED_STEPS = 6
SAVED_EVERY = 2
"""Steps of the runs that are compared byte for byte, and between their checkpoints."""


class LargeModel:
    """The model, the rows and the runs of the train stage."""

    def __init__(self, folder: Path, shape: str, device: str) -> None:
        options, self.context, self.steps = SHAPES[shape]
        self.folder = folder
        self.shape = shape
        self.device = device
        self.rows_per_step = 8 if shape == "8b" else 4
        self.llama = LlamaConfig(
            **options, max_position_embeddings=self.context, dtype="bfloat16"
        )
        self.weights = multiplied_weights(self._meta())

    def write(self) -> None:
        """Write the model's configuration and the rows."""
        self.llama.save_pretrained(self.folder / "model")
        make_rows(
            self.folder, 64, 1.0, context=self.context, vocabulary=self.llama.vocab_size
        )

    def _meta(self) -> Any:
        with torch.device("meta"):
            return LlamaForCausalLM(
                copy.deepcopy(self.llama)
            )  # a model writes its attention into its configuration

    def load(self, *_: object) -> Any:
        """Return the model with random weights, in place of reading 16 GB of files."""
        torch.manual_seed(0)
        made = self._meta().to(torch.bfloat16).to_empty(device=self.device)
        for parameter in made.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        with torch.device(self.device):
            made.model.rotary_emb = type(made.model.rotary_emb)(
                self.llama
            )  # its frequencies are no parameters
        return made.eval()

    def config(
        self, identity: str, *, every: int = 10**6, dropout: float = 0.0, **changes: Any
    ) -> TrainConfig:
        """Return the config of a run: rank 16 on all linear layers, bf16, rows_per_step rows a step."""
        micro_batch = changes.pop("micro_batch_size", 1)
        recipe = {
            "max_steps": self.steps,
            "micro_batch_size": micro_batch,
            "gradient_accumulation_steps": self.rows_per_step // micro_batch,
            "lora": {"rank": 16, "alpha": 32, "dropout": dropout},
            "optimizer": {
                "learning_rate": 1e-4,
                "scheduler": "Constant",
                "warmup_fraction": 0.0,
            },
        }
        uri = f"file://{self.folder / 'model'}"
        content = {
            "identity": identity,
            "prepare": "rows",
            "model": {"uri": uri},
            "recipe": recipe | changes,
        }
        return TrainConfig.model_validate(
            content | {"checkpoint": {"every_steps": every}}
        )

    def compared(self, identity: str) -> TrainConfig:
        """Return the config of a run whose bytes are compared; it has dropout."""
        return self.config(
            identity, every=SAVED_EVERY, max_steps=RESUMED_STEPS, dropout=0.05
        )

    def run(
        self, config: TrainConfig, progress: type[StepTimes] = StepTimes
    ) -> dict[str, Any]:
        """Run the train stage, from its newest checkpoint if it has one; return what was measured."""
        environment = Environment(self.folder, manifest_dir=self.folder)
        stage = environment.stage_dir("train", config.identity)
        stage.mkdir(parents=True, exist_ok=True)
        times = progress(environment, "wall")
        self.reset_peak()
        problems: list[str] = []
        with (
            recorded(document_attention, "_problem_with", problems),
            replaced(registry, "load_base", self.load),
        ):
            train.run(config, Context(environment, stage, times, StopSignal()))
        seconds = [
            after - before
            for before, after in zip(times.ends[1:], times.ends[2:], strict=False)
        ]
        return {
            "start step": times.start_step,
            "first step at": time.time() - time.perf_counter() + times.ends[0]
            if times.ends
            else None,
            "attention by boundaries": problems == [""],
            "seconds a step": statistics.median(seconds) if seconds else None,
            "peak GiB": self.peak_gib(),
        } | (
            {"error": f"attention kept its mask: {problems[0]}"}
            if any(problems)
            else {}
        )

    def reset_peak(self) -> None:
        """Forget the peak memory so far."""
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def peak_gib(self) -> float | None:
        """Return the peak memory of the GPU."""
        return (
            torch.cuda.max_memory_allocated() / 2**30 if self.device == "cuda" else None
        )

    def run_anew(self, config: TrainConfig) -> dict[str, Any]:
        """Run the train stage from the start."""
        shutil.rmtree(self.folder / "train" / config.identity, ignore_errors=True)
        return self.run(config)

    def speed(self, name: str) -> dict[str, Any]:
        """Measure one variant: the first in all steps, the others in half of them, so that all fit the time."""
        changes = {
            "max_steps": self.steps if name == FIRST else self.steps // 2
        } | VARIANTS[name]
        change = changes.pop("replaced", None)
        with replaced(*change) if change else contextlib.nullcontext():
            figures = self.run_anew(self.config("speed", **changes))
        del figures["first step at"], figures["start step"]
        tokens = self.rows_per_step * self.context / figures["seconds a step"]
        device = device_name(self.device)
        peaks = [peak for chip, peak in PEAK_FLOPS.items() if chip in device]
        flops = peaks[0] if peaks else None
        return figures | {
            "tokens/s": tokens,
            "MFU": 4 * self.weights * tokens / flops if flops else None,
        }

    def pauses(self) -> dict[str, Any]:
        """Measure how long the loop waits at a checkpoint, in milliseconds.

        That is the snapshot and the start of its write.
        """
        checkpoints: list[Pause] = []
        with timed(loop, "save", checkpoints):
            self.run_anew(self.config("pauses", every=2))
        return {"milliseconds": [1e3 * pause.seconds for pause in checkpoints]}

    def resumes(self) -> dict[str, Any]:
        """Compare the adapter of a process that was killed, and resumed by another, with the adapter of a whole run.

        If they differ, another whole run tells whether runs without a kill do, too.
        """
        codes = [self.process("killed", "--kill").returncode]
        started = time.time()
        resumed = self.process("killed")
        codes.append(resumed.returncode)
        if codes != [-signal.SIGKILL, 0]:
            return {
                "error": f"the processes ended with {codes}: {resumed.stderr[-1000:]}"
            }
        killed = self.take_adapter("killed")
        whole = self.adapter_of_whole_run()
        last = json.loads(resumed.stdout.splitlines()[-1])
        return {
            "resumed from step": last["start step"],
            "equal bytes": killed == whole,
            "repeatable": killed == whole or whole == self.adapter_of_whole_run(),
            "seconds to the end of the first step": last["first step at"] - started,
        }

    def adapter_of_whole_run(self) -> str:
        """Train without a kill; return the digest of the adapter."""
        self.run_anew(self.compared("whole"))
        release_memory(self.device)
        return self.take_adapter("whole")

    def take_adapter(self, name: str) -> str:
        """Remove a run; return the digest of its adapter."""
        folder = self.folder / "train" / name
        digest = digest_file(folder / "output" / "adapter_model.safetensors")
        shutil.rmtree(folder)
        return digest

    def process(self, name: str, *options: str) -> "subprocess.CompletedProcess[str]":
        """Run the train stage of a name in a process of its own, which prints what it measured."""
        place = [
            f"--device={self.device}",
            f"--shape={self.shape}",
            f"--folder={self.folder}",
            f"--run={name}",
        ]
        command = [sys.executable, str(PROGRAM), *place, *options]
        return subprocess.run(command, check=False, capture_output=True, text=True)


class KilledOnceSaved(StepTimes):
    """Kills this process as soon as a checkpoint is durable."""

    @override
    def update(self, **fields: object) -> None:
        super().update(**fields)
        if fields.get("saved_step"):
            os.kill(os.getpid(), signal.SIGKILL)


def multiplied_weights(model: Any) -> int:
    """Return the number of weights that each token is multiplied by. A weight that two layers share counts once."""
    embedding = model.get_input_embeddings().weight
    read_only = (
        0 if embedding is model.get_output_embeddings().weight else embedding.numel()
    )
    return int(sum(parameter.numel() for parameter in model.parameters()) - read_only)


def device_name(device: str) -> str:
    """Return the name of the chip."""
    return torch.cuda.get_device_name() if device == "cuda" else device


def release_memory(device: str) -> None:
    """Release the memory of what is no longer used."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
