"""Data sets whose rows are written in many small parts, and the parts of the stage prepare on disk."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
from support.trainer.formats import write_parquet
from support.trainer.models import write_jsonl
from support.trainer.prepared import IDENTITY, output_folder

from finetune_trainer.contract import Environment

SMALL = {
    "reading.record_batches.BATCH_RECORDS": 20,
    "record_packer.PART_TOKENS": 400,
    "record_packer.PART_ROWS": 1,
}
"""Constants of `finetune_trainer.data` that make batches and parts small."""
RECORDS = 3000

SEVERAL: list[dict[str, Any]] = [
    {"uri": "rows-*.jsonl"},
    {"uri": "rows.jsonl.gz", "weight": 1.5},
    {"uri": "rows.parquet", "columns": {"text": "body"}, "weight": 0.5},
    {"uri": "chat.jsonl.zst"},
]
"""Data sets of RECORDS records together, in several files, formats and shapes."""


def records(count: int = RECORDS) -> list[dict[str, object]]:
    """Return numbered records; every tenth is invalid."""
    return [
        {"text": f"{number} opens the file" if number % 10 else None}
        for number in range(count)
    ]


def write_several(folder: Path) -> None:
    """Write the files of SEVERAL."""
    rows = records()
    write_jsonl(folder / "rows-1.jsonl", rows[:500])
    write_jsonl(folder / "rows-2.jsonl", rows[500:1000])
    (folder / "rows.jsonl.gz").write_bytes(
        gzip.compress(lines(rows[1000:2000]), mtime=0)
    )
    write_parquet(
        folder / "rows.parquet", [{"body": row["text"]} for row in rows[2000:2600]]
    )
    chat = [
        {"messages": [{"role": "assistant", "content": row["text"]}]}
        for row in rows[2600:]
    ]
    (folder / "chat.jsonl.zst").write_bytes(
        pa.compress(lines(chat), "zstd", asbytes=True)
    )


def lines(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def state_folder(environment: Environment) -> Path:
    return environment.stage_dir("prepare", IDENTITY) / "partial"


def state_files(environment: Environment) -> list[Path]:
    """Return the files of the complete parts, in order."""
    return sorted(state_folder(environment).glob("part-*.json"))


def complete_records(environment: Environment) -> int:
    """Return the number of records in complete parts."""
    states = state_files(environment)
    if not states:
        return 0
    count: int = json.loads(states[-1].read_text())["counts"]["records"]
    return count


def output_bytes(environment: Environment) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes()
        for path in sorted(output_folder(environment).iterdir())
    }
