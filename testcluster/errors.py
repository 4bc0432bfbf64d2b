"""Errors of the cluster verbs; the command line maps each class to an exit code."""


class UsageError(Exception):
    """A refused request: nothing was started, or what was started has been undone. Exit code 2.

    The message names the fix.
    """


class TimedOut(Exception):
    """A command that failed, or a state that was not reached in time. Exit code 1.

    The message has the end of the command's output, or the path of the logs.
    """
