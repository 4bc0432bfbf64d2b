"""Run the entry point of a stage as a user without rights, in a new process: root may write everywhere."""

import os
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

from finetune_trainer.contract import Environment, ExitCode
from finetune_trainer.runtime.entrypoint import run_stage

USER = 65532
"""The user of a stage's container."""


@dataclass(frozen=True)
class Ending:
    """How a stage's process ended."""

    code: ExitCode
    failure: str


def run_as_other_user(stage: str, workspace: Path, config: str) -> Ending:
    """Run a stage as another user, or as this user if it is not root."""
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(stage, workspace, config, sender))
    process.start()
    # The process may end without an answer.
    sender.close()
    code, text = receiver.recv()
    process.join()
    return Ending(ExitCode(code), text)


def _run(stage: str, workspace: Path, config: str, sender: Connection) -> None:
    # Loaded before the change of the user, who may not read the folder of the interpreter.
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(USER)
        os.setuid(USER)
    os.environ["FINETUNE_CONFIG"] = config
    message, code = run_stage(stage, Environment(workspace))
    sender.send((int(code), message.failure.message if message.failure else ""))
