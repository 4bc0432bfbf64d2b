"""The tasks that evaluate measures a model on."""

from typing import Annotated

from pydantic import Field, StringConstraints

from finetune_trainer.contract.models import ContractModel
from finetune_trainer.contract.uris import TaskUri

TaskName = Annotated[
    str,
    StringConstraints(
        min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"
    ),
]
HELD_OUT = "held_out"
"""Name of the task that measures the held-out records."""


class Task(ContractModel):
    """A task of lm-eval, or held_out."""

    name: TaskName
    """Name of the task in lm-eval, or in the task file. Without a file, held_out measures the validation records:
    validation_loss, and with DPO reward_accuracy."""

    file: TaskUri | None = None
    """Task file (YAML) to use instead of a built-in task; relative paths in it start at the file's folder."""

    few_shot: int | None = Field(default=None, ge=0, le=100)
    """Number of few-shot examples before each question; absent: the task's own default."""

    # Absent in place of false, so that an earlier trainer can read the config of a task without it.
    allow_code: bool | None = None
    """Run code that the task names, with the rights and the Secrets of the stage: !function in the task file and in
    the files that it includes, and metrics that are scripts of the package evaluate. Absent or false: refuse it."""

    limit: int | None = Field(default=None, ge=1, le=10_000_000)
    """Evaluate a random sample of this many questions; fewer questions give a larger standard error. The sample depends
    only on the seed, the task's name and its number of questions, so it is the same in every run."""

    @property
    def is_held_out(self) -> bool:
        """Whether the task is no task of lm-eval, but the loss on the validation records."""
        return self.name == HELD_OUT and self.file is None
