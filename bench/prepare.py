"""Measure the speed of the prepare stage, and whether its memory depends on the size of the data set.

    python bench/prepare.py [--records 10000 1000000] [--format jsonl] [--tokens 320 [--chat]] [--processes 2]
    python bench/prepare.py --turns 5 --records 10 20000 --tokens 320 [--other FOLDER] [--json FILE]
    python bench/prepare.py --turns 5 --records 10 5000 --tokens 320 --chat --template marks --other FOLDER

The first prints memory, records and tokens per second for three sizes, and the ratio of the memory of the last two.
The second runs the last size in turns: as it is, with one process, and perhaps with the trainer of another checkout. It
prints each one's tokens per second, and the ratios to the first of each turn, also of the CPU seconds of all processes,
which other work on the machine changes less. The third does so for conversations and a template that marks what is
learned. --labels adds three columns that nothing reads. --shape text writes plain texts, --shape alpaca instruction,
input and output: an older version may not read them.

Each run is a process of its own, as in a pod. The peak is the kernel's VmHWM of that process. Most of it is the
imports; the first run, with 10 records, shows how much. "Together" is the largest sum of all processes' PSS, which
counts shared memory once, sampled twice a second. The seconds cover the whole stage without the imports: reading,
tokenizing, packing, digests and fsync. Without --tokens, records have about 25 tokens each.
"""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

from transformers import AutoTokenizer
from typing_extensions import override

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "trainer"))

from figures import add_json_option, write_figures  # noqa: E402
from finetune_trainer.contract import (  # noqa: E402
    DatasetSource,
    Environment,
    ModelSource,
    PrepareConfig,
    PrepareRecipe,
    Validation,
)
from finetune_trainer.contract.environment import CONFIG  # noqa: E402
from prepare_bench.data_sets import (  # noqa: E402
    SHAPES,
    TEMPLATES,
    Corpus,
    make_tokenizer,
    records,
    with_labels,
    write,
)

RUNNER = """
import os, re, sys, time
from transformers import AutoTokenizer
from finetune_trainer.runtime.entrypoint import main
AutoTokenizer.from_pretrained(sys.argv[1])
import finetune_trainer.stages.prepare
if int(sys.argv[2]):
    from finetune_trainer.data.tokenizing import batch_tokenizer
    batch_tokenizer.usable_processors = lambda: int(sys.argv[2])
start, before = time.perf_counter(), sum(os.times()[:4])
code = main(["prepare"])
seconds, cpu_seconds = time.perf_counter() - start, sum(os.times()[:4]) - before
print(seconds, cpu_seconds, re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
sys.exit(code)
"""


class Memory(threading.Thread):
    """Samples the memory of a process and of its children, in bytes."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid = pid
        self.over = threading.Event()
        self.together = self.largest_child = 0

    @override
    def run(self) -> None:
        """Sample until the process has ended."""
        while not self.over.wait(0.5):
            try:
                children = (
                    Path(f"/proc/{self.pid}/task/{self.pid}/children")
                    .read_text()
                    .split()
                )
            except OSError:  # the process has ended
                return
            self.together = max(
                self.together,
                sum(
                    number_in(pid, "smaps_rollup", "Pss")
                    for pid in (str(self.pid), *children)
                ),
            )
            self.largest_child = max(
                [
                    self.largest_child,
                    *(number_in(pid, "status", "VmHWM") for pid in children),
                ]
            )


def number_in(pid: str, file: str, name: str) -> int:
    """Return a number of kilobytes in a file of /proc, in bytes; 0 if the process has ended."""
    try:
        text = Path(f"/proc/{pid}/{file}").read_text()
    except OSError:
        return 0
    # The files of a process that has ended, and is not waited for yet, are empty.
    match = re.search(rf"{name}:\s+(\d+)", text)
    return int(match[1]) * 1024 if match else 0


@dataclass
class Run:
    """One run of the stage: memory in MiB, seconds and tokens."""

    peak: float
    largest_child: float
    together: float
    seconds: float
    cpu_seconds: float
    """Of all processes."""
    tokens: int

    @property
    def speed(self) -> float:
        """Return tokens per second."""
        return self.tokens / self.seconds

    def text(self, count: int) -> str:
        """Return one line."""
        child = (
            f", of each other process {self.largest_child:,.0f}"
            if self.largest_child
            else ""
        )
        return (
            f"{count:>9,} records: peak {self.peak:,.0f} MiB{child}, Pss together {self.together:,.0f}; "
            f"{self.seconds:.1f} s: {count / self.seconds:,.0f} records/s, {self.speed:,.0f} tokens/s, "
            f"{self.tokens / self.cpu_seconds:,.0f} tokens per CPU second of all processes"
        )


def measure(folder: Path, data: Path, processes: int, packages: Path) -> Run:
    """Run the stage once."""
    config = PrepareConfig(
        identity=f"{time.time_ns()}",
        model=ModelSource(uri="model"),
        datasets=(DatasetSource(uri=data.name),),
        validation=Validation(fraction=0),
        recipe=PrepareRecipe(context_length=1024),
    )
    environment = Environment(
        folder / "workspace",
        manifest_dir=folder,
        termination_log=folder / "termination-log",
    )
    # Without the defaults, because an older version does not know those that have been added since.
    values = config.model_dump(mode="json", exclude_unset=True) | {
        "stage": config.stage
    }
    variables = (
        os.environ
        | environment.variables()
        | {CONFIG: json.dumps(values), "HF_HUB_OFFLINE": "1"}
    )
    variables["PYTHONPATH"] = str(packages)
    command = [sys.executable, "-c", RUNNER, str(folder / "model"), str(processes)]
    process = subprocess.Popen(
        command, env=variables, stdout=subprocess.PIPE, text=True
    )
    memory = Memory(process.pid)
    memory.start()
    output, _ = process.communicate()
    memory.over.set()
    assert process.returncode == 0
    *_, seconds, cpu_seconds, peak = output.split()
    result = json.loads(
        (environment.stage_dir("prepare", config.identity) / "result.json").read_bytes()
    )
    shutil.rmtree(environment.workspace)
    mib = 2**20
    return Run(
        peak=int(peak) / 1024,
        largest_child=memory.largest_child / mib,
        together=memory.together / mib,
        seconds=float(seconds),
        cpu_seconds=float(cpu_seconds),
        tokens=result["trainTokens"],
    )


def compare_sizes(
    folder: Path, options: argparse.Namespace, written: dict[int, Path]
) -> dict[str, list[Run]]:
    """Print memory and speed for each size, and the ratio of the memory of the last two; return the runs by size."""
    runs = []
    for count, data in written.items():
        runs.append(measure(folder, data, options.processes, ROOT / "trainer"))
        print(runs[-1].text(count), flush=True)
    small, large = runs[-2:]
    print(
        f"peak memory: ratio {large.peak / small.peak:.3f}, difference {large.peak - small.peak:,.0f} MiB"
    )
    difference = large.together - small.together
    print(
        f"Pss together: ratio {large.together / small.together:.3f}, difference {difference:,.0f} MiB"
    )
    return {str(count): [run] for count, run in zip(written, runs, strict=True)}


def compare_in_turns(
    folder: Path, options: argparse.Namespace, count: int, data: Path
) -> dict[str, list[Run]]:
    """Print the speed of each variant in each turn, and the ratios to the first; return the runs by variant."""
    variants: dict[str, tuple[int, Path]] = {
        "as it is": (options.processes, ROOT / "trainer"),
        "one process": (1, ROOT / "trainer"),
    }
    if options.other:
        variants[f"{options.other.name}"] = (0, options.other.absolute() / "trainer")
    runs: dict[str, list[Run]] = {name: [] for name in variants}
    for turn in range(options.turns):
        names = list(variants)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            runs[name].append(measure(folder, data, *variants[name]))
            print(f"{name:>12}: {runs[name][-1].text(count)}", flush=True)
    first = runs["as it is"]
    for name, measured in runs.items():
        speeds = [run.speed for run in measured]
        ratios = [
            base.speed / other.speed
            for base, other in zip(first, measured, strict=True)
        ]
        print(
            f"{name:>12}: median {statistics.median(speeds):,.0f} ({min(speeds):,.0f}-{max(speeds):,.0f}) tokens/s"
        )
        if name != "as it is":
            middle = statistics.median(ratios)
            print(
                f"  as it is / {name}: median {middle:.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
            )
            seconds = [
                base.cpu_seconds / other.cpu_seconds
                for base, other in zip(first, measured, strict=True)
            ]
            print(
                f"  CPU seconds, as it is / {name}: median {statistics.median(seconds):.2f} "
                f"({min(seconds):.2f}-{max(seconds):.2f})"
            )
    return runs


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of a command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--records",
        type=int,
        nargs=2,
        default=(10_000, 1_000_000),
        help="sizes to compare",
    )
    parser.add_argument(
        "--format", choices=("jsonl", "json", "csv", "parquet"), default="jsonl"
    )
    parser.add_argument("--tokens", type=int, help="tokens of a record, on average")
    parser.add_argument(
        "--chat",
        action="store_true",
        help="with --tokens: conversations of five exchanges, in jsonl",
    )
    parser.add_argument(
        "--template", choices=tuple(TEMPLATES), help="the chat template"
    )
    parser.add_argument(
        "--labels", action="store_true", help="add three columns that nothing reads"
    )
    parser.add_argument(
        "--shape", choices=tuple(SHAPES), help="write prompt and completion as this"
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=0,
        help="processes that tokenize; 0: as the stage decides",
    )
    parser.add_argument(
        "--turns", type=int, help="compare with one process, so many times"
    )
    parser.add_argument(
        "--other", type=Path, help="with --turns: another checkout to compare with"
    )
    add_json_option(parser)
    return parser.parse_args(arguments)


def main() -> None:
    """Write the data sets, and measure."""
    options = options_of()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = Corpus()
        short = (row["prompt"] + row["completion"] for row in islice(records(), 2000))
        texts = corpus.sentences if options.tokens else short
        make_tokenizer(folder / "model", texts, TEMPLATES.get(options.template))
        tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        written = {}
        for count in options.records[1:] if options.turns else (10, *options.records):
            written[count] = folder / f"data-{count}.{options.format}"
            rows = (
                corpus.records(options.tokens, tokenizer, chat=options.chat)
                if options.tokens
                else records()
            )
            if options.shape:
                rows = map(SHAPES[options.shape], rows)
            if options.labels:
                rows = with_labels(rows)
            write(written[count], islice(rows, count))
        if options.turns:
            runs = compare_in_turns(folder, options, *written.popitem())
        else:
            runs = compare_sizes(folder, options, written)
    write_figures(
        options.json,
        {name: [asdict(run) for run in measured] for name, measured in runs.items()},
    )


if __name__ == "__main__":
    main()
