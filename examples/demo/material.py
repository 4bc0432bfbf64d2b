"""Create the demo's data set, its evaluation task and its base model from the running Python alone.

    python examples/demo/material.py [FOLDER]

FOLDER is the volume that the manifest calls pvc://demo. Parts that exist and are intact are kept.
"""

import argparse
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import docstrings

from finetune_trainer.runtime.artifacts import (
    CorruptArtifact,
    atomic_folder,
    canonical_json,
    seal,
    verify,
)

HERE = Path(__file__).parent
FOLDER = HERE.parent.parent / ".demo" / "material"
SEED = 7
STEPS = 600
"""Optimizer steps of pre-training."""


def make(folder: Path, *, steps: int = STEPS, seed: int = SEED) -> None:
    """Create data/{train.jsonl,heldout.jsonl,task.yaml} and base-model/ in the folder, each atomically."""
    train, test, pretraining = docstrings.split(docstrings.gather(), seed)
    task = (HERE / "task.yaml").read_text()
    make_once(
        folder / "data",
        {"rows": digest([train, test]), "task": digest(task)},
        lambda to: write_data(to, train, test),
    )
    program = {
        "program": digest((HERE / "base_model.py").read_text()),
        "torch": version("torch"),
    }
    stamp = {"texts": digest(pretraining), "steps": steps, "seed": seed, **program}
    make_once(
        folder / "base-model",
        stamp,
        lambda to: write_base_model(to, pretraining, steps, seed),
    )


def make_once(
    folder: Path, stamp: dict[str, object], fill: Callable[[Path], None]
) -> None:
    """Create the folder unless it exists, is intact, and has the same stamp: the same inputs."""
    try:
        if verify(folder) == stamp:
            print(f"{folder.name}: up to date", flush=True)
            return
    except CorruptArtifact:
        pass
    start = time.monotonic()
    with atomic_folder(folder) as temporary:
        fill(temporary)
        seal(temporary, stamp)
    print(f"{folder.name}: created in {time.monotonic() - start:.0f} s", flush=True)


def write_data(
    folder: Path, train: list[dict[str, str]], test: list[dict[str, str]]
) -> None:
    """Write the training records, the test rows and the task file."""
    records = [
        {"prompt": f"{row['text']}\nModule:", "completion": f" {row['module']}"}
        for row in train
    ]
    write_lines(folder / "train.jsonl", records)
    write_lines(folder / "heldout.jsonl", test)
    shutil.copy(HERE / "task.yaml", folder)
    print(f"data: {len(train)} training records, {len(test)} test rows", flush=True)


def write_base_model(folder: Path, texts: list[str], steps: int, seed: int) -> None:
    """Write the base model and its tokenizer."""
    import base_model as toy  # noqa: PLC0415  imports torch for seconds, needed only here

    print(
        f"base-model: pre-training a toy Llama on {len(texts):,} doc-strings, none of them in the test rows",
        flush=True,
    )
    loss = toy.make(folder, texts, steps, seed)
    print(f"base-model: loss {loss:.2f}", flush=True)


def digest(value: object) -> str:
    """Return the SHA-256 of the canonical JSON of a value."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def write_lines(path: Path, records: list[dict[str, str]]) -> None:
    """Write JSON Lines."""
    path.write_text(
        "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records),
        encoding="utf-8",
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    # Waiting OpenMP threads sleep instead of spinning: on a node with other pods, spinning is many times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        make(parser.parse_args().folder)
    except KeyboardInterrupt:  # atomic_folder removes the unfinished folder
        sys.exit(130)
