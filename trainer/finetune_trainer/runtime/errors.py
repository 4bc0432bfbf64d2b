"""Errors that end a stage; each class stands for an exit code and a reaction of the caller.

Every message states what failed, the observed value, and the fix.
"""

from typing import ClassVar

from finetune_trainer.exit_codes import ExitCode

REASON_CHARACTERS = 200
"""Longest part of another library's message that an error repeats."""


class StageError(Exception):
    """A stage cannot continue; the exit code determines whether the operator retries it."""

    exit_code: ClassVar[ExitCode] = ExitCode.BUG
    device: ClassVar[bool] = False
    """Whether a device of the node may be broken, so that a later attempt avoids a node on which this happens twice."""
    machine: ClassVar[bool] = False
    """Whether the machine is the cause, so that a run on this machine alone is not retried before a person acts."""


class DeviceFailed(StageError):
    """A device of the node failed while it was used."""

    device = True


class ConfigInvalid(StageError):
    """Permanent: the user must change the manifest."""

    exit_code = ExitCode.CONFIG


class Diverged(ConfigInvalid):
    """Permanent: the loss or the gradient norm is not finite, also when it is computed again."""


class DataInvalid(StageError):
    """Permanent: the user must repair the data, or raise prepare.maxInvalidFraction."""

    exit_code = ExitCode.DATA


class SourceNotFound(StageError):
    """Permanent: the user must correct the URI, or provide what it names."""

    exit_code = ExitCode.NOT_FOUND


class CredentialsRejected(StageError):
    """Permanent: the user must correct the credentials."""

    exit_code = ExitCode.CREDENTIALS


class ServiceUnavailable(StageError):
    """Temporary: the operator retries later, for example when a disk is full or a server does not respond."""

    exit_code = ExitCode.UNAVAILABLE


class MachineUnable(ServiceUnavailable):
    """The machine has a full disk or no network. A cluster retries later, perhaps on another node."""

    machine = True


class Offline(MachineUnable):
    """The user has forbidden the requests that are needed."""


class DeviceUnavailable(ServiceUnavailable):
    """Temporary: the process has no device, or cannot use it. Another node may have a better device or driver."""

    device = True


class Replaced(StageError):
    """Another process has taken the stage's folder over: this process ends, which is no failure of the stage."""

    exit_code = ExitCode.INTERRUPTED


class Interrupted(StageError):
    """The process was asked to stop: the next attempt resumes from the last saved step."""

    exit_code = ExitCode.INTERRUPTED

    def __init__(self, step: int | None = None, saved_step: int | None = None) -> None:
        super().__init__("asked to stop")
        self.step = step
        self.saved_step = saved_step


SENTENCES = frozenset(
    {
        "AssertionError",
        "Exception",
        "IndexError",
        "RuntimeError",
        "TemplateAssertionError",
        "TemplateSyntaxError",
        "UndefinedError",
        "ValueError",
        # Of a regular expression, before Python 3.13.
        "error",
    }
)
"""Kinds of errors whose message says alone what is wrong."""
WRONG_TYPES = (AttributeError, TypeError)
"""Errors of a program that has got a value of another type than it expects."""


def short_reason(error: Exception) -> str:
    """Return what an error of another library says, on one line, cut to REASON_CHARACTERS.

    The name of the error precedes its message if it tells more than that something is wrong.
    """
    text = " ".join(str(error).split())
    kind = type(error).__name__
    cause = error.__cause__
    # huggingface_hub raises it around the error of a config's own check.
    if kind == "StrictDataclassClassValidationError" and isinstance(cause, Exception):
        return short_reason(cause)
    if kind == "StrictDataclassFieldValidationError" and cause is not None:
        # Behind the value there are classes of Python.
        text, _, _ = str(cause).partition(" any type in ")
        return text[:REASON_CHARACTERS]
    if not text:
        return kind
    if isinstance(error, KeyError):
        missing = error.args[0]
        # Some libraries raise it with a sentence.
        is_name = not isinstance(missing, str) or " " not in missing
        text = f"{missing!r} is missing or unknown" if is_name else str(missing)
    elif isinstance(error, WRONG_TYPES):
        text = f"a value has another type than expected ({text})"
    elif isinstance(error, ArithmeticError):
        text = f"a number has an impossible value ({text})"
    elif kind not in SENTENCES:
        text = f"{kind}: {text}"
    return text[:REASON_CHARACTERS]
