"""Does prepare's memory stay flat? The stage on 10,000 and on 1,000,000 records: peak memory, records/s, ratio.

    python bench/prepare.py [--records 10000 1000000] [--format jsonl]

Each run is a process of its own, as in a pod; its peak is what the kernel counted for it (VmHWM), most of which are
the imports: the first figure, a run with 10 records, shows how much. The seconds are those of the whole stage (reading,
tokenising, packing, digests, fsync) without the imports.
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
)
from finetune_trainer.contract.environment import CONFIG  # noqa: E402

VERBS = ("opens", "closes", "returns", "ignores")
RUNNER = """
import re, sys, time
from transformers import AutoTokenizer
from finetune_trainer.runtime.entrypoint import main
AutoTokenizer.from_pretrained(sys.argv[1])
import finetune_trainer.stages.prepare
begin, used = time.perf_counter(), time.process_time()
code = main(["prepare"])
seconds = time.perf_counter() - begin
print(seconds, time.process_time() - used, re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
sys.exit(code)
"""


def records() -> Iterator[dict[str, str]]:
    number = 0
    while True:
        verb = VERBS[number % 4]
        words = "long " * (number % 23)
        yield {
            "prompt": f"Reader {number} {verb} a {words}file {number * 7919 % 100_003}.\nVerb:",
            "completion": f" {verb}",
        }
        number += 1


def write(path: Path, rows: Iterable[dict[str, str]]) -> None:
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
    bpe = ByteLevelBPETokenizer()
    texts = (row["prompt"] + row["completion"] for row in islice(records(), 2000))
    bpe.train_from_iterator(texts, vocab_size=2048, show_progress=False, special_tokens=["<pad>", "<bos>", "<eos>"])
    PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer,  # noqa: SLF001  the library's own way from one to the other
        pad_token="<pad>",  # noqa: S106  a token of text
        bos_token="<bos>",  # noqa: S106
        eos_token="<eos>",  # noqa: S106
    ).save_pretrained(folder)
    LlamaConfig(vocab_size=2048).save_pretrained(folder)


def measure(folder: Path, count: int, form: str) -> tuple[float, float, float]:
    """Give peak memory in MiB, seconds, and seconds of processor time of one run."""
    write(folder / f"data.{form}", islice(records(), count))
    config = PrepareConfig(
        identity=f"{count}",
        model=ModelSource(uri="model"),
        dataset=DatasetSource(uri=f"data.{form}"),
        recipe=PrepareRecipe(context_length=1024),
    )
    environment = Environment(folder / "workspace", manifest_dir=folder, termination_log=folder / "termination-log")
    variables = os.environ | environment.variables() | {CONFIG: config.model_dump_json(), "HF_HUB_OFFLINE": "1"}
    variables["PYTHONPATH"] = str(ROOT / "trainer")
    command = [sys.executable, "-c", RUNNER, str(folder / "model")]
    done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=True)
    *_, seconds, used, peak = done.stdout.split()
    return int(peak) / 1024, float(seconds), float(used)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, nargs=2, default=(10_000, 1_000_000))
    parser.add_argument("--format", choices=("jsonl", "json", "csv", "parquet"), default="jsonl")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        make_tokenizer(Path(name) / "model")
        peaks = []
        for count in (10, *wanted.records):
            peak, seconds, used = measure(Path(name), count, wanted.format)
            peaks.append(peak)
            rates = f"{count / seconds:,.0f} records/s, {count / used:,.0f} per second of one core"
            print(f"{count:>9,} records: peak {peak:,.0f} MiB, {seconds:.1f} s: {rates}", flush=True)
        print(f"peak memory: ratio {peaks[2] / peaks[1]:.3f}, difference {peaks[2] - peaks[1]:,.0f} MiB")


if __name__ == "__main__":
    main()
