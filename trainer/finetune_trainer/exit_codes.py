"""What a stage's exit code asks of whoever started it."""

from enum import IntEnum


class ExitCode(IntEnum):
    """The codes of BSD's sysexits.h where one fits.

    75 is an interruption: started again, the stage goes on. 64, 65, 66 and 77 are permanent: another attempt would
    end the same way. 69 and 70 are retried within the budget for failures, and so is any code that is not listed.
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
        """Whether the same stage would end with this code again."""
        return self in {ExitCode.CONFIG, ExitCode.DATA, ExitCode.NOT_FOUND, ExitCode.CREDENTIALS}


PERMANENT_EXIT_CODES = tuple(code for code in ExitCode if code.is_permanent)
