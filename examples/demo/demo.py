"""`make demo`: run a whole pipeline on this machine, interrupt its training twice, and compare the adapters.

The training runs again without interruption, and both adapters must be byte-identical. Every demo starts from the
beginning; only the material (base model and data) is kept from the previous one.
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
MATERIAL = Path(".demo/material")
INTERRUPTED_RUN = Path(".demo/run")
UNINTERRUPTED_RUN = Path(".demo/undisturbed")
FAULTS = ("--evict", "train@100", "--kill", "train@250")
"""The kill comes ten steps after a checkpoint (every 20 steps), so that steps are lost and repeated."""
ADAPTER = ("adapter_model.safetensors", "adapter_config.json")
SIGINT_EXIT_CODE = 130

Status = dict[str, Any]


def main() -> None:
    """Create the material, run the pipeline with interruptions, train again without, and compare."""
    os.chdir(ROOT)
    # Waiting OpenMP threads sleep instead of spinning: on a machine with other load, spinning is many times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    seconds: dict[str, float] = {}
    with section(
        "material", "creating a data set, an evaluation task and a base model", seconds
    ):
        python(str(HERE / "material.py"), str(MATERIAL))
    with section(
        "pipeline",
        "training is evicted at step 100 (SIGTERM) and killed at step 250 (SIGKILL)",
        seconds,
    ):
        status = run_pipeline(INTERRUPTED_RUN, *FAULTS)
    outcomes = [attempt["outcome"] for attempt in status["stages"]["train"]["attempts"]]
    if outcomes != ["Interrupted", "Interrupted", "Succeeded"]:
        sys.exit(
            "demo: FAILED: training was not interrupted twice, so there is nothing to compare; see `finetune get`"
        )
    with section(
        "training again",
        "the same training without interruption, in another folder",
        seconds,
    ):
        repeated = run_pipeline(UNINTERRUPTED_RUN, "--until", "train")
    digests = check_equal(
        adapter_digests(INTERRUPTED_RUN, status),
        adapter_digests(UNINTERRUPTED_RUN, repeated),
    )
    with section("base score", "evaluating the base model with the same task", seconds):
        before = base_score()
    print_summary(status, before, digests, seconds)


@contextmanager
def section(name: str, description: str, seconds: dict[str, float]) -> Iterator[None]:
    """Print a heading, and record the duration of the block under this name."""
    print(f"\n=== {name}: {description}", flush=True)
    start = time.monotonic()
    yield
    seconds[name] = time.monotonic() - start


def run_pipeline(workdir: Path, *options: str) -> Status:
    """Run the manifest from the beginning in a work folder and return its status, with the stages by name."""
    shutil.rmtree(workdir, ignore_errors=True)
    locations = ("--workdir", str(workdir), "--claim", f"demo={MATERIAL}")
    command = (
        "-m",
        "finetune_cli",
        "run",
        str(MANIFEST),
        *locations,
        *options,
        "--json",
    )
    status: Status = json.loads(python(*command, stdout=subprocess.PIPE))
    return status | {"stages": {stage["name"]: stage for stage in status["stages"]}}


def python(*arguments: str, stdout: int | None = None) -> str:
    """Run Python with these arguments and return its output if it is a pipe; exit if it fails."""
    # Ctrl-C reaches the child as well. Ignore it here and wait, so that the child can save its work.
    previous = signal.signal(signal.SIGINT, lambda _number, _frame: None)
    completed = subprocess.run(
        [sys.executable, *arguments], stdout=stdout, text=True, check=False
    )
    signal.signal(signal.SIGINT, previous)
    if completed.returncode in {SIGINT_EXIT_CODE, -signal.SIGINT}:
        print(
            "\nstopped. The next `make demo` starts from the beginning; complete material is kept."
        )
        sys.exit(SIGINT_EXIT_CODE)
    if completed.returncode:
        print(completed.stdout or "")
        sys.exit(
            f"demo: `python {' '.join(arguments[:3])}` failed with exit code {completed.returncode}; see above"
        )
    return completed.stdout or ""


def adapter_digests(workdir: Path, status: Status) -> dict[str, str]:
    """Return the SHA-256 of each file of a run's adapter."""
    output = (
        workdir
        / "volumes/workspace/train"
        / status["stages"]["train"]["identity"]
        / "output"
    )
    return {name: digest_file(output / name) for name in ADAPTER}


def check_equal(
    interrupted: dict[str, str], uninterrupted: dict[str, str]
) -> dict[str, str]:
    """Return the digests if they are equal; exit with a message otherwise."""
    different = [name for name in ADAPTER if interrupted[name] != uninterrupted[name]]
    if different:
        sys.exit(
            f"demo: FAILED: {', '.join(different)} differs between the interrupted and the uninterrupted training"
        )
    return interrupted


def base_score() -> Score:
    """Return the base model's score in the task of the manifest's first gate."""
    # Only here: lm-eval takes memory that the runs before need.
    from finetune_trainer.stages.evaluate import scores_of  # noqa: PLC0415

    evaluate = read(MANIFEST).spec.evaluate
    if evaluate is None or not evaluate.gates:
        sys.exit(
            f"demo: {MANIFEST} has no evaluate.gates, so there is nothing to compare"
        )
    environment = Environment(
        workspace=INTERRUPTED_RUN / "volumes/workspace",
        claims=INTERRUPTED_RUN / "claims",
    )
    scores = scores_of(MATERIAL / "base-model", None, evaluate, environment)
    gate = evaluate.gates[0]
    return scores[gate.task][gate.metric]


def print_summary(
    status: Status, before: Score, digests: dict[str, str], seconds: dict[str, float]
) -> None:
    """Print scores, interruptions, digests and durations."""
    stages = status["stages"]
    gate = status["gates"][0]
    model = status["model"]["uri"]
    model_folder = MATERIAL / model.removeprefix("pvc://demo/")
    active = {name: stage["activeSeconds"] for name, stage in stages.items()}
    lost = f"{status['lostSteps']} of {stages['train']['result']['steps']} steps ({status['lostSeconds']:.1f} s)"
    lines = {
        "score before": f"{before.value:.3f} ± {before.stderr or 0:.3f} (chance: 0.125)",
        "score after": f"{gate['score']:.3f} ± {gate['stderr']:.3f} (gate: {gate['value']})",
        "interruptions": f"{status['interruptions']}; {lost} were lost and repeated",
        "adapter": "byte-identical to the adapter of the uninterrupted training",
        **{f"  {name}": f"sha256:{digest}" for name, digest in digests.items()},
        "model": f"{model} = {model_folder}",
        "answer to the prompt": repr(stages["deploy"]["result"]["answer"]),
        "seconds": f"{sum(seconds.values()):.0f}: " + format_seconds(seconds),
        "  pipeline": format_seconds(active),
    }
    print("\n=== summary")
    for name, value in lines.items():
        print(f"{name:28} {value}")
    print(f"""
Inspect the run:
  .venv/bin/finetune get --workdir {INTERRUPTED_RUN}              the stages and their attempts
  .venv/bin/finetune logs train --workdir {INTERRUPTED_RUN}       the log of training
Then edit {MANIFEST}, for example the gate or train.lora.rank, and see what must run again:
  .venv/bin/finetune plan {MANIFEST} --workdir {INTERRUPTED_RUN}
  .venv/bin/finetune run {MANIFEST} --workdir {INTERRUPTED_RUN}""")


def format_seconds(seconds: dict[str, float]) -> str:
    """Return names and whole seconds in one line."""
    return ", ".join(f"{name} {value:.0f}" for name, value in seconds.items())


if __name__ == "__main__":
    main()
