"""The trainer with a journal of its steps, which a test can slow down and hold: `python -c THIS_TEXT STAGE`.

It is the trainer of the image: its loop, its checkpoints, its signal handler. Files in the folder `control` of the
workspace change its pace. `pace` has the seconds after each step. While `hold-WHERE` exists, the process waits there:
`hold-step-POD` before the next step of a pod, `hold-save-STEP` in the save of a step, `hold-STAGE` before the result of
another stage. With `eat`, a step allocates memory until the kernel ends the process.
"""

import sys

from finetune_trainer.stop_signal import stop

stop.install()

import importlib  # noqa: E402
import os  # noqa: E402
import socket  # noqa: E402
import time  # noqa: E402
from contextlib import suppress  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

from finetune_trainer.runtime.entrypoint import main  # noqa: E402

CONTROL = Path(os.environ["FINETUNE_WORKSPACE"], "control")
POD = socket.gethostname()
STAGE = sys.argv[1]
PACE = 0.1


def record(event: str, value: int) -> None:
    """Add a line to the journal; the disk may be full."""
    with suppress(OSError), (CONTROL / "journal").open("a") as journal:
        journal.write(f"{POD} {event} {value} {time.time()}\n")


def hold(point: str) -> None:
    """Wait while the test wants it."""
    while (CONTROL / f"hold-{point}").exists():
        time.sleep(0.05)


def pause() -> None:
    """Wait as long as a step is to last."""
    seconds = PACE
    with suppress(OSError, ValueError):
        seconds = float((CONTROL / "pace").read_text())
    time.sleep(seconds)


def eat() -> None:
    """Allocate memory without end, if the test wants it."""
    eaten = []
    while (CONTROL / "eat").exists():
        eaten.append(b"x" * (64 << 20))


def observe_training() -> None:
    """Record every step and every save of the training."""
    from finetune_trainer.training import loop  # noqa: PLC0415  imports torch
    from finetune_trainer.training.checkpoints import format as files  # noqa: PLC0415  imports torch
    from finetune_trainer.training.checkpoints import manager  # noqa: PLC0415  imports torch

    train_step = loop.train_step

    def observed_step(run: Any) -> Any:
        hold(f"step-{POD}")
        eat()
        metrics = train_step(run)
        record("step", run.state.step)
        pause()
        return metrics

    def observed_write(folder: Path, snapshot: Any, weights_format: Any) -> None:
        record("save", snapshot.state.step)
        hold(f"save-{snapshot.state.step}")
        try:
            files.write_files(folder, snapshot, weights_format)
        except OSError:
            record("unsaved", snapshot.state.step)
            raise

    loop.train_step = observed_step
    setattr(manager, "write_files", observed_write)  # noqa: B010  the module imported the name


def observe_stage() -> None:
    """Record that the output of the stage is written."""
    module: Any = importlib.import_module(f"finetune_trainer.stages.{STAGE}")
    run = module.run

    def observed_run(config: Any, context: Any) -> Any:
        result = run(config, context)
        record(STAGE, 0)
        hold(STAGE)
        return result

    module.run = observed_run


observe_training() if STAGE == "train" else observe_stage()
code = main(sys.argv[1:])
record("exit", code)
sys.stdout.flush()
os._exit(code)
