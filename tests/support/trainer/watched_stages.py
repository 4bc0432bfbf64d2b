"""Small stages under the watchdog, for tests that run each in a new process.

A fork of the process of the tests would not do: its other threads may hold locks, which the child then waits for.
"""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.process import BaseProcess

from finetune_trainer.contract import Environment, TerminationMessage
from finetune_trainer.runtime.progress.activity import activity
from finetune_trainer.runtime.watchdog import end_process, watched
from finetune_trainer.stop_signal import StopSignal

Stage = Callable[[Environment], None]


def started(stage: Stage, place: Environment) -> BaseProcess:
    """Return a new process that runs the stage."""
    process = get_context("spawn").Process(target=stage, args=(place,))
    process.start()
    return process


def exit_code_of(stage: Stage, place: Environment) -> int | None:
    """Return the exit code of a process that runs the stage; None if it has not ended after a minute."""
    process = started(stage, place)
    process.join(60)
    code = process.exitcode
    process.kill()
    return code


def hang(place: Environment) -> None:
    with watched("push", place, StopSignal()):
        threading.Event().wait()


def report(place: Environment) -> None:
    with watched("push", place, StopSignal()):
        for _ in range(8):
            time.sleep(0.25)
            activity.report()


def read(place: Environment) -> None:
    """Read the file `model` beside the termination log again and again, without a report."""
    model = place.termination_log.with_name("model")
    with watched("push", place, StopSignal()):
        for _ in range(8):
            time.sleep(0.25)
            model.read_bytes()


def be_silent(place: Environment) -> None:
    with watched("push", replace(place, max_silence_seconds=0), StopSignal()):
        time.sleep(1.5)


def work_briefly(place: Environment) -> None:
    """Work for a moment, after the file `begun` beside the termination log is there."""
    with watched("push", place, StopSignal()):
        place.termination_log.with_name("begun").touch()
        time.sleep(0.5)


def end_twice(place: Environment) -> None:
    """End with two messages at once."""
    first = TerminationMessage.model_validate({"failure": {"message": "first"}})
    second = TerminationMessage.model_validate({"failure": {"message": "second"}})
    stop = StopSignal()
    stop.claim_exit()
    late = (place, stop, second, 3)
    threading.Thread(target=end_process, args=late, daemon=True).start()
    time.sleep(0.2)
    end_process(place, stop, first, 2)
    os._exit(0)
