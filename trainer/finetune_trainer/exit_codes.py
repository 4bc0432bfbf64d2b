"""What a stage's exit code asks of whoever started it."""

from enum import IntEnum


class ExitCode(IntEnum):
    """The codes of BSD's sysexits.h where one fits.

    75 is an interruption: start again, it goes on. 64, 65, 66 and 77 will not get better by trying
    again. 69 and 70 may, within the budget for failures; so may any code that is not listed.
    """

    DONE = 0
    CONFIG = 64
    DATA = 65
    NOT_FOUND = 66
    UNAVAILABLE = 69
    BUG = 70
    INTERRUPTED = 75
    CREDENTIALS = 77
