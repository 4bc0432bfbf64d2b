"""Measure training on one GPU with every option on and off, and write one JSON file.

    bash bench/gpu.sh [RESULT.json]
    python bench/gpu.py --device cpu --shape tiny       # tries the plan out; its figures mean nothing

The model has the shape of an 8B Llama and random weights, made on the device: nothing is downloaded. The rows are
packed, 4,096 tokens each, all of them full. Each variant is a run of the train stage. Of each the file has:

- tokens per second, from the end of the second step to the end of the last, and the peak memory;
- MFU: 4 FLOPs per weight and token, because frozen weights need no gradient, over the chip's dense bf16 peak. The
  input's embedding is not counted, because a token only reads one row of it. Where it is the output's weight, too, it
  is counted once. Attention's products of tokens with tokens are not counted;
- whether attention took the boundaries of documents, or why it kept a mask, which is an error.

Besides the variants: how long a checkpoint holds training up, whether a run whose process was killed and resumed in
another one has the bytes of one that was not, and the seconds from the start of that process to its first step, with
all imports, and the model made on the device in place of read. QLoRA and 8-bit AdamW are not measured: bitsandbytes is
larger than what is carried to such a machine.
"""

import argparse
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
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typing_extensions import override

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "trainer"), str(ROOT / "bench")]

from finetune_trainer.contract import Environment, TrainConfig  # noqa: E402
from finetune_trainer.runtime.artifacts import digest_file  # noqa: E402
from finetune_trainer.runtime.stage_folder import Context  # noqa: E402
from finetune_trainer.stages import train  # noqa: E402
from finetune_trainer.stop_signal import StopSignal  # noqa: E402
from finetune_trainer.training import document_attention, loop, loss, methods, model  # noqa: E402
from train_bench.measuring import Pause, StepTimes, make_rows, timed  # noqa: E402

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
    "mask": {"replaced": (document_attention, "runs_on", lambda _device, _dtype: False)},
}
"""What differs from the recipe in `Plan.config`, and what is replaced in the code. The slowest comes last."""
FIRST = next(iter(VARIANTS))
"""The variant without a change, which the others are compared with."""
RESUMED_STEPS, SAVED_EVERY = 6, 2
"""Steps of the runs that are compared byte for byte, and between their checkpoints."""


class Plan:
    """The model, the rows and the runs."""

    def __init__(self, folder: Path, shape: str, device: str) -> None:
        options, self.context, self.steps = SHAPES[shape]
        self.folder, self.shape, self.device = folder, shape, device
        self.rows_per_step = 8 if shape == "8b" else 4
        self.llama = LlamaConfig(**options, max_position_embeddings=self.context, dtype="bfloat16")
        self.weights = multiplied_weights(self._meta())

    def write(self) -> None:
        """Write the model's configuration and the rows."""
        self.llama.save_pretrained(self.folder / "model")
        make_rows(self.folder, 64, 1.0, context=self.context, vocabulary=self.llama.vocab_size)

    def _meta(self) -> Any:
        with torch.device("meta"):
            return LlamaForCausalLM(copy.deepcopy(self.llama))  # a model writes its attention into its configuration

    def load(self, *_: object) -> Any:
        """Return the model with random weights, in place of reading 16 GB of files."""
        torch.manual_seed(0)
        made = self._meta().to(torch.bfloat16).to_empty(device=self.device)
        for parameter in made.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        with torch.device(self.device):
            made.model.rotary_emb = type(made.model.rotary_emb)(self.llama)  # its frequencies are no parameters
        return made.eval()

    def config(self, identity: str, *, every: int = 10**6, dropout: float = 0.0, **changes: Any) -> TrainConfig:
        """Return the config of a run: rank 16 on all linear layers, bf16, rows_per_step rows a step."""
        micro_batch = changes.pop("micro_batch_size", 1)
        recipe = {
            "max_steps": self.steps,
            "micro_batch_size": micro_batch,
            "gradient_accumulation_steps": self.rows_per_step // micro_batch,
            "lora": {"rank": 16, "alpha": 32, "dropout": dropout},
            "optimizer": {"learning_rate": 1e-4, "scheduler": "Constant", "warmup_fraction": 0.0},
        }
        uri = f"file://{self.folder / 'model'}"
        content = {"identity": identity, "prepare": "rows", "model": {"uri": uri}, "recipe": recipe | changes}
        return TrainConfig.model_validate(content | {"checkpoint": {"every_steps": every}})

    def compared(self, identity: str) -> TrainConfig:
        """Return the config of a run whose bytes are compared; it has dropout."""
        return self.config(identity, every=SAVED_EVERY, max_steps=RESUMED_STEPS, dropout=0.05)

    def run(self, config: TrainConfig, progress: type[StepTimes] = StepTimes) -> dict[str, Any]:
        """Run the train stage, from its newest checkpoint if it has one; return what was measured."""
        environment = Environment(self.folder, manifest_dir=self.folder)
        stage = environment.stage_dir("train", config.identity)
        stage.mkdir(parents=True, exist_ok=True)
        times = progress(environment, "wall")
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        problems: list[str] = []
        with recorded(document_attention, "_problem_with", problems):
            train.run(config, Context(environment, stage, times, StopSignal()))
        seconds = [after - before for before, after in zip(times.ends[1:], times.ends[2:], strict=False)]
        return {
            "first step at": time.time() - time.perf_counter() + times.ends[0] if times.ends else None,
            "attention by boundaries": problems == [""],
            "seconds a step": statistics.median(seconds) if seconds else None,
            "peak GiB": torch.cuda.max_memory_allocated() / 2**30 if self.device == "cuda" else None,
        } | ({"error": f"attention kept its mask: {problems[0]}"} if any(problems) else {})

    def run_anew(self, config: TrainConfig) -> dict[str, Any]:
        """Run the train stage from the start."""
        shutil.rmtree(self.folder / "train" / config.identity, ignore_errors=True)
        return self.run(config)

    def speed(self, name: str) -> dict[str, Any]:
        """Measure one variant: the first in all steps, the others in half of them, so that all fit the time."""
        changes = {"max_steps": self.steps if name == FIRST else self.steps // 2} | VARIANTS[name]
        change = changes.pop("replaced", None)
        with replaced(*change) if change else contextlib.nullcontext():
            found = self.run_anew(self.config("speed", **changes))
        del found["first step at"]
        tokens = self.rows_per_step * self.context / found["seconds a step"]
        flops = next((peak for chip, peak in PEAK_FLOPS.items() if chip in device_name(self.device)), None)
        return found | {"tokens/s": tokens, "MFU": 4 * self.weights * tokens / flops if flops else None}

    def pauses(self) -> dict[str, Any]:
        """Measure how long the loop waits at a checkpoint, in milliseconds.

        That is the snapshot and the start of its write.
        """
        found: list[Pause] = []
        with timed(loop, "save", found):
            self.run_anew(self.config("pauses", every=2, dropout=0.05))
        return {"milliseconds": [1e3 * pause.seconds for pause in found]}

    def resumes(self) -> dict[str, Any]:
        """Compare the adapter of a process that was killed, and resumed by another, with that of a whole run."""
        for name in ("whole", "again"):
            self.run_anew(self.compared(name))
            release_memory(self.device)
        codes = [self.process("killed", "--kill").returncode]
        started = time.time()
        resumed = self.process("killed")
        codes.append(resumed.returncode)
        if codes != [-signal.SIGKILL, 0]:
            return {"error": f"the processes ended with {codes}: {resumed.stderr[-1000:]}"}
        output = "train/{}/output/adapter_model.safetensors"
        digests = {name: digest_file(self.folder / output.format(name)) for name in ("whole", "again", "killed")}
        return {
            "equal bytes": digests["whole"] == digests["killed"],
            "repeatable": digests["whole"] == digests["again"],
            "seconds to the first step": json.loads(resumed.stdout.splitlines()[-1])["first step at"] - started,
        }

    def process(self, name: str, *options: str) -> "subprocess.CompletedProcess[str]":
        """Run the train stage of a name in a process of its own, which prints what it measured."""
        place = [f"--device={self.device}", f"--shape={self.shape}", f"--folder={self.folder}"]
        command = [sys.executable, __file__, *place, f"--run={name}", *options]
        return subprocess.run(command, check=False, capture_output=True, text=True)


class KilledOnceSaved(StepTimes):
    """Kills this process as soon as a checkpoint is durable."""

    @override
    def update(self, **fields: object) -> None:
        super().update(**fields)
        if fields.get("saved_step"):
            os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: object) -> Any:
    """Replace an attribute while the context is open."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextlib.contextmanager
def recorded(owner: Any, name: str, values: list[Any]) -> Any:
    """Append what each call of a function returns while the context is open."""
    original = getattr(owner, name)

    def call(*arguments: object) -> object:
        values.append(original(*arguments))
        return values[-1]

    with replaced(owner, name, call):
        yield


def multiplied_weights(model: Any) -> int:
    """Return the number of weights that each token is multiplied by. A weight that two layers share counts once."""
    embedding = model.get_input_embeddings().weight
    read_only = 0 if embedding is model.get_output_embeddings().weight else embedding.numel()
    return int(sum(parameter.numel() for parameter in model.parameters()) - read_only)


def device_name(device: str) -> str:
    """Return the name of the chip."""
    return torch.cuda.get_device_name() if device == "cuda" else device


def release_memory(device: str) -> None:
    """Release the memory of what is no longer used."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def main() -> None:
    """Run the plan, or one run of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--seconds", type=float, default=480, help="no measurement begins later than this")
    parser.add_argument("--output", type=Path, default=Path("gpu.json"))
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--kill", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        plan = Plan(folder, options.shape, options.device)
        stack.enter_context(replaced(methods, "load_base", plan.load))
        if options.run:
            found = plan.run(plan.compared(options.run), KilledOnceSaved if options.kill else StepTimes)
            print(json.dumps(found))
        else:
            plan.write()
            measure(plan, options.seconds, options.output)


def measure(plan: Plan, limit: float, output: Path) -> None:
    """Run the plan until the time is up, and write the file after each part. What fails is recorded with its error."""
    began, results = time.monotonic(), {"device": device_name(plan.device), "torch": torch.__version__}
    work = {"resumes": plan.resumes, "pauses": plan.pauses}
    for name in (FIRST, *work, *list(VARIANTS)[1:]):
        if time.monotonic() - began > limit:
            results[name] = {"error": "no time left"}
        else:
            try:
                results[name] = work[name]() if name in work else plan.speed(name)
            except Exception as error:  # noqa: BLE001  the rest of the plan must run
                results[name] = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-2000:]}
        release_memory(plan.device)
        output.write_text(json.dumps(results, indent=1, default=str) + "\n")
        print(name, json.dumps({k: v for k, v in results[name].items() if k != "trace"}), flush=True)


if __name__ == "__main__":
    main()
