"""The memory of a merge depends on the largest layer and not on the number of layers."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[4]
SHAPE = (
    "--hidden",
    "1024",
    "--intermediate",
    "2816",
    "--vocabulary",
    "4096",
    "--rank",
    "2",
    "--shard",
    "40MB",
)
LAYER_BYTES = 2 * (1024 * (2 * 1024 + 2 * 128) + 3 * 1024 * 2816)


def peak_bytes(layers: int, folder: Path) -> float:
    """Merge a model of that many layers in a new process and return its peak memory."""
    command = [
        sys.executable,
        str(REPOSITORY / "bench" / "merge.py"),
        "--layers",
        str(layers),
        *SHAPE,
    ]
    done = subprocess.run(
        [*command, "--folder", str(folder)], capture_output=True, text=True, check=True
    )
    match = re.search(r"peak memory ([0-9.]+) GiB", done.stdout)
    assert match, done.stdout
    return float(match[1]) * 2**30


@pytest.mark.skipif(
    os.environ.get("TRAINING") != "all",
    reason="TRAINING=all runs it: two processes that merge, half a minute",
)
def test_memory_of_a_merge_does_not_grow_with_the_layers(tmp_path):
    growth = peak_bytes(26, tmp_path) - peak_bytes(4, tmp_path)
    assert growth < 0.25 * (26 - 4) * LAYER_BYTES
