"""Create the pairs of this example from the records of the demo.

    python examples/demo/material.py          # once: the base model, the records, the task
    python examples/preference/pairs.py [FOLDER]

FOLDER is the volume that the manifest calls pvc://demo. Each record becomes a pair: its module is the chosen
completion, and another module, drawn with a fixed seed, the rejected one.
"""

import argparse
import json
import random  # noqa: TID251  seeded: the same records give the same pairs
from pathlib import Path

FOLDER = Path(__file__).parent.parent.parent / ".demo" / "material"
SEED = 7


def make(folder: Path) -> int:
    """Write preference/pairs.jsonl in the folder; return the number of pairs."""
    records = [
        json.loads(line)
        for line in (folder / "data" / "train.jsonl")
        .read_text(encoding="utf-8")
        .splitlines()
    ]
    modules = sorted({record["completion"] for record in records})
    generator = random.Random(SEED)  # noqa: S311  not for cryptography
    pairs = [pair_of(record, modules, generator) for record in records]
    target = folder / "preference" / "pairs.jsonl"
    target.parent.mkdir(exist_ok=True)
    lines = [json.dumps(pair, ensure_ascii=False) + "\n" for pair in pairs]
    target.write_text("".join(lines), encoding="utf-8")
    return len(pairs)


def pair_of(
    record: dict[str, str], modules: list[str], generator: random.Random
) -> dict[str, str]:
    """Return the pair of one record."""
    others = [module for module in modules if module != record["completion"]]
    return {
        "prompt": record["prompt"],
        "chosen": record["completion"],
        "rejected": generator.choice(others),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    print(f"preference: {make(parser.parse_args().folder)} pairs")
