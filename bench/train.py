"""Compare this trainer's loop with HF's Trainer and TRL's trainers on this machine's CPU.

    python bench/train.py [--repeats 5] [--pauses 3] [--steps 6] [--counted 0.25] [--dropout 0] [--dtype FP32]
                          [--method LoRA] [--objective SFT] [--clock wall] [--json FILE]
    python bench/train.py --processes 2 [--parallelism DDP] [--pauses 3] [--steps 40] [--method LoRA] ...

With objective DPO it is compared with TRL's DPOTrainer, which has computed the reference's log-probabilities before the
first step, as ours has.

All train the same model (26 million parameters, initialized here) on the same rows in the same order, with the same
batch size, data type, dropout, method, optimizer and gradient clipping. Each run is a process of its own, and the
trainers take turns, so that other load on the machine slows all of them. A run is timed from the end of its first step
to the end of its last.

Prints, each as median, minimum and maximum:

- throughput in tokens per second, and the ratio of ours to each of the others in the same turn;
- peak memory of the process, without checkpoints and with them;
- how long a checkpoint pauses training, over all checkpoints of all turns, and how much longer it makes a step, by the
  medians of steps with one and without: what is written beside training slows that, too;
- the time from SIGTERM until the process has saved a checkpoint and exited.

TRL runs with gradient_checkpointing=False, which is not its default, because the others run without it. With QLoRA it
would train its adapter in bf16. Here it trains it in fp32, as the others do. With DPO, a row is one completion of a
pair, and TRL turns dropout off, so ours must have none.

Ours makes malloc keep freed memory, unless malloc is set in the environment. MALLOC_TRIM_THRESHOLD_=1099511627776 and
MALLOC_MMAP_MAX_=0 there do the same for all.

With several processes only ours runs, and no speeds are compared. It prints how long each process waits at a
checkpoint, and how long its steps are: steps that begin with a checkpoint of the first process, and the others.
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
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "trainer"))
sys.path.insert(0, str(ROOT / "bench"))

from figures import add_json_option, print_table, table, write_figures  # noqa: E402
from finetune_trainer.contract import Environment  # noqa: E402
from train_bench import trainer_process  # noqa: E402
from train_bench.benchmark import BATCH, CONTEXT, VOCABULARY, Benchmark  # noqa: E402
from train_bench.measuring import (  # noqa: E402
    CLOCKS,
    Pause,
    longer,
    make_pairs,
    make_rows,
    milliseconds,
    spread,
    steps_by_pause,
)
from train_bench.ranks import Recorded  # noqa: E402

TRAINERS = {
    "ours": "train_bench.ours:train",
    "HF Trainer": "train_bench.hf:train",
    "TRL SFTTrainer": "train_bench.with_trl:train_sft",
    "TRL DPOTrainer": "train_bench.with_trl:train_dpo",
}
"""Name -> the function that trains and returns the times at which the steps ended."""
OBJECTIVES = {
    "SFT": ("ours", "HF Trainer", "TRL SFTTrainer"),
    "DPO": ("ours", "TRL DPOTrainer"),
}
"""Objective -> the trainers that have it."""
PAUSES = {
    "ours": "train_bench.ours:pauses",
    "HF Trainer": "train_bench.hf:pauses",
    "TRL SFTTrainer": "train_bench.with_trl:pauses_sft",
    "TRL DPOTrainer": "train_bench.with_trl:pauses_dpo",
}
"""Name -> the function that trains and returns the times at which the steps ended, and each pause for a checkpoint."""


Figures = dict[str, Any]


class Measured(NamedTuple):
    """What a process of a trainer has measured."""

    result: Any
    """What its function has returned, as JSON has it."""
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
        json.dumps(vars(benchmark.options), default=str),
    ]
    done = subprocess.run(
        command, env=environment, capture_output=True, check=False, text=True
    )
    if done.returncode:
        sys.exit(f"bench/train.py: {function} failed:\n{done.stderr}")
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def order_of(turn: int, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the trainers in the order of a turn: another one begins each time."""
    first = turn % len(names)
    return names[first:] + names[:first]


def throughput(benchmark: Benchmark) -> Figures:
    """Return and print tokens per second of each trainer, the ratios of ours to the others, and peak memory."""
    options = benchmark.options
    names = OBJECTIVES[options.objective]
    tokens = options.steps * CONTEXT * BATCH * (2 if options.objective == "DPO" else 1)
    speeds: dict[str, list[float]] = {name: [] for name in names}
    peaks: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(options.repeats):
        for name in order_of(turn, names):
            measured = measure(benchmark, TRAINERS[name])
            speeds[name].append(tokens / (measured.result[-1] - measured.result[0]))
            peaks[name].append(measured.peak_mib)
    rows = [
        ["tokens/s", *(spread(speeds[name], ",.0f") for name in names)],
        ["peak memory, MiB", *(spread(peaks[name], ",.0f") for name in names)],
        ["tokens/s, ours / theirs", "", *(ratio(speeds, name) for name in names[1:])],
    ]
    figures = {"tokensPerSecond": speeds, "peakMiB": peaks}
    return figures | printed("speed", names, rows)


def ratio(speeds: dict[str, list[float]], name: str) -> str:
    """Return our speed divided by the speed of another trainer in the same turn, over all turns."""
    pairs = zip(speeds["ours"], speeds[name], strict=True)
    return spread([ours / theirs for ours, theirs in pairs], ".2f")


def printed(title: str, names: tuple[str, ...], rows: list[list[str]]) -> Figures:
    """Print the figures of the trainers, and return them as the tables of a file."""
    columns = [title, *names]
    print_table(columns, rows)
    return {"tables": [table(columns, rows)]}


def pauses(benchmark: Benchmark) -> Figures:
    """Return and print how long a checkpoint pauses training, and how much longer a step is with all that follows.

    In our loop the pause is the snapshot and the start of its write, in the other trainers the whole save.
    """
    options = argparse.Namespace(**{**vars(benchmark.options), "clock": "wall"})
    benchmark = Benchmark(benchmark.folder, options)
    names = OBJECTIVES[options.objective]
    pause_seconds: dict[str, list[float]] = {name: [] for name in names}
    steps: dict[str, dict[bool, list[float]]] = {
        name: {False: [], True: []} for name in names
    }
    peaks: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(options.pauses):
        for name in order_of(turn, names):
            (ends, seconds), peak_mib = measure(benchmark, PAUSES[name])
            checkpoints = [Pause(start, duration) for start, duration in seconds]
            peaks[name].append(peak_mib)
            pause_seconds[name] += [pause.seconds for pause in checkpoints]
            for has_pause, durations in steps_by_pause(ends, checkpoints).items():
                steps[name][has_pause] += durations
    rows = [
        ["pause of training", *(milliseconds(pause_seconds[name]) for name in names)],
        ["checkpoints", *(str(len(pause_seconds[name])) for name in names)],
        ["a step is longer by", *(longer(steps[name]) for name in names)],
        ["peak memory, MiB", *(spread(peaks[name], ",.0f") for name in names)],
    ]
    tables = printed("checkpoints", names, rows)
    print_checkpoint_size(benchmark)
    figures = {"pauseSeconds": pause_seconds, "peakMiBWithCheckpoints": peaks}
    return figures | tables


def print_checkpoint_size(benchmark: Benchmark) -> None:
    """Print the size of our newest checkpoint."""
    folder = max((benchmark.folder / "train" / "ours" / "checkpoints").glob("step-*"))
    print(
        f"ours has {sum(file.stat().st_size for file in folder.iterdir()) / 1e6:.0f} MB"
    )


def waiting(benchmark: Benchmark) -> Figures:
    """Return and print how long each process waits at a checkpoint, and how long its steps with and without one are."""
    numbers = range(benchmark.options.processes)
    turns: list[list[Recorded]] = []
    for _ in range(benchmark.options.pauses):
        measure(benchmark, "train_bench.ranks:pauses")
        turns.append([Recorded.read(benchmark.folder, rank) for rank in numbers])
    for rank in numbers:
        print_steps(rank, turns)
    print_checkpoint_size(benchmark)
    return {
        "pauseSecondsOfProcesses": [
            [pause for turn in turns for pause in turn[rank].pauses.values()]
            for rank in numbers
        ]
    }


def print_steps(rank: int, turns: list[list[Recorded]]) -> None:
    """Print the pauses and the steps of one process. A step with a checkpoint begins with one, of the first process."""
    steps: dict[bool, list[float]] = {False: [], True: []}
    for turn in turns:
        ends = turn[rank].ends
        for number in range(1, len(ends)):
            steps[str(number) in turn[0].pauses].append(ends[number] - ends[number - 1])
    pauses = [pause for turn in turns for pause in turn[rank].pauses.values()]
    print(f"process {rank}: its pause at a checkpoint {milliseconds(pauses)}")
    print(
        f"process {rank}: a step with a checkpoint {milliseconds(steps[True])}, without {milliseconds(steps[False])}"
    )
    print(f"process {rank}: a checkpoint makes a step longer: {longer(steps)}")


def stopping(benchmark: Benchmark, repeats: int) -> Figures:
    """Return and print the time from SIGTERM to the exit of a real process, which saves its last step first."""
    seconds = []
    for turn in range(repeats):
        progress = benchmark.folder / f"progress{turn}"
        environment = Environment(
            benchmark.folder,
            termination_log=benchmark.folder / "termination",
            progress_file=progress,
        )
        config = benchmark.config(f"stopped{turn}", steps=10**4)
        variables = environment.variables() | {
            "FINETUNE_CONFIG": config.model_dump_json(by_alias=True),
            "PYTHONPATH": str(ROOT / "trainer"),
            "PYTHONWARNINGS": "ignore",
        }
        command = [sys.executable, "-m", "finetune_trainer", "train"]
        process = subprocess.Popen(
            command, env=os.environ | variables, stdout=subprocess.DEVNULL
        )
        while not (progress.exists() and json.loads(progress.read_text())["step"] > 2):
            time.sleep(0.05)
        time.sleep(0.1 * turn)
        signalled = time.perf_counter()
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 75
        seconds.append(time.perf_counter() - signalled)
    print(f"SIGTERM to durable exit: {spread(seconds, '.2f')} s")
    return {"exitSeconds": seconds}


def parser_of_options() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--repeats", type=int, default=5, help="turns of the speeds; 0: none"
    )
    parser.add_argument(
        "--pauses",
        type=int,
        default=3,
        help="turns in which checkpoints are timed; 0: none",
    )
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument(
        "--counted",
        dest="target_fraction",
        type=float,
        default=0.25,
        help="fraction of the tokens in the loss",
    )
    parser.add_argument(
        "--dropout", type=float, default=0.0, help="of the adapter's inputs"
    )
    parser.add_argument("--method", choices=("LoRA", "QLoRA", "Full"), default="LoRA")
    parser.add_argument("--objective", choices=OBJECTIVES, default="SFT")
    parser.add_argument("--dtype", choices=("FP32", "BF16"), default="FP32")
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        default="wall",
        help="cpu: CPU seconds, for a machine with other load",
    )
    parser.add_argument(
        "--processes", type=int, default=1, help="with several, only ours runs"
    )
    parser.add_argument(
        "--parallelism",
        choices=("DDP", "FSDP"),
        default="DDP",
        help="of several processes",
    )
    add_json_option(parser)
    return parser


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of a command line, which must go together."""
    parser = parser_of_options()
    options = parser.parse_args(arguments)
    if options.objective == "DPO" and options.dropout:
        parser.error("TRL's DPOTrainer has no dropout: leave --dropout out")
    if options.method == "Full" and options.dropout:
        parser.error(
            "method Full has no adapter, so it has no dropout: leave --dropout out"
        )
    if options.processes > 1 and options.clock == "cpu":
        parser.error(
            "a process that waits uses no CPU seconds: with --processes leave --clock out"
        )
    return options


def print_plan(options: argparse.Namespace) -> None:
    """Print what is measured, and how often."""
    recipe = f"{options.dtype}, {options.method}, {options.objective}"
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {recipe}")
    rows = f"{BATCH * options.processes} rows of {CONTEXT} tokens per step"
    rows += f", {options.target_fraction:.0%} of the tokens in the loss"
    print(f"{rows}, dropout {options.dropout:g}")
    print(
        f"{options.repeats} turns, {options.clock} clock; {options.pauses} turns of the pauses"
    )
    if options.processes > 1:
        print(f"{options.processes} processes, {options.parallelism}")


def main() -> None:
    """Run the benchmark."""
    options = options_of()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    print_plan(options)
    figures: Figures = {}
    tables = []
    with tempfile.TemporaryDirectory() as folder:
        benchmark = make_benchmark(Path(folder), options)
        if options.repeats and options.processes == 1:
            figures |= throughput(benchmark)
            tables += figures.pop("tables")
        if options.pauses:
            measure_pauses = pauses if options.processes == 1 else waiting
            figures |= measure_pauses(benchmark)
            tables += figures.pop("tables", [])
        figures |= stopping(benchmark, 3)
    write_figures(options.json, {"tables": tables, **figures})


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
