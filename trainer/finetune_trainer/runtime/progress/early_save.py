"""A request to save before a checkpoint is due: any thread makes it, the training loop fulfils it."""

import math
import threading
import time

MIN_SECONDS = 10.0
"""Shortest time between two early saves, so that no number of requests slows training."""


class EarlySave:
    """A request to save at the next step boundary; there is at most one at a time."""

    def __init__(self) -> None:
        self._requested = threading.Event()
        self._taken_at = -math.inf

    def request(self) -> bool:
        """Request a save; return False if an earlier request is still waiting, which then stands for both."""
        is_new = not self._requested.is_set()
        self._requested.set()
        return is_new

    def take(self) -> bool:
        """Return whether to save now, and if so, forget the request; False until MIN_SECONDS after the last save."""
        if (
            not self._requested.is_set()
            or time.monotonic() - self._taken_at < MIN_SECONDS
        ):
            return False
        self._taken_at = time.monotonic()
        # Before the snapshot: a request from now on is for a later boundary.
        self._requested.clear()
        return True
