"""Makes what the demo runs on, from nothing but the Python that runs it: a data set, an exam and a base model.

    python examples/demo/material.py [FOLDER]

FOLDER is the volume that the manifest calls pvc://demo. What is there already and whole is kept.
"""

import argparse
import hashlib
import json
import shutil
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import docstrings

from finetune_trainer.runtime.artifacts import CorruptArtifact, atomic_folder, canonical_json, seal, verify

HERE = Path(__file__).parent
FOLDER = HERE.parent.parent / ".demo" / "material"
SEED = 7
STEPS = 600
"""Of pre-training."""


def make(folder: Path, *, steps: int = STEPS, seed: int = SEED) -> None:
    """Fill the folder with data/{train.jsonl,heldout.jsonl,task.yaml} and base-model/, each whole or not there."""
    train, exam, plain = docstrings.split(docstrings.gather(), seed)
    task = (HERE / "task.yaml").read_text()
    make_once(folder / "data", {"rows": digest([train, exam]), "task": digest(task)}, lambda to: data(to, train, exam))
    made_by = {"program": digest((HERE / "base_model.py").read_text()), "torch": version("torch")}
    stamp = {"texts": digest(plain), "steps": steps, "seed": seed, **made_by}
    make_once(folder / "base-model", stamp, lambda to: base_model(to, plain, steps, seed))


def make_once(folder: Path, stamp: dict[str, object], fill: Callable[[Path], None]) -> None:
    """Fill the folder unless it is there, undamaged, and was made from the same things."""
    try:
        if verify(folder) == stamp:
            print(f"{folder.name}: there already", flush=True)
            return
    except CorruptArtifact:
        pass
    began = time.monotonic()
    with atomic_folder(folder) as temporary:
        fill(temporary)
        seal(temporary, stamp)
    print(f"{folder.name}: made in {time.monotonic() - began:.0f} s", flush=True)


def data(folder: Path, train: list[dict[str, str]], exam: list[dict[str, str]]) -> None:
    """Write the records to train on, and the exam with its task file."""
    records = [{"prompt": f"{row['text']}\nModule:", "completion": f" {row['module']}"} for row in train]
    write_lines(folder / "train.jsonl", records)
    write_lines(folder / "heldout.jsonl", exam)
    shutil.copy(HERE / "task.yaml", folder)
    print(f"data: {len(train)} doc-strings to train on, {len(exam)} for the exam", flush=True)


def base_model(folder: Path, texts: list[str], steps: int, seed: int) -> None:
    """Write the base model and its tokenizer."""
    import base_model as toy  # noqa: PLC0415  torch and transformers take seconds, and may not be needed

    print(f"base-model: a toy Llama reads {len(texts):,} doc-strings, none of the exam's", flush=True)
    loss = toy.make(folder, texts, steps, seed)
    print(f"base-model: loss {loss:.2f} nats a token", flush=True)


def digest(value: object) -> str:
    """Give the SHA-256 of anything that JSON can say."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def write_lines(path: Path, records: list[dict[str, str]]) -> None:
    """Write JSON Lines."""
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    try:
        make(parser.parse_args().folder)
    except KeyboardInterrupt:  # nothing half made is left behind
        sys.exit(130)
