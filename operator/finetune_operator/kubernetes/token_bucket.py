"""A limit on the rate of requests to the API server."""

import asyncio
import math

MAX_PAUSE_SECONDS = 5.0
"""Longest pause after a 429."""


class TokenBucket:
    """Limits requests to a rate, after a burst; a 429 pauses all of them for as long as the API server asks.

    API Priority and Fairness of the API server shares it among clients. The bucket only keeps a bug from flooding it.
    """

    def __init__(self, rate: float = 500.0, burst: float = 1000.0) -> None:
        self.rate = rate
        self.burst = burst
        self._tokens = burst
        self._filled_at = -math.inf
        self._paused_until = -math.inf

    async def wait(self) -> None:
        """Wait until the next request may be sent."""
        now = asyncio.get_running_loop().time()
        self._tokens = min(
            self.burst, self._tokens + (now - self._filled_at) * self.rate
        )
        self._filled_at = now
        # Below zero: that many requests wait for their turn.
        self._tokens -= 1
        delay = max(-self._tokens / self.rate, self._paused_until - now)
        if delay > 0:
            await asyncio.sleep(delay)

    def pause(self, seconds: float) -> None:
        """Send nothing for this long, at most `MAX_PAUSE_SECONDS`."""
        now = asyncio.get_running_loop().time()
        self._paused_until = max(
            self._paused_until, now + min(seconds, MAX_PAUSE_SECONDS)
        )
