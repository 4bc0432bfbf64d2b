"""Measure training on one GPU with every option on and off, and write one JSON file.

    bash bench/gpu.sh [RESULT.json]
    python bench/gpu.py --device cpu --shape tiny       # tries the plan out; its figures mean nothing

The model has the shape of an 8B Llama and random weights, made on the device: nothing is downloaded. The rows are
packed, 4,096 tokens each, all of them full. Each variant is a run of the train stage. Of each the file has:

- tokens per second, from the end of the second step to the end of the last, and the peak memory;
- MFU: 4 FLOPs per weight and token, because frozen weights need no gradient, over the chip's dense bf16 peak;
- how long a checkpoint holds training up, and the seconds from the start of a resumed run to its first step;
- whether a run that was stopped and resumed has the bytes of one that was not.
"""

import argparse
import contextlib
import gc
import json
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "trainer"), str(ROOT / "bench")]

from finetune_trainer.contract import Environment, TrainConfig  # noqa: E402
from finetune_trainer.runtime.artifacts import digest_file  # noqa: E402
from finetune_trainer.runtime.errors import Interrupted  # noqa: E402
from finetune_trainer.runtime.stage_folder import Context  # noqa: E402
from finetune_trainer.stages import train  # noqa: E402
from finetune_trainer.stop_signal import StopSignal  # noqa: E402
from finetune_trainer.training import document_attention, loss, methods  # noqa: E402
from finetune_trainer.training.checkpoint_manager import CheckpointManager  # noqa: E402
from finetune_trainer.training.loop import TrainingRun  # noqa: E402
from train_bench.measuring import StepTimes, make_rows, timed  # noqa: E402

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
    "all logits": {"all_logits": True},
    "mask": {"mask": True},
}
"""What differs from the recipe in `Plan.config`. The slowest comes last, where time may be over."""


class Plan:
    """The model, the rows and the runs."""

    def __init__(self, folder: Path, shape: str, device: str) -> None:
        options, self.context, self.steps = SHAPES[shape]
        self.folder, self.device = folder, device
        self.rows_per_step = 16 if shape == "8b" else 4
        self.llama = LlamaConfig(**options, max_position_embeddings=self.context, dtype="bfloat16")
        self.weights = sum(p.numel() for p in self._meta().parameters())
        self.llama.save_pretrained(folder / "model")
        make_rows(folder, 64, 1.0, context=self.context, vocabulary=self.llama.vocab_size)

    def _meta(self) -> Any:
        with torch.device("meta"):
            return LlamaForCausalLM(self.llama)

    def load(self, *_: object) -> Any:
        """Return the model with random weights, in place of reading 16 GB of files."""
        torch.manual_seed(0)
        model = self._meta().to(torch.bfloat16).to_empty(device=self.device)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        with torch.device(self.device):
            model.model.rotary_emb = type(model.model.rotary_emb)(self.llama)  # its frequencies are no parameters
        return model.eval()

    def config(self, identity: str, *, every: int = 10**6, dropout: float = 0.0, **changes: Any) -> TrainConfig:
        """Return the config of a run: rank 16 on all linear layers, bf16, 16 rows a step."""
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

    def run(self, config: TrainConfig, *, stop_at: int | None = None, fresh: bool = True) -> dict[str, Any]:
        """Run the train stage; return what was measured. With `stop_at`, stop it after that step."""
        environment, stop = Environment(self.folder, manifest_dir=self.folder), StopSignal()
        stage = environment.stage_dir("train", config.identity)
        if fresh:
            shutil.rmtree(stage, ignore_errors=True)
        stage.mkdir(parents=True, exist_ok=True)
        progress = StoppingTimes(environment, stop, stop_at)
        started = time.perf_counter()
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        flat: list[bool] = []
        with contextlib.suppress(Interrupted), recorded(document_attention, "enable", flat):
            train.run(config, Context(environment, stage, progress, stop))
        seconds = [after - before for before, after in zip(progress.ends[1:], progress.ends[2:], strict=False)]
        return {
            "attention by boundaries": any(flat),
            "seconds a step": statistics.median(seconds) if seconds else None,
            "seconds to the first step": progress.ends[0] - started if progress.ends else None,
            "peak GiB": torch.cuda.max_memory_allocated() / 2**30 if self.device == "cuda" else None,
        }

    def speed(self, name: str) -> dict[str, Any]:
        """Measure one variant: the first in all steps, the others in half of them, so that all fit the time."""
        changes = {"max_steps": self.steps if name == next(iter(VARIANTS)) else self.steps // 2} | VARIANTS[name]
        mask, all_logits = changes.pop("mask", False), changes.pop("all_logits", False)
        with contextlib.ExitStack() as stack:
            if mask:
                stack.enter_context(replaced(document_attention, "runs_on", lambda _device, _dtype: False))
            if all_logits:
                stack.enter_context(replaced(loss, "CHUNK_BYTES", 1 << 60))
            found = self.run(self.config("speed", **changes))
        tokens = self.rows_per_step * self.context / found["seconds a step"]
        flops = next((peak for chip, peak in PEAK_FLOPS.items() if chip in device_name(self.device)), None)
        return found | {"tokens/s": tokens, "MFU": 4 * self.weights * tokens / flops if flops else None}

    def pauses(self) -> dict[str, Any]:
        """Measure how long a checkpoint holds training up, in milliseconds: the snapshot and the start of its write."""
        snapshots: list[float] = []
        saves: list[float] = []
        with timed(TrainingRun, "snapshot", snapshots), timed(CheckpointManager, "save", saves):
            self.run(self.config("pauses", every=2, dropout=0.05))
        return {"milliseconds": [1e3 * (a + b) for a, b in zip(snapshots, saves, strict=False)]}

    def resumes(self) -> dict[str, Any]:
        """Compare the adapter of a run that was stopped in the middle with that of an uninterrupted one."""
        output = "train/{}/output/adapter_model.safetensors"
        digests, seconds = {}, None
        for name, stop_at in (("whole", None), ("again", None), ("stopped", self.steps // 2)):
            config = self.config(name, dropout=0.05)
            self.run(config, stop_at=stop_at)
            if stop_at:
                seconds = self.run(config, fresh=False)["seconds to the first step"]
            digests[name] = digest_file(self.folder / output.format(name))
        same = digests["whole"] == digests["stopped"]
        return {
            "equal bytes": same,
            "repeatable": digests["whole"] == digests["again"],
            "seconds to the first step": seconds,
        }


class StoppingTimes(StepTimes):
    """Records the times of steps, and requests a stop after one of them."""

    def __init__(self, environment: Environment, stop: StopSignal, stop_at: int | None) -> None:
        super().__init__(environment, "wall")
        self._stop, self._stop_at = stop, stop_at

    def update(self, **fields: object) -> None:
        """Record the time if a step has ended."""
        super().update(**fields)
        if "loss" in fields and fields.get("step") == self._stop_at:
            self._stop.requested = True


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


def device_name(device: str) -> str:
    """Return the name of the chip."""
    return torch.cuda.get_device_name() if device == "cuda" else device


def main() -> None:
    """Run the plan until the time is up. What fails is recorded with its error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--seconds", type=float, default=500, help="no measurement begins later than this")
    parser.add_argument("--output", type=Path, default=Path("gpu.json"))
    options = parser.parse_args()
    began, results = time.monotonic(), {"device": device_name(options.device), "torch": torch.__version__}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        plan = Plan(Path(folder), options.shape, options.device)
        stack.enter_context(replaced(methods, "load_base", plan.load))
        work = {"resumes": plan.resumes, "pauses": plan.pauses}
        names = ["all on", *work, *list(VARIANTS)[1:]]
        for name in names:
            if time.monotonic() - began > options.seconds:
                results[name] = {"error": "no time left"}
                continue
            try:
                results[name] = work[name]() if name in work else plan.speed(name)
            except Exception as error:  # noqa: BLE001  the rest of the plan must run
                results[name] = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-2000:]}
            gc.collect()
            if options.device == "cuda":
                torch.cuda.empty_cache()
            options.output.write_text(json.dumps(results, indent=1, default=str) + "\n")
            print(name, json.dumps({k: v for k, v in results[name].items() if k != "trace"}), flush=True)


if __name__ == "__main__":
    main()
