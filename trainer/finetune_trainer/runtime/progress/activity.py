"""Signs that a stage's process does its work, counted for the watchdog."""


class Activity:
    """A counter that moves while the process works, whatever it works at."""

    def __init__(self) -> None:
        self.count = 0

    def report(self) -> None:
        """Count a sign of work, such as a batch, a token, a file or an answer. Any thread may call this."""
        # Not atomic: of two threads at once, either moves the counter, and its value has no meaning.
        self.count += 1


activity = Activity()
"""The only instance, because a process runs one stage."""
