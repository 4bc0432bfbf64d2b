"""Why a stage stopped, named by what its caller should do about it.

Every message says what is wrong, where, and how to mend it.
"""

from typing import ClassVar

from finetune_trainer.exit_codes import ExitCode


class StageError(Exception):
    """A stage cannot go on; the exit code says whether trying again makes sense."""

    exit_code: ClassVar[ExitCode] = ExitCode.BUG


class ConfigInvalid(StageError):
    """Mend the manifest."""

    exit_code = ExitCode.CONFIG


class DataInvalid(StageError):
    """Mend the data, or allow more of it to be unusable."""

    exit_code = ExitCode.DATA


class SourceNotFound(StageError):
    """Mend the URI, or put something there."""

    exit_code = ExitCode.NOT_FOUND


class CredentialsRejected(StageError):
    """Mend the credentials."""

    exit_code = ExitCode.CREDENTIALS


class ServiceUnavailable(StageError):
    """Try again later: a disk is full, a server does not answer."""

    exit_code = ExitCode.UNAVAILABLE


class Interrupted(StageError):
    """Start again: the work goes on where it was saved."""

    exit_code = ExitCode.INTERRUPTED

    def __init__(self, step: int | None = None, saved_step: int | None = None) -> None:
        super().__init__("asked to stop")
        self.step = step
        self.saved_step = saved_step
