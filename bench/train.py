"""Compare this trainer's loop with HF's Trainer and TRL's trainers on this machine's CPU.

    python bench/train.py [--repeats 5] [--steps 6] [--counted 0.25] [--dtype FP32] [--method LoRA]
                          [--objective SFT] [--clock wall]

With objective DPO it is compared with TRL's DPOTrainer, which has computed the reference's log-probabilities before the
first step, as ours has.

All train the same model (26 million parameters, initialized here) on the same rows in the same order, with the same
batch size, data type, method, optimizer and gradient clipping. They run in turns, so that other load on the machine
slows all of them. A run is timed from the end of its first step to the end of its last.

Prints, each as median, minimum and maximum:

- throughput in tokens per second, and the ratio of ours to each of the others in the same turn;
- the peak memory of a process that trains, which has the imports of all three trainers;
- how long a checkpoint pauses training;
- the time from SIGTERM until the process has saved a checkpoint and exited.

TRL runs with gradient_checkpointing=False, which is not its default, because the others run without it. With DPO, a row
is one completion of a pair, and TRL turns dropout off, so ours has none.
"""

import argparse
import json
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)
from trl import DPOConfig, SFTConfig

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "trainer"))
sys.path.insert(0, str(ROOT / "bench"))

from finetune_trainer.contract import Environment, TrainConfig  # noqa: E402
from finetune_trainer.data.packing import PackedRows  # noqa: E402
from finetune_trainer.models.base_model import BaseModel  # noqa: E402
from finetune_trainer.runtime.stage_folder import Context  # noqa: E402
from finetune_trainer.stages import train  # noqa: E402
from finetune_trainer.stop_signal import StopSignal  # noqa: E402
from finetune_trainer.training.batches import StepSampler  # noqa: E402
from finetune_trainer.training.checkpoint_manager import CheckpointManager  # noqa: E402
from finetune_trainer.training.loop import TrainingRun  # noqa: E402
from finetune_trainer.training.methods import load_trainable  # noqa: E402
from train_bench.in_order import InOrder, InOrderDPO, InOrderSFT, StepTimesCallback, stack_rows  # noqa: E402
from train_bench.measuring import CLOCKS, StepTimes, make_pairs, make_rows, quietly, spread, timed  # noqa: E402

VOCABULARY = 8192
CONTEXT = 128
BATCH = 4
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_model(folder: Path) -> Path:
    """Save a randomly initialized Llama with a word-level tokenizer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=7,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    print(f"model: {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters")
    model.save_pretrained(folder)
    word_level = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCABULARY)}, "w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=word_level)
    tokenizer.add_special_tokens({"pad_token": "w0", "eos_token": "w1"})
    tokenizer.save_pretrained(folder)
    return folder


class Benchmark:
    """The model, the rows and the options that all three trainers share."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder, self.options, self.model = folder, options, folder / "model"
        rows = folder / "prepare" / "rows" / "output"
        if not rows.exists():
            make_model(self.model)
            make = make_pairs if options.objective == "DPO" else make_rows
            make(folder, 64, options.target_fraction, context=CONTEXT, vocabulary=VOCABULARY)
        self.rows = PackedRows(rows, "train")

    def config(self, identity: str, *, steps: int, rank: int = 16, every: int = 10**6) -> TrainConfig:
        """Return the train config that all three follow."""
        recipe = {
            "max_steps": steps,
            "micro_batch_size": BATCH,
            "dtype": self.options.dtype,
            "method": self.options.method,
            "objective": self.options.objective,
            "optimizer": {"learning_rate": 1e-4, "scheduler": "Constant", "warmup_fraction": 0.0},
        }
        if self.options.method != "Full":
            dropout = 0.0 if self.options.objective == "DPO" else 0.05
            recipe["lora"] = {"rank": rank, "alpha": 32, "dropout": dropout, "target_modules": TARGETS}
        return TrainConfig.model_validate(
            {
                "identity": identity,
                "prepare": "rows",
                "model": {"uri": f"file://{self.model}"},
                "recipe": recipe,
                "checkpoint": {"every_steps": every},
            }
        )

    def ours(self, steps: int, **changes: int) -> list[float]:
        """Train with our loop; return the times at which the steps ended."""
        config = self.config("ours", steps=steps, **changes)
        environment = Environment(self.folder)
        folder = environment.stage_dir("train", "ours")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        times = StepTimes(environment, self.options.clock)
        train.run(config, Context(environment, folder, times, StopSignal()))
        return times.ends

    def theirs(
        self, make: Callable[..., Trainer], arguments: type[TrainingArguments], steps: int, **changes: object
    ) -> list[float]:
        """Train with HF's or TRL's trainer; return the times at which the steps ended."""
        rank = changes.pop("rank", 16)
        config = self.config("theirs", steps=steps, rank=rank)
        model = load_trainable(BaseModel("model", self.model, ""), config, torch.device("cpu")).module
        examples = len(self.rows) // 2 if self.options.objective == "DPO" else len(self.rows)
        sampler = StepSampler.of(config.recipe, examples, 0)
        order = np.concatenate([sampler.rows_for_step(step) for step in range(steps)])
        times = StepTimesCallback(self.options.clock)
        settings = {
            "output_dir": str(self.folder / "theirs"),
            "max_steps": steps,
            "per_device_train_batch_size": BATCH,
            "learning_rate": 1e-4,
            "lr_scheduler_type": "constant",
            "max_grad_norm": 1.0,
            "bf16": self.options.dtype == "BF16",
            "gradient_checkpointing": False,
            "use_cpu": True,
            "report_to": [],
            "save_strategy": "no",
            "disable_tqdm": True,
            "logging_steps": 500,
            "remove_unused_columns": False,
            "dataloader_pin_memory": False,
        }
        trainer = make(
            model=model,
            args=arguments(**(settings | changes)),
            train_dataset=[self.record(example) for example in order],
            callbacks=[times],
        )
        trainer.train()
        return times.ends

    def record(self, example: int) -> dict[str, Any]:
        """Return one of our examples in the format that HF's and TRL's trainers expect."""
        if self.options.objective == "DPO":
            read = self.rows.read([2 * example, 2 * example + 1])
            prompt = int(np.argmax(read.loss_mask[0] != 0))
            chosen, rejected = (tokens.tolist() for tokens in read.tokens)
            return {"prompt_ids": chosen[:prompt], "chosen_ids": chosen[prompt:], "rejected_ids": rejected[prompt:]}
        return self.row(example)

    def row(self, row: int) -> dict[str, torch.Tensor]:
        """Return one of our rows."""
        read = self.rows.read([row])
        tokens = torch.from_numpy(read.tokens[0].astype(np.int64))
        labels = tokens.masked_fill(torch.from_numpy(read.loss_mask[0] == 0), -100)
        positions = torch.from_numpy(read.positions[0])
        return {"input_ids": tokens, "labels": labels, "position_ids": positions}

    def hf(self, steps: int, **changes: object) -> list[float]:
        """Train with transformers.Trainer."""
        return self.theirs(
            lambda **arguments: InOrder(data_collator=stack_rows, **arguments), TrainingArguments, steps, **changes
        )

    def trl(self, steps: int) -> list[float]:
        """Train with trl.SFTTrainer."""
        tokenizer = PreTrainedTokenizerFast.from_pretrained(self.model)
        return self.theirs(
            lambda train_dataset, **arguments: InOrderSFT(
                train_dataset=Dataset.from_list(train_dataset).with_format("torch"),
                processing_class=tokenizer,
                data_collator=stack_rows,
                **arguments,
            ),
            SFTConfig,
            steps,
            dataset_kwargs={"skip_prepare_dataset": True},
            packing=False,
        )

    def trl_dpo(self, steps: int) -> list[float]:
        """Train with trl.DPOTrainer."""
        tokenizer = PreTrainedTokenizerFast.from_pretrained(self.model)
        return self.theirs(
            lambda train_dataset, **arguments: InOrderDPO(
                train_dataset=Dataset.from_list(train_dataset), processing_class=tokenizer, **arguments
            ),
            DPOConfig,
            steps,
            precompute_ref_log_probs=True,
            remove_unused_columns=True,
        )


TRAINERS: dict[str, Callable[[Benchmark, int], list[float]]] = {
    "ours": Benchmark.ours,
    "HF Trainer": Benchmark.hf,
    "TRL SFTTrainer": Benchmark.trl,
    "TRL DPOTrainer": Benchmark.trl_dpo,
}
OBJECTIVES = {"SFT": ("ours", "HF Trainer", "TRL SFTTrainer"), "DPO": ("ours", "TRL DPOTrainer")}
"""Objective -> the trainers that have it."""


def throughput(benchmark: Benchmark, repeats: int, steps: int) -> None:
    """Print tokens per second of each trainer and the ratios of ours to the others."""
    names = OBJECTIVES[benchmark.options.objective]
    rows = BATCH * (2 if benchmark.options.objective == "DPO" else 1)
    speeds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(repeats):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            ends = quietly(lambda name=name: TRAINERS[name](benchmark, steps + 1))
            speeds[name].append(steps * rows * CONTEXT / (ends[-1] - ends[0]))
    for name in names:
        print(f"{name:15} {spread(speeds[name], ',.0f')} tokens/s")
    for name in names[1:]:
        ratios = [ours / theirs for ours, theirs in zip(speeds["ours"], speeds[name], strict=True)]
        print(f"ours / {name:15} {spread(ratios, '.2f')}")


def peaks(benchmark: Benchmark, steps: int) -> None:
    """Print the peak memory of each trainer, in a process of its own."""
    options = benchmark.options
    for name in OBJECTIVES[options.objective]:
        command = [sys.executable, __file__, "--peak-of", name, "--folder", str(benchmark.folder)]
        recipe = ["--steps", str(steps), "--method", options.method, "--dtype", options.dtype]
        recipe += ["--objective", options.objective]
        environment = os.environ | {"PYTHONWARNINGS": "ignore"}
        output = subprocess.run([*command, *recipe], env=environment, stdout=subprocess.PIPE, check=True, text=True)
        print(f"{name:15} peak memory {int(output.stdout.split()[-1]):,} MiB")


def pauses(benchmark: Benchmark, steps: int) -> None:
    """Print how long a checkpoint of an adapter of rank 128 pauses training.

    In our loop that is the time of the snapshot and of starting to write it, in HF's Trainer the whole save.
    """
    for turn in range(2):
        ours: list[float] = []
        with timed(TrainingRun, "snapshot", ours), timed(CheckpointManager, "save", ours):
            quietly(lambda: benchmark.ours(steps, rank=128, every=2))
        paused = [a + b for a, b in zip(ours[::2], ours[1::2], strict=True)]
        theirs: list[float] = []
        with timed(Trainer, "_save_checkpoint", theirs):
            quietly(lambda: benchmark.hf(steps, rank=128, save_strategy="steps", save_steps=2))
        folder = max((benchmark.folder / "train" / "ours" / "checkpoints").glob("step-*"))
        size = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
        print(f"a checkpoint of {size:.0f} MB pauses training for (turn {turn + 1}):")
        for name, seconds in (("ours", paused), ("HF Trainer", theirs)):
            print(f"  {name:15} {spread([1e3 * each for each in seconds], '.1f')} ms")


def stopping(benchmark: Benchmark, repeats: int) -> None:
    """Print the time from SIGTERM to the exit of a real process, which saves the last step boundary first."""
    seconds = []
    for turn in range(repeats):
        environment = Environment(
            benchmark.folder,
            termination_log=benchmark.folder / "termination",
            progress_file=benchmark.folder / f"progress{turn}",
        )
        config = benchmark.config(f"stopped{turn}", steps=10**4)
        variables = environment.variables() | {
            "FINETUNE_CONFIG": config.model_dump_json(by_alias=True),
            "PYTHONPATH": str(ROOT / "trainer"),
            "PYTHONWARNINGS": "ignore",
        }
        command = [sys.executable, "-m", "finetune_trainer", "train"]
        process = subprocess.Popen(command, env=os.environ | variables, stdout=subprocess.DEVNULL)
        while not (
            environment.progress_file.exists() and json.loads(environment.progress_file.read_text())["step"] > 2
        ):
            time.sleep(0.05)
        time.sleep(0.1 * turn)
        signalled = time.perf_counter()
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 75
        seconds.append(time.perf_counter() - signalled)
    print(f"SIGTERM to durable exit: {spread(seconds, '.2f')} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument(
        "--counted", dest="target_fraction", type=float, default=0.25, help="fraction of the tokens in the loss"
    )
    parser.add_argument("--method", choices=("LoRA", "QLoRA", "Full"), default="LoRA")
    parser.add_argument("--objective", choices=OBJECTIVES, default="SFT")
    parser.add_argument("--dtype", choices=("FP32", "BF16"), default="FP32")
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="cpu: CPU seconds, for a machine with other load"
    )
    parser.add_argument("--peak-of", choices=TRAINERS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if options.peak_of:
        benchmark = Benchmark(options.folder, options)
        quietly(lambda: TRAINERS[options.peak_of](benchmark, options.steps))
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
        return
    recipe = f"{options.dtype}, {options.method}, {options.objective}"
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {recipe}")
    print(f"{BATCH} rows of {CONTEXT} tokens per step, {options.target_fraction:.0%} of them in the loss")
    print(f"{options.repeats} turns, {options.clock} clock")
    with tempfile.TemporaryDirectory() as folder:
        benchmark = Benchmark(Path(folder), options)
        throughput(benchmark, options.repeats, options.steps)
        peaks(benchmark, options.steps)
        if options.objective == "SFT":
            pauses(benchmark, options.steps)
        stopping(benchmark, 3)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
