"""Compare this trainer's loop with HF's Trainer and TRL's trainers on this machine's CPU.

    python bench/train.py [--repeats 5] [--steps 6] [--counted 0.25] [--dtype FP32] [--method LoRA]
                          [--objective SFT] [--clock wall]

With objective DPO it is compared with TRL's DPOTrainer, which has computed the reference's log-probabilities before the
first step, as ours has.

All train the same model (26 million parameters, initialized here) on the same rows in the same order, with the same
batch size, data type, method, optimizer and gradient clipping. Each run is a process of its own, and the trainers take
turns, so that other load on the machine slows all of them. A run is timed from the end of its first step to the end of
its last.

Prints, each as median, minimum and maximum:

- throughput in tokens per second, and the ratio of ours to each of the others in the same turn;
- peak memory of the process;
- how long a checkpoint pauses training;
- the time from SIGTERM until the process has saved a checkpoint and exited.

TRL runs with gradient_checkpointing=False, which is not its default, because the others run without it. With DPO, a row
is one completion of a pair, and TRL turns dropout off, so ours has none.
"""

import argparse
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "trainer"))
sys.path.insert(0, str(ROOT / "bench"))

from finetune_trainer.contract import Environment  # noqa: E402
from train_bench import trainer_process  # noqa: E402
from train_bench.benchmark import BATCH, CONTEXT, VOCABULARY, Benchmark  # noqa: E402
from train_bench.measuring import CLOCKS, make_pairs, make_rows, spread  # noqa: E402

TRAINERS = {
    "ours": "train_bench.ours:train",
    "HF Trainer": "train_bench.hf:train",
    "TRL SFTTrainer": "train_bench.with_trl:train_sft",
    "TRL DPOTrainer": "train_bench.with_trl:train_dpo",
}
"""Name -> the function that trains and returns the times at which the steps ended."""
OBJECTIVES = {"SFT": ("ours", "HF Trainer", "TRL SFTTrainer"), "DPO": ("ours", "TRL DPOTrainer")}
"""Objective -> the trainers that have it."""
PAUSES = {
    "ours": "train_bench.ours:pauses",
    "HF Trainer": "train_bench.hf:pauses",
    "TRL SFTTrainer": "train_bench.with_trl:pauses_sft",
    "TRL DPOTrainer": "train_bench.with_trl:pauses_dpo",
}
"""Name -> the function that trains and returns how long each checkpoint paused training."""


class Measured(NamedTuple):
    """What a process of a trainer has measured."""

    seconds: list[float]
    peak_mib: float


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


def make_benchmark(folder: Path, options: argparse.Namespace) -> Benchmark:
    """Make the model and the rows."""
    make_model(folder / "model")
    make = make_pairs if options.objective == "DPO" else make_rows
    make(folder, 64, options.target_fraction, context=CONTEXT, vocabulary=VOCABULARY)
    return Benchmark(folder, options)


def measure(benchmark: Benchmark, function: str) -> Measured:
    """Return what a function of a trainer measured, in a process of its own."""
    packages = os.pathsep.join([str(ROOT / "trainer"), str(ROOT / "bench")])
    environment = os.environ | {"PYTHONWARNINGS": "ignore", "PYTHONPATH": packages}
    command = [
        sys.executable,
        trainer_process.__file__,
        function,
        str(benchmark.folder),
        json.dumps(vars(benchmark.options)),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, check=False, text=True)
    if done.returncode:
        sys.exit(f"bench/train.py: {function} failed:\n{done.stderr}")
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def throughput(benchmark: Benchmark) -> None:
    """Print tokens per second of each trainer, the ratios of ours to the others, and peak memory."""
    options = benchmark.options
    names = OBJECTIVES[options.objective]
    tokens = options.steps * CONTEXT * BATCH * (2 if options.objective == "DPO" else 1)
    speeds: dict[str, list[float]] = {name: [] for name in names}
    peaks: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(options.repeats):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            measured = measure(benchmark, TRAINERS[name])
            speeds[name].append(tokens / (measured.seconds[-1] - measured.seconds[0]))
            peaks[name].append(measured.peak_mib)
    for name in names:
        print(f"{name:15} {spread(speeds[name], ',.0f')} tokens/s, peak memory {spread(peaks[name], ',.0f')} MiB")
    for name in names[1:]:
        ratios = [ours / theirs for ours, theirs in zip(speeds["ours"], speeds[name], strict=True)]
        print(f"ours / {name:15} {spread(ratios, '.2f')}")


def pauses(benchmark: Benchmark) -> None:
    """Print how long a checkpoint of an adapter pauses training.

    In our loop that is the time of the snapshot and of starting to write it, in the other trainers the whole save.
    """
    for turn in range(2):
        for name in OBJECTIVES[benchmark.options.objective]:
            milliseconds = [1e3 * each for each in measure(benchmark, PAUSES[name]).seconds]
            print(f"a checkpoint pauses training, turn {turn + 1}: {name:15} {spread(milliseconds, '.1f')} ms")
    folder = max((benchmark.folder / "train" / "ours" / "checkpoints").glob("step-*"))
    print(f"it has {sum(file.stat().st_size for file in folder.iterdir()) / 1e6:.0f} MB")


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
    parser.add_argument("--repeats", type=int, default=5, help="turns of the speeds; 0: none")
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
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    recipe = f"{options.dtype}, {options.method}, {options.objective}"
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {recipe}")
    print(f"{BATCH} rows of {CONTEXT} tokens per step, {options.target_fraction:.0%} of them in the loss")
    print(f"{options.repeats} turns, {options.clock} clock")
    with tempfile.TemporaryDirectory() as folder:
        benchmark = make_benchmark(Path(folder), options)
        if options.repeats:
            throughput(benchmark)
        pauses(benchmark)
        stopping(benchmark, 3)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
