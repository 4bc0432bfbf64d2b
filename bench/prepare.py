"""Measure whether the memory of the prepare stage depends on the size of the data set.

    python bench/prepare.py [--records 10000 1000000] [--format jsonl]

Prints peak memory, records and tokens per second for three sizes, and the ratio of the peaks of the last two.

Each run is a process of its own, as in a pod. The peak is the kernel's VmHWM of that process. Most of it is the
imports; the first run, with 10 records, shows how much. The seconds cover the whole stage without the imports:
reading, tokenizing, packing, digests and fsync. The records are short: about 25 tokens each.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import pyarrow as pa
from pyarrow.parquet import ParquetWriter
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, PreTrainedTokenizerFast

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "trainer"))

from finetune_trainer.contract import (  # noqa: E402
    DatasetSource,
    Environment,
    ModelSource,
    PrepareConfig,
    PrepareRecipe,
    Validation,
)
from finetune_trainer.contract.environment import CONFIG  # noqa: E402

VERBS = ("opens", "closes", "returns", "ignores")
RUNNER = """
import re, sys, time
from transformers import AutoTokenizer
from finetune_trainer.runtime.entrypoint import main
AutoTokenizer.from_pretrained(sys.argv[1])
import finetune_trainer.stages.prepare
start, cpu_start = time.perf_counter(), time.process_time()
code = main(["prepare"])
seconds = time.perf_counter() - start
print(seconds, time.process_time() - cpu_start, re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
sys.exit(code)
"""


def records() -> Iterator[dict[str, str]]:
    """Yield records of different lengths, without end."""
    number = 0
    while True:
        verb = VERBS[number % 4]
        padding = "long " * (number % 23)
        yield {
            "prompt": f"Reader {number} {verb} a {padding}file {number * 7919 % 100_003}.\nVerb:",
            "completion": f" {verb}",
        }
        number += 1


def write(path: Path, rows: Iterable[dict[str, str]]) -> None:
    """Write a data set in the format of the file's extension."""
    rows = iter(rows)
    if path.suffix == ".parquet":
        schema = pa.schema({"prompt": pa.string(), "completion": pa.string()})
        with ParquetWriter(path, schema) as writer:
            while batch := list(islice(rows, 10_000)):
                writer.write_batch(pa.RecordBatch.from_pylist(batch, schema))
        return
    with path.open("w", newline="") as file:
        if path.suffix == ".csv":
            table = csv.DictWriter(file, ["prompt", "completion"])
            table.writeheader()
            table.writerows(rows)
        elif path.suffix == ".json":
            file.write("[" + json.dumps(next(rows)))
            file.writelines(",\n" + json.dumps(row) for row in rows)
            file.write("]")
        else:
            file.writelines(json.dumps(row) + "\n" for row in rows)


def make_tokenizer(folder: Path) -> None:
    """Train a byte-level BPE tokenizer on the first records and save it as a model folder without weights."""
    bpe = ByteLevelBPETokenizer()
    texts = (row["prompt"] + row["completion"] for row in islice(records(), 2000))
    bpe.train_from_iterator(texts, vocab_size=2048, show_progress=False, special_tokens=["<pad>", "<bos>", "<eos>"])
    PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer,  # noqa: SLF001  tokenizers offers no public conversion
        pad_token="<pad>",  # noqa: S106  a token of text
        bos_token="<bos>",  # noqa: S106
        eos_token="<eos>",  # noqa: S106
    ).save_pretrained(folder)
    LlamaConfig(vocab_size=2048).save_pretrained(folder)


def measure(folder: Path, count: int, form: str) -> tuple[float, float, float, int]:
    """Run the stage once; return peak memory in MiB, wall-clock seconds, CPU seconds and tokens."""
    write(folder / f"data.{form}", islice(records(), count))
    config = PrepareConfig(
        identity=f"{count}",
        model=ModelSource(uri="model"),
        datasets=(DatasetSource(uri=f"data.{form}"),),
        validation=Validation(fraction=0),
        recipe=PrepareRecipe(context_length=1024),
    )
    environment = Environment(folder / "workspace", manifest_dir=folder, termination_log=folder / "termination-log")
    variables = os.environ | environment.variables() | {CONFIG: config.model_dump_json(), "HF_HUB_OFFLINE": "1"}
    variables["PYTHONPATH"] = str(ROOT / "trainer")
    command = [sys.executable, "-c", RUNNER, str(folder / "model")]
    completed = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=True)
    *_, seconds, cpu_seconds, peak = completed.stdout.split()
    result = json.loads((environment.stage_dir("prepare", config.identity) / "result.json").read_bytes())
    return int(peak) / 1024, float(seconds), float(cpu_seconds), result["trainTokens"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, nargs=2, default=(10_000, 1_000_000), help="sizes to compare")
    parser.add_argument("--format", choices=("jsonl", "json", "csv", "parquet"), default="jsonl")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        make_tokenizer(Path(name) / "model")
        peaks = []
        for count in (10, *options.records):
            peak, seconds, cpu_seconds, tokens = measure(Path(name), count, options.format)
            peaks.append(peak)
            rates = f"{count / seconds:,.0f} records/s, {tokens / seconds:,.0f} tokens/s"
            rates += f", {tokens / cpu_seconds:,.0f} tokens per CPU second"
            print(f"{count:>9,} records: peak {peak:,.0f} MiB, {seconds:.1f} s: {rates}", flush=True)
        print(f"peak memory: ratio {peaks[2] / peaks[1]:.3f}, difference {peaks[2] - peaks[1]:,.0f} MiB")


if __name__ == "__main__":
    main()
