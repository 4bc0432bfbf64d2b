"""`make demo`: a whole pipeline on this machine, its training evicted twice, and the proof that this did no harm.

Every demo starts from the beginning; only the material (base model and data) is kept from the last one.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from finetune_cli.manifest.manifest import read
from finetune_trainer.contract import Environment, Score
from finetune_trainer.runtime.artifacts import digest_file

ROOT = Path(__file__).resolve().parents[2]
HERE = Path("examples/demo")
MANIFEST = HERE / "pipeline.yaml"
MATERIAL, EVICTED, UNDISTURBED = Path(".demo/material"), Path(".demo/run"), Path(".demo/undisturbed")
DRILLS = ("--evict", "train@100", "--kill", "train@250")
"""The second comes ten steps after a checkpoint, so that something is lost."""
ADAPTER = ("adapter_model.safetensors", "adapter_config.json")
INTERRUPTED = 130

Status = dict[str, Any]


def main() -> None:
    """Make the material, run the pipeline with evictions, train again without them, compare, and tell."""
    os.chdir(ROOT)
    # Threads that wait for each other sleep: where other programs want the cores, spinning is many times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    seconds: dict[str, float] = {}
    with part("material", "a data set, an exam, and a base model to adapt", seconds):
        python(str(HERE / "material.py"), str(MATERIAL))
    with part("pipeline", "training is evicted at step 100 (SIGTERM) and killed at step 250 (SIGKILL)", seconds):
        status = pipeline(EVICTED, *DRILLS)
    if [a["outcome"] for a in status["stages"]["train"]["attempts"]] != ["Interrupted", "Interrupted", "Succeeded"]:
        sys.exit("demo: FAILED: training was not interrupted twice, so there is nothing to compare; see `finetune get`")
    with part("training again", "the same, undisturbed, in a folder of its own", seconds):
        again = pipeline(UNDISTURBED, "--until", "train")
    sums = compared(adapter_sums(EVICTED, status), adapter_sums(UNDISTURBED, again))
    with part("base score", "the same exam for the base model", seconds):
        before = base_score()
    tell(status, before, sums, seconds)


@contextmanager
def part(name: str, about: str, seconds: dict[str, float]) -> Iterator[None]:
    """Say what begins, and note how long it took."""
    print(f"\n=== {name}: {about}", flush=True)
    began = time.monotonic()
    yield
    seconds[name] = time.monotonic() - began


def pipeline(workdir: Path, *options: str) -> Status:
    """Run the manifest from the beginning in a folder of its own and give its status."""
    shutil.rmtree(workdir, ignore_errors=True)
    places = ("--workdir", str(workdir), "--claim", f"demo={MATERIAL}")
    command = ("-m", "finetune_cli", "run", str(MANIFEST), *places, *options, "--json")
    status: Status = json.loads(python(*command, stdout=subprocess.PIPE))
    return status


def python(*arguments: str, stdout: int | None = None) -> str:
    """Run Python with these arguments and give what it wrote to a pipe; leave where it did not end well."""
    # Ctrl-C reaches the child as well. It ends in its own good time, and so do we: after it.
    previous = signal.signal(signal.SIGINT, lambda _number, _frame: None)
    ended = subprocess.run([sys.executable, *arguments], stdout=stdout, text=True, check=False)
    signal.signal(signal.SIGINT, previous)
    if ended.returncode in {INTERRUPTED, -signal.SIGINT}:
        print("\nstopped. `make demo` begins anew; the material is kept if it was complete.")
        sys.exit(INTERRUPTED)
    if ended.returncode:
        print(ended.stdout or "")
        sys.exit(f"demo: `python {' '.join(arguments[:3])}` ended with exit code {ended.returncode}; see above")
    return ended.stdout or ""


def adapter_sums(workdir: Path, status: Status) -> dict[str, str]:
    """Give the SHA-256 of each file of the adapter that a run has trained."""
    output = workdir / "volumes/workspace/train" / status["stages"]["train"]["identity"] / "output"
    return {name: digest_file(output / name) for name in ADAPTER}


def compared(evicted: dict[str, str], undisturbed: dict[str, str]) -> dict[str, str]:
    """Give the sums if they are the same; otherwise the demo has failed."""
    if different := [name for name in ADAPTER if evicted[name] != undisturbed[name]]:
        sys.exit(f"demo: FAILED: {', '.join(different)} differs between the evicted training and the undisturbed one")
    return evicted


def base_score() -> Score:
    """Give what the base model scores in the manifest's own task."""
    from finetune_trainer.stages.evaluate import scores_of  # noqa: PLC0415  lm-eval is big, and the runs before have ended

    evaluate = read(MANIFEST).spec.evaluate
    if evaluate is None or evaluate.gate is None:
        sys.exit(f"demo: {MANIFEST} has no evaluate.gate, so there is nothing to compare")
    environment = Environment(workspace=EVICTED / "volumes/workspace", claims=EVICTED / "claims")
    scores = scores_of(MATERIAL / "base-model", None, evaluate, environment)
    return scores[evaluate.gate.task][evaluate.gate.metric]


def tell(status: Status, before: Score, sums: dict[str, str], seconds: dict[str, float]) -> None:
    """Print what came out."""
    stages, gate = status["stages"], status["gate"]
    took = {name: stage["activeSeconds"] for name, stage in stages.items()}
    again = f"{status['lostSteps']} of {stages['train']['result']['steps']} steps ({status['lostSeconds']:.1f} s)"
    lines = {
        "score before": f"{before.value:.3f} ± {before.stderr or 0:.3f} (guessing: 0.125)",
        "score after": f"{gate['value']:.3f} ± {gate['stderr']:.3f} (gate: {gate['threshold']})",
        "interruptions": f"{status['interruptions']}; {again} had to be done again",
        "adapter": "equal byte for byte to the undisturbed training's",
        **{f"  {name}": f"sha256:{digest}" for name, digest in sums.items()},
        "model": f"{status['model']['uri']} = {MATERIAL / status['model']['uri'].removeprefix('pvc://demo/')}",
        "its answer to the prompt": repr(stages["deploy"]["result"]["answer"]),
        "seconds": f"{sum(seconds.values()):.0f}: " + parts(seconds),
        "  pipeline": parts(took),
    }
    print("\n=== what came out")
    for name, words in lines.items():
        print(f"{name:28} {words}")
    print(f"""
Look around:
  .venv/bin/finetune get --workdir {EVICTED}              the stages and their attempts
  .venv/bin/finetune logs train --workdir {EVICTED}       what training said
Then edit {MANIFEST}, for example the gate or train.lora.rank, and see what has to run again:
  .venv/bin/finetune plan {MANIFEST} --workdir {EVICTED}
  .venv/bin/finetune run {MANIFEST} --workdir {EVICTED}""")


def parts(seconds: dict[str, float]) -> str:
    """Give names and whole seconds in one line."""
    return ", ".join(f"{name} {value:.0f}" for name, value in seconds.items())


if __name__ == "__main__":
    main()
