"""Measure training on one GPU with every option on and off, and write one JSON file.

    bash bench/gpu.sh [RESULT.json]
    python bench/gpu.py --device cpu --shape tiny       # tries the plan out; its figures mean nothing

The model has the shape of an 8B Llama and random weights, made on the device: nothing is downloaded. The rows are
packed, 4,096 tokens each, all of them full. Each variant is a run of the train stage. Of each the file has:

- tokens per second, by the median of the steps after the second, and the peak memory;
- MFU: 4 FLOPs per weight and token, because frozen weights need no gradient, over the chip's dense bf16 peak. The
  input's embedding is not counted, because a token only reads one row of it. If it is the output's weight, too, it
  is counted once. Attention's products of tokens with tokens are not counted;
- whether attention took the boundaries of documents, or why it kept a mask, which is an error.

Besides the variants:

- HF's Trainer with the same model, tokens and adapter. Each row is one document for it, so that its attention needs no
  mask;
- how long a checkpoint holds training up;
- whether a run whose process was killed and resumed in another one has the bytes of one that was not, and the seconds
  from the start of that process to the end of its first step, with all imports, and the model made on the device;
- a small model, read from files: the same for each method of training and with compiled layers. An exception
  interrupts the run there, in place of a kill;
- how far loss and gradients of packed documents are from the values of one document a row in fp32.
"""

import argparse
import contextlib
import functools
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "trainer"), str(ROOT / "bench")]

from train_bench import hf_on_gpu  # noqa: E402
from train_bench.large_model import (  # noqa: E402
    FIRST,
    SHAPES,
    VARIANTS,
    KilledOnceSaved,
    LargeModel,
    device_name,
    release_memory,
)
from train_bench.measuring import StepTimes  # noqa: E402
from train_bench.small_models import SmallModels  # noqa: E402


def main() -> None:
    """Run the plan, or one run of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument(
        "--seconds",
        type=float,
        default=480,
        help="no measurement begins later than this",
    )
    parser.add_argument(
        "--json", "--output", dest="output", type=Path, default=Path("gpu.json")
    )
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--kill", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(
            stack.enter_context(tempfile.TemporaryDirectory())
        )
        large = LargeModel(folder, options.shape, options.device)
        if options.run:
            print(
                json.dumps(
                    large.run(
                        large.compared(options.run),
                        KilledOnceSaved if options.kill else StepTimes,
                    )
                )
            )
        else:
            small = SmallModels(folder / "small", options.shape, options.device)
            large.write()
            small.write()
            measure(parts(large, small), options)


def parts(
    large: LargeModel, small: SmallModels
) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return what is measured, by its name: the most important first, for what comes last may find no time."""
    speeds = {name: functools.partial(large.speed, name) for name in VARIANTS}
    compiled = "compiled layers"
    return {
        FIRST: speeds.pop(FIRST),
        "pauses": large.pauses,
        "attention": small.attention,
        "HF Trainer": functools.partial(hf_on_gpu.speed, large),
        compiled: speeds.pop(compiled),
        "resumes": large.resumes,
        "methods": small.resumes,
        **speeds,
    }


def measure(
    parts: dict[str, Callable[[], dict[str, Any]]], options: argparse.Namespace
) -> None:
    """Run the plan until the time is up, and write the file after each part. What fails is recorded with its error."""
    began = time.monotonic()
    results = {"device": device_name(options.device), "torch": torch.__version__}
    for name, part in parts.items():
        if time.monotonic() - began > options.seconds:
            results[name] = {"error": "no time left"}
        else:
            try:
                results[name] = part()
            except Exception as error:  # noqa: BLE001  the rest of the plan must run
                results[name] = {
                    "error": f"{type(error).__name__}: {error}",
                    "trace": traceback.format_exc()[-2000:],
                }
        release_memory(options.device)
        options.output.write_text(json.dumps(results, indent=1, default=str) + "\n")
        print(
            name,
            json.dumps({k: v for k, v in results[name].items() if k != "trace"}),
            flush=True,
        )


if __name__ == "__main__":
    main()
