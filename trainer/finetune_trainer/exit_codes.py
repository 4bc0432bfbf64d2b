"""Exit codes of a stage's process, read by the operator."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes from BSD's sysexits.h.

    75 is an interruption: the next attempt resumes. 64, 65, 66 and 77 are permanent: another attempt would fail in
    the same way. 69, 70 and every code that is not listed are retried within the budget for failures.
    """

    DONE = 0
    CONFIG = 64
    DATA = 65
    NOT_FOUND = 66
    UNAVAILABLE = 69
    BUG = 70
    INTERRUPTED = 75
    CREDENTIALS = 77

    @property
    def is_permanent(self) -> bool:
        """Whether another attempt would end with the same code."""
        return self in {
            ExitCode.CONFIG,
            ExitCode.DATA,
            ExitCode.NOT_FOUND,
            ExitCode.CREDENTIALS,
        }


PERMANENT_EXIT_CODES = tuple(code for code in ExitCode if code.is_permanent)
