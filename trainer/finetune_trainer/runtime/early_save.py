"""A request to save before a checkpoint is due: any thread makes it, the training loop fulfils it."""

import math
import threading
import time

MIN_SECONDS = 10.0
"""Shortest time between two early saves, so that no number of requests slows training."""


class EarlySave:
    """At most one request at a time, fulfilled at a step boundary."""

    def __init__(self) -> None:
        self._requested = threading.Event()
        self._taken_at = -math.inf

    def request(self) -> bool:
        """Request a save; return False if one is requested already, which stands for this request, too."""
        is_new = not self._requested.is_set()
        self._requested.set()
        return is_new

    def take(self) -> bool:
        """Return whether to save now, and if so, forget the request. It waits until MIN_SECONDS after the last one."""
        if not self._requested.is_set() or time.monotonic() - self._taken_at < MIN_SECONDS:
            return False
        self._taken_at = time.monotonic()
        self._requested.clear()  # before the snapshot: a request from now on is for a later boundary
        return True
