"""The plan for a GPU runs to its end on a CPU, with a tiny model: `TRAINING=all` runs it.

A machine with a GPU is rare, so a plan that fails there wastes it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(
    os.environ.get("TRAINING") != "all", reason="TRAINING=all runs it: three minutes"
)
def test_plan_measures_every_variant_and_resumes_equal_bytes(tmp_path: Path):
    output = tmp_path / "gpu.json"
    command: list[str | Path] = [
        "bash",
        ROOT / "bench" / "gpu.sh",
        output,
        "--device=cpu",
        "--shape=tiny",
    ]
    subprocess.run(
        command,
        env=os.environ | {"PYTHON": sys.executable},
        cwd=tmp_path,
        check=True,
        timeout=900,
    )
    figures = json.loads(output.read_text())
    assert [name for name, figure in figures.items() if "error" in figure] == []
    assert figures.pop("device") == "cpu"
    assert figures.pop("torch")
    assert len(figures.pop("pauses")["milliseconds"]) > 1
    resumes = figures.pop("resumes")
    assert resumes["equal bytes"] is True
    assert resumes["repeatable"] is True
    assert resumes["resumed from step"] >= 2
    assert resumes["seconds to the end of the first step"] > 0
    resumed = figures.pop("methods")
    assert {"LoRA", "QLoRA", "Full", "DPO", "compiled layers"} <= resumed.keys()
    assert set(resumed.values()) == {True}, resumed
    assert 0 < figures.pop("attention")["mask"]["gradients"] < 0.05  # in bf16
    assert {
        "all on",
        "HF Trainer",
        "compiled layers",
        "all logits",
        "mask",
    } <= figures.keys()
    assert all(figure["tokens/s"] > 0 for figure in figures.values())
