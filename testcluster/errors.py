"""What keeps a cluster from being made or changed, said so that a person can mend it."""


class UsageError(Exception):
    """Nothing was begun, or what was begun has been undone; the message says how to mend it. Exit code 2."""


class TimedOut(Exception):
    """The cluster was asked for something and did not get there in time; the logs named in the message say why."""
